"""The callback that prints the progress of a fit."""

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from stoker.trainer import stopping, summary, terminal
from stoker.trainer.callback import Callback
from stoker.trainer.callbacks.monitoring import Monitor
from stoker.trainer.history import weight_of
from stoker.trainer.loading import by_name
from stoker.trainer.readable import number
from stoker.trainer.window import NUMBERS

if TYPE_CHECKING:
    from stoker.trainer.callbacks.live import Live
    from stoker.trainer.trainer import Trainer

SILENCE = 30  # seconds between lines within an epoch


class Progress(Callback):
    """Print a line per epoch with loss, metrics, speed and the numbers passed to `trainer.log`.

    On a terminal these are the rows of a table, above a line that is updated at each step.
    Elsewhere, a line is also printed at intervals during a long epoch.
    """

    first_rank_only = True
    live: "Live | None" = None  # on a terminal
    monitor: Monitor | None = None  # marks the best row
    last_line: float  # when it was printed
    is_evaluated: bool = False  # whether an evaluation ran since the last line

    def on_fit_start(self, trainer: "Trainer") -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        if terminal.is_terminal(sys.stdout):
            from stoker.trainer.callbacks.live import Live

            self.live = Live(trainer.step, trainer.total_steps)
        for callback in trainer.callbacks:
            if isinstance(callback, Monitor):
                self.monitor = callback
        self.last_line = time.monotonic()
        self.names: dict[str, str] = {}  # all names so far, with empty values
        self.current: dict[str, str] = {}  # the latest numbers, for the live line
        self.start_epoch()

    def start_epoch(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.loss: dict[str, str] = {}  # {"loss": mean over the epoch so far}
        self.numbers: dict[str, str] = {}  # logged since the last line
        # {name: (weighted sum, weight)} of the training numbers
        self.sums: dict[str, tuple[float, float]] = {}

    def on_log(self, trainer: "Trainer", row: dict[str, Any]) -> None:
        samples = row.get("train/samples", 0)
        self.samples += samples
        self.seconds += row.get("train/seconds", 0.0)
        for name, value in row.items():
            is_shown = isinstance(value, float) and not name.startswith("train/lr/")
            if name == "train/loss":
                self.loss["loss"] = number(self.mean(name, value, weight_of(row)))
            elif is_shown and name not in (*NUMBERS, "epoch"):
                mean = self.mean(name, value, samples) if samples else value
                self.numbers[name] = number(mean)
        self.current.update({**self.loss, **self.numbers})
        if "train/lr" in row:
            self.current["lr"] = f"{row['train/lr']:.1e}"
            self.current["samples/s"] = f"{samples / row['train/seconds']:,.0f}"
        for split in by_name(trainer.val_loader):
            if any(f"{split}/{name}" in row for name in ("loss", *trainer.metrics)):
                self.is_evaluated = True

    def mean(self, name: str, value: float, weight: float) -> float:
        """Return a training number's mean over the epoch so far."""
        total, before = self.sums.get(name, (0.0, 0.0))
        total += weight * value
        self.sums[name] = (total, before + weight)
        return total / (before + weight)

    def on_step_end(self, trainer: "Trainer") -> None:
        ends_epoch = trainer.step % trainer.steps_per_epoch == 0
        is_silent = self.live is None and time.monotonic() > self.last_line + SILENCE
        is_due = ends_epoch or self.is_evaluated or is_silent
        if is_due:  # with what `on_epoch_end` logged
            self.line(trainer)
        if ends_epoch:
            self.start_epoch()
        if self.live is not None and (is_due or self.live.is_due()):
            self.live.draw(trainer.step, {**place(trainer), **self.current})

    def on_fit_end(self, trainer: "Trainer") -> None:
        if not trainer.failed and self.numbers:  # logged after the last line
            self.line(trainer)
        if self.live is not None:
            self.live.close()
            self.live = None
        # A program that handles signals prints its own message.
        is_told = trainer.interrupted and stopping.received is not None
        if trainer.stop_reason and not is_told:
            terminal.show(f"stopped at step {trainer.step:,}: {trainer.stop_reason}")

    def line(self, trainer: "Trainer") -> None:
        """Print a line with the numbers so far."""
        numbers = {**self.loss, **self.numbers}
        self.numbers = {}
        self.names.update(dict.fromkeys(numbers, ""))
        self.is_evaluated = False
        cells = {**place(trainer), **self.names, **numbers}
        speed = f"{self.samples / self.seconds:,.0f}" if self.seconds else ""
        if "epoch" not in cells:  # data without a length has one long epoch: start a new mean
            self.start_epoch()
        best = self.monitor.best if self.monitor else None
        if best is not None:
            self.current["best"] = number(best["value"])
        if self.live is not None:
            mark = "*" if best is not None and best["step"] == trainer.step else ""
            row = {**cells, "best": mark}
            more = {"lr": self.current.get("lr", ""), "samples/s": speed}
            if self.live.row({**row, **more}) or self.live.row(row):
                return
        if "epoch" in cells:
            cells.pop("step")
        parts = [f"{name} {text}" for name, text in cells.items() if text]
        if speed:
            parts.append(f"{speed} samples/s")
        self.write("  ".join(parts))

    def write(self, text: str) -> None:
        """Print a line above the live one."""
        self.last_line = time.monotonic()
        if self.live is None:
            print(text, flush=True)
        else:
            self.live.write(text)


def place(trainer: "Trainer") -> dict[str, str]:
    """Return {"epoch": "2.50/10", "step": "50/200"}, without the epoch if there is only one."""
    cells = {"step": f"{trainer.step:,}/{trainer.total_steps:,}"}
    if trainer.steps_per_epoch == trainer.max_steps:
        return cells
    epochs = f"{math.ceil(trainer.total_steps / trainer.steps_per_epoch):,}"
    done = trainer.step / trainer.steps_per_epoch
    decimals = 0 if done.is_integer() else 2
    return {"epoch": f"{done:{len(epochs)},.{decimals}f}/{epochs}", **cells}
