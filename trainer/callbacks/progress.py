"""The callback that prints the progress of a fit."""

import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from stoker.trainer import stopping, summary, terminal
from stoker.trainer.callback import Callback
from stoker.trainer.callbacks.monitoring import Monitor
from stoker.trainer.history import NUMBERS, weight_of
from stoker.trainer.loading import by_name
from stoker.trainer.number_format import number

if TYPE_CHECKING:
    from stoker.trainer.callbacks.progress_table import Table
    from stoker.trainer.trainer import Trainer

SILENCE = 30  # maximum seconds without a line


class Progress(Callback):
    """Print a line per epoch with loss, metrics, speed and the numbers passed to `trainer.log`.

    On a terminal, the lines are rows of a table, above a line that is updated during the epoch.
    Elsewhere, lines are also printed at intervals during a long epoch.
    """

    first_rank_only = True
    table: "Table | None" = None  # only on a terminal
    monitor: Monitor | None = None  # the callback that tracks the best row
    last_line: float  # time at which the last line was printed

    def on_fit_start(self, trainer: "Trainer") -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        if terminal.is_terminal(sys.stdout):
            from stoker.trainer.callbacks.progress_table import Table

            self.table = Table(trainer.step, trainer.total_steps)
        for callback in trainer.callbacks:
            if isinstance(callback, Monitor):
                self.monitor = callback
        self.last_line = time.monotonic()
        self.cells = {"loss": ""}  # column -> latest displayed value
        self.lr = ""
        self.is_evaluated = False  # whether there was an evaluation since the last line
        self.is_behind = False  # whether there is a number that is newer than the last line
        self.start_epoch()

    def start_epoch(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.fresh: set[str] = set()  # columns with a new value since the last line
        # column -> weighted sum of its values in this epoch, and sum of the weights
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.weights: defaultdict[str, float] = defaultdict(float)

    def on_log(self, trainer: "Trainer", row: dict[str, Any]) -> None:
        samples = row.get("train/samples", 0)
        splits = by_name(trainer.val_loader)
        for name, value in row.items():
            is_shown = isinstance(value, float) and not name.startswith("train/lr/")
            if name == "train/loss":
                self.show("loss", value, weight_of(row))
            elif is_shown and name not in (*NUMBERS, "epoch"):
                self.show(name, value, samples)
            if name.partition("/")[0] in splits:
                self.is_evaluated = True
        if samples:
            self.samples += samples
            self.seconds += row["train/seconds"]
            self.lr = f"{row['train/lr']:.1e}"

    def show(self, name: str, value: float, weight: float) -> None:
        """Show a number from now on. With a weight, show the mean over the epoch so far."""
        if weight:
            self.sums[name] += weight * value
            self.weights[name] += weight
            value = self.sums[name] / self.weights[name]
        self.cells[name] = number(value)
        self.fresh.add(name)
        self.is_behind = True

    def on_step_end(self, trainer: "Trainer") -> None:
        ends_epoch = trainer.step % trainer.steps_per_epoch == 0
        is_silent = self.table is None and time.monotonic() > self.last_line + SILENCE
        is_due = ends_epoch or self.is_evaluated or is_silent
        if is_due:  # also shows what callbacks logged in `on_epoch_end`
            self.line(trainer)
        # If the run is a single epoch, restart the means after each line.
        is_one_epoch = trainer.steps_per_epoch == trainer.max_steps
        if ends_epoch or (is_due and is_one_epoch):
            self.start_epoch()
        if self.table is not None and (is_due or self.table.is_due()):
            cells, more = place(trainer)
            best = number(self.best["value"]) if self.best else ""
            cells = {**cells, **self.cells, "samples/s": self.speed(), "best": best}
            self.table.draw(trainer.step, cells, {**more, "lr": self.lr})

    def speed(self) -> str:
        return f"{self.samples / self.seconds:,.0f}" if self.seconds else ""

    @property
    def best(self) -> dict[str, float] | None:
        return self.monitor.best if self.monitor else None

    def on_fit_end(self, trainer: "Trainer") -> None:
        if not trainer.failed and self.is_behind:  # such as the loss of an unfinished epoch
            self.line(trainer)
        if self.table is not None:
            self.table.close()
            self.table = None
        # A program that handles signals prints its own message.
        is_reported = trainer.interrupted and stopping.received is not None
        if trainer.stop_reason and not is_reported:
            terminal.show(f"stopped at step {trainer.step:,}: {trainer.stop_reason}")

    def line(self, trainer: "Trainer") -> None:
        """Print a line with the new values, as a row of the table if it fits."""
        is_best = self.best is not None and self.best["step"] == trainer.step
        cells, _ = place(trainer)
        for name, text in self.cells.items():
            cells[name] = text if name in self.fresh else ""
        speed = self.speed()
        self.fresh &= {"loss"}
        self.is_evaluated = False
        self.is_behind = False
        self.last_line = time.monotonic()
        row = {**cells, "samples/s": speed, "best": "*" if is_best else ""}
        if self.table is None or not self.table.row(trainer.step, row):
            parts = [f"{name} {text}" for name, text in cells.items() if text]
            if speed:
                parts.append(f"{speed} samples/s")
            self.write("  ".join(parts))

    def write(self, text: str) -> None:
        """Print a line of text. If there is a table, print it above the current step's line."""
        if self.table is None:
            print(text, flush=True)
        else:
            self.table.write(text)


def place(trainer: "Trainer") -> tuple[dict[str, str], dict[str, str]]:
    """Return ({"epoch": "2.5/10"}, {"step": "50/200"}), or ({"step": ...}, {}) for one epoch."""
    step = {"step": f"{trainer.step:,}/{trainer.total_steps:,}"}
    if trainer.steps_per_epoch == trainer.max_steps:
        return step, {}
    done = round(trainer.step / trainer.steps_per_epoch, 2)
    epochs = f"{round(trainer.total_steps / trainer.steps_per_epoch, 2):,.10g}"
    return {"epoch": f"{done:{len(epochs)},.10g}/{epochs}"}, step
