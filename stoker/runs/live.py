"""The live report of a running training."""

import time
from pathlib import Path

from stoker.runs.rows import Row
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import cause, log
from stoker.trainer.trainer import Trainer

EVERY = 30  # seconds between two drawings, at least
SHARE = 0.01  # of the time, at most
FIRST = 0.3  # seconds that the first drawing takes, about


class LiveReport(Callback):
    """Draw the report of the run in `folder` when a row is logged and the last one is old.

    It is drawn from the files in the folder, between two steps, and uses no random numbers.
    """

    first_rank_only = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_on = True

    def on_fit_start(self, trainer: Trainer) -> None:
        self.start = self.last = time.perf_counter()
        self.spent = 0.0
        self.next = FIRST

    def on_log(self, trainer: Trainer, row: Row) -> None:
        now = time.perf_counter()
        is_due = now - self.last >= EVERY and self.spent + self.next <= SHARE * (now - self.start)
        if not is_due or not self.is_on:
            return
        with trainer.spans["logging"]:
            self.draw()
        self.last = time.perf_counter()
        self.next = self.last - now
        self.spent += self.next

    def draw(self) -> None:
        """Draw the report; if that fails, warn, and leave it until the end of the run."""
        from stoker.runs import report

        try:
            report.write(self.folder, "running")
        except Exception as error:
            self.is_on = False
            log.warning("the report could not be drawn (%s); the training continues.", cause(error))
