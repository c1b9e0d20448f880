"""The live report of a run in training."""

import time
from pathlib import Path

from stoker.runs import directory, index
from stoker.runs.rows import Row
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import cause, log
from stoker.trainer.trainer import Trainer

FIRST = 5  # seconds of training before the first drawing; a shorter run is drawn at its end
EVERY = 30  # minimum seconds between two drawings
SHARE = 0.01  # fraction of the time that drawing may take, except for the first one, which is slow


class LiveReport(Callback):
    """Draw the report of the run in `folder` when a row is logged and the last drawing is old.

    It is drawn from the files in the folder, between two steps, and uses no random numbers.
    """

    first_rank_only = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_on = True
        self.is_warm = False  # the first drawing compiles the templates

    def on_fit_start(self, trainer: Trainer) -> None:
        print(f"report   {self.folder / directory.REPORT} (live)", flush=True)
        self.due = time.perf_counter() + FIRST

    def on_log(self, trainer: Trainer, row: Row) -> None:
        begin = time.perf_counter()
        if begin < self.due or not self.is_on:
            return
        with trainer.spans["report"]:
            self.draw()
        end = time.perf_counter()
        cost = end - begin if self.is_warm else 0.0
        self.due = end + max(EVERY, cost / SHARE)
        self.is_warm = True

    def draw(self) -> None:
        """Draw the report; if that fails, warn, and leave it until the end of the run."""
        from stoker.runs import report

        try:
            report.write(self.folder, "running")
            index.update(self.folder, draws=False)
        except Exception as error:
            self.is_on = False
            log.warning("the report could not be drawn (%s); training continues.", cause(error))
