"""What `Progress` shows on a terminal: a table of the epochs, and a last line that is redrawn."""

import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tqdm
from tqdm.std import EMA

from stoker.trainer import terminal
from stoker.trainer.errors import log
from stoker.trainer.readable import number

if TYPE_CHECKING:
    from stoker.trainer.callbacks import Monitor
    from stoker.trainer.trainer import Trainer

Cells = dict[str, str]

GAP = "  "
OPTIONAL = ("left", "lr", "samples/s")  # columns left out if the table is too wide
UNALIGNED = ("epoch", "step", "best", "samples/s", "left")  # columns without decimal points
ROWS = 20  # rows between two headers
EVERY = 0.1  # seconds between two drawings


class Live:
    """A table with a row per epoch or evaluation, and a line for the current step below it.

    Both have the same columns. Where these do not fit, the line has names and values instead, and
    so have the rows if the table is still too wide without the OPTIONAL ones.
    """

    def __init__(self, trainer: "Trainer", monitor: "Monitor | None") -> None:
        self.trainer = trainer
        self.monitor = monitor  # marks the best row
        self.bar = tqdm.tqdm(file=sys.stdout, bar_format="{desc}", leave=False, ncols=0)
        self.loss = EMA()
        self.current: Cells = {}  # the latest values
        self.names: Cells = {}  # all names so far, with empty cells
        self.columns: list[str] = []  # empty before the first row, or if the table is too wide
        self.widths: dict[str, int] = {}
        self.decimals: dict[str, int] = {"lr": 6}  # the most per column, to align points
        self.rows: int = 0  # rows since the header
        self.first_step: int = trainer.step
        self.start: float = time.monotonic()
        self.drawn: float = 0.0
        log.addFilter(self.clear)

    def clear(self, _: logging.LogRecord) -> bool:
        """Clear the line, so that a warning begins on an empty one."""
        self.bar.clear()
        return True

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the training numbers from a logged row."""
        if "train/loss" in row:
            self.current["loss"] = short(self.loss(row["train/loss"]))
        if row.get("train/seconds"):
            self.current["lr"] = short(row["train/lr"])
            self.current["samples/s"] = f"{row['train/samples'] / row['train/seconds']:,.0f}"

    def place(self, is_over: bool) -> Cells:
        """Return {"epoch": "3/10", "step": "60/200"}, of the epoch that is over or going on.

        There is no epoch if all steps make one.
        """
        trainer = self.trainer
        cells = {"step": f"{trainer.step:,}/{trainer.total_steps:,}"}
        if trainer.steps_per_epoch == trainer.max_steps:
            return cells
        epochs = math.ceil(trainer.total_steps / trainer.steps_per_epoch)
        done = trainer.step / trainer.steps_per_epoch
        text = f"{done:,.0f}" if done.is_integer() else f"{done:.2f}"
        if not is_over:
            text = f"{min(int(done) + 1, epochs):,}"
        return {"epoch": f"{text}/{epochs:,}", **cells}

    def row(self, numbers: Mapping[str, float], speed: str) -> None:
        """Print the row of an epoch or an evaluation."""
        best = self.monitor.best if self.monitor else None
        is_best = best is not None and best["step"] == self.trainer.step
        values = {name: short(value) for name, value in numbers.items()}
        self.current.update(values)
        self.names.update(dict.fromkeys(values, ""))
        cells = {
            **self.place(is_over=True),
            **self.names,
            **values,
            "best": "*" if is_best else "",
            "lr": self.current.get("lr", ""),
            "samples/s": speed,
            "left": self.left(),
        }
        self.arrange(cells)
        if self.columns:
            self.bar.write(self.aligned(cells))
        else:
            self.write(labelled({**cells, "left": ""}))  # the line below says it
        self.rows += 1
        self.draw()

    def left(self) -> str:
        """Return the time left, such as "01:30"; "" before the first step."""
        done = self.trainer.step - self.first_step
        if not done:
            return ""
        rest = self.trainer.total_steps - self.trainer.step
        text: str = self.bar.format_interval((time.monotonic() - self.start) / done * rest)
        return text

    def arrange(self, cells: Cells) -> None:
        """Choose the columns for a row, and print a header where one is due."""
        widths = dict(self.widths)
        for name, text in cells.items():
            if name not in UNALIGNED:
                self.decimals[name] = max(self.decimals.get(name, 0), decimals(text))
                text = self.padded(name, text)
            least = {"left": 5, "best": 6}.get(name, 7)
            if name in ("epoch", "step"):
                least = 2 * len(text.partition("/")[2]) + 1
            self.widths[name] = max(self.widths.get(name, least), len(name), len(text))
        columns = list(cells)
        for name in OPTIONAL:
            if self.total(columns) >= terminal.width():
                columns.remove(name)
        if self.total(columns) >= terminal.width():
            columns = []
        if columns != self.columns or self.widths != widths or self.rows % ROWS == 0:
            self.columns = columns
            self.rows = 0
            if columns:
                header = self.aligned({name: name for name in columns})
                self.bar.write(terminal.styled(header, "bold"))

    def total(self, columns: list[str]) -> int:
        return sum(self.widths[name] + len(GAP) for name in columns) - len(GAP)

    def aligned(self, cells: Cells) -> str:
        """Return cells as a row of the table."""
        texts = []
        for name in self.columns:
            text = self.padded(name, cells.get(name, ""))
            texts.append(text.rjust(self.widths[name]))
        return GAP.join(texts).rstrip()

    def padded(self, name: str, text: str) -> str:
        """Return a number with as many letters after its point as its column has."""
        is_number = text[-1:].isdigit()
        return text + " " * (self.decimals.get(name, 0) - decimals(text)) if is_number else text

    def step(self) -> None:
        """Draw the line, unless it was drawn a moment ago."""
        if time.monotonic() > self.drawn + EVERY:
            self.draw()

    def draw(self) -> None:
        """Draw the line of the current step."""
        self.drawn = time.monotonic()
        cells = {
            **self.place(is_over=False),
            "loss": self.current.get("loss", ""),
            "left": self.left(),
        }  # the first cells matter most
        cells.update(self.current)
        if self.monitor is not None and self.monitor.best is not None:
            cells["best"] = short(self.monitor.best["value"])
        room = terminal.width() - 1
        has_all = self.columns and set(OPTIONAL) <= set(self.columns)
        text = self.aligned(cells) if has_all else labelled(cells, room)
        text = text[:room].replace("\xa0", " ").ljust(room)
        # a typed ^C appears over this line, not on the next one
        self.bar.set_description_str(text + "\r")

    def write(self, text: str) -> None:
        """Print text above the line."""
        self.bar.write(terminal.wrapped(text).replace("\xa0", " "))

    def close(self) -> None:
        """Remove the line."""
        log.removeFilter(self.clear)
        self.bar.set_description_str(" " * (terminal.width() - 1) + "\r")
        self.bar.close()


def decimals(text: str) -> int:
    """Return how many letters a number has from its decimal point on."""
    return len(text) - len(text.partition(".")[0])


def short(value: float) -> str:
    """Return "0.9861", "0.00083" or "3.2e-05", of a width that changes little."""
    return f"{value:#.2g}" if 0 < abs(value) < 0.001 else number(value)


def labelled(cells: Cells, room: float = math.inf) -> str:
    """Return "epoch 3/10  loss 0.1182" of the cells that fit, with no break within one of them."""
    text = ""
    for name, value in cells.items():
        part = f"{name}\xa0{value}"
        if value and len(text) + len(GAP) + len(part) <= room:
            text += f"{GAP}{part}"
    return text.removeprefix(GAP)
