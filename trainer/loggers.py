"""Loggers: callbacks that write each row of numbers somewhere. JSONL is always on; TensorBoard is an extra."""

import itertools
import json
import os
from pathlib import Path

from trainer.callbacks import Callback
from trainer.errors import UserError
from trainer.files import open_plain, replacing
from trainer.rundir import finite


class JSONL(Callback):
    """Appends each row to the file `path`, one JSON object a line.

    The first row of a fit cuts those after the step at which it began (from step 0: all), so none is there twice.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.cut_after = None

    def on_fit_start(self, trainer):
        self.cut_after = trainer.step

    def on_log(self, trainer, row):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(finite(row)) + "\n"
        with open_plain(self.path, os.O_RDWR | os.O_CREAT) as file:
            if self.cut_after is not None:
                kept = itertools.takewhile(lambda row: row[0]["step"] <= self.cut_after, rows_in(file))
                file.truncate(max((end for _, end in kept), default=0) if self.cut_after else 0)
                self.cut_after = None
            file.seek(0, os.SEEK_END)
            file.write(line.encode())  # one write a row: a killed run leaves whole lines


def rows_in(file):
    """Yields (row, where it ends) of the rows that JSONL wrote, to the first line that is none."""
    end = 0
    for line in file.read().splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return
        end += len(line)
        yield row, end


def read_rows(path):
    """The rows that JSONL wrote, none where there is no such file."""
    if not os.path.lexists(path):
        return []
    with open_plain(path) as file:
        return [row for row, _ in rows_in(file)]


class TensorBoard(Callback):
    """Writes the floats of each row to event files in `folder`; needs the extra `tensorboard`."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        self.writer = None
        try:
            import tensorboard  # noqa: F401 (only to know, before anything is trained, that it is there)
        except ImportError:
            raise UserError("callbacks=tensorboard needs TensorBoard.\nType pip install -e '.[tensorboard]'.") from None

    def on_log(self, trainer, row):
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=trainer.step)
        for name, value in row.items():
            if isinstance(value, float):
                self.writer.add_scalar(name, value, row["step"])

    def on_fit_end(self, trainer):
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class ConfigFile(Callback):
    """Writes the config to `path` when all is checked and the training begins: last in the list, after what checks."""

    def __init__(self, path, config):
        self.path, self.config = Path(path), config

    def on_fit_start(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:  # and not through a link that somebody left there
            Path(partial).write_text(self.config, encoding="utf-8")
