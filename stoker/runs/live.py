"""The live report of a run during training."""

import time
from pathlib import Path

from stoker.runs import directory, index, status
from stoker.runs.rows import Row
from stoker.trainer.callbacks import Callback, Checkpoint
from stoker.trainer.errors import cause, log
from stoker.trainer.trainer import Trainer

FIRST = 5  # seconds of training before the report is first drawn; shorter runs draw it at the end
EVERY = 30  # minimum seconds between updates; an open page reloads as often (report.RELOAD)
SHARE = 0.01  # maximum fraction of the time spent on updates, not counting the slow first one


class LiveReport(Callback):
    """Redraw the report of the run in `folder` when a row is logged and an update is due.

    Redrawing happens between steps and uses no random numbers. It reads only files in the folder;
    the best evaluation of `saver` is written to status.json first. List this after `saver`.
    """

    first_rank_only = True

    def __init__(self, folder: Path, saver: Checkpoint) -> None:
        self.folder = folder
        self.saver = saver
        self.is_on = True
        self.is_warm = False  # whether the first update has compiled the templates

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
        """Draw the report. If that fails, warn and do not try again until the run ends."""
        from stoker.runs import report

        try:
            status.keep_best(self.folder, self.saver)
            report.write(self.folder, "running")
            index.update(self.folder)
        except Exception as error:
            self.is_on = False
            log.warning("the report could not be drawn (%s); training continues.", cause(error))
