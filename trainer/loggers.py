"""Loggers: callbacks that write each row of numbers somewhere. JSONL is always on; TensorBoard is an extra."""

import errno
import itertools
import json
import os
from pathlib import Path

from trainer.callbacks import Callback
from trainer.errors import UserError
from trainer.files import open_plain, replacing
from trainer.rundir import finite
from trainer.state import check_like


class JSONL(Callback):
    """Appends each row to the file `path`, one JSON object a line.

    Before the first row of a fit, those go that the state at its beginning did not know of: none is there twice.
    """

    first_rank_only = True

    def __init__(self, path):
        self.path, self.rows = Path(path), None
        self.begun_at = None  # the step, until the first row

    def on_fit_start(self, trainer):
        self.begun_at = trainer.step

    def on_log(self, trainer, row):
        if self.begun_at is not None:
            self.cut()
        line = (json.dumps(finite(row)) + "\n").encode()
        with open_plain(self.path, os.O_RDWR | os.O_CREAT) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(line) < len(line):  # at once, so that a killed run leaves whole lines
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.rows += 1

    def cut(self):
        """Leaves the rows up to the fit's beginning, in a new file: others may have a link to the old one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if os.path.lexists(self.path):
            before = itertools.takewhile(lambda pair: pair[0]["step"] <= self.begun_at, rows_in(self.path))
            kept = [line for _, line in before][: self.rows] if self.begun_at else []
            with replacing(self.path) as partial:
                Path(partial).write_bytes(b"".join(kept))
        self.rows, self.begun_at = len(kept), None

    def state_dict(self):
        return {"rows": self.rows} if self.rows else {}

    def check_state(self, trainer, state, name):
        check_like(state, {"rows": 0} if state else {}, name)

    def load_state_dict(self, state):
        self.rows = state.get("rows", 0)


def rows_in(path):
    """Yields (row, line) of what JSONL wrote, to the first line that is no row."""
    with open_plain(path) as file:
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return
        yield row, line


def read_rows(path):
    """The rows that JSONL wrote, none where there is no such file."""
    return [row for row, _ in rows_in(path)] if os.path.lexists(path) else []


class TensorBoard(Callback):
    """Writes the floats of each row to event files in `folder`; needs the extra `tensorboard`."""

    first_rank_only = True

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
    """Writes the config to `path` when all is checked and the training begins: last in the list, after what checks.

    One that begins at step 0 removes the files `stale` beside it, which an older run has left.
    """

    first_rank_only = True

    def __init__(self, path, config, stale=()):
        self.path, self.config, self.stale = Path(path), config, stale

    def on_fit_start(self, trainer):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for name in self.stale if not trainer.step else ():
            (self.path.parent / name).unlink(missing_ok=True)
        with replacing(self.path) as partial:  # and not through a link that somebody left there
            Path(partial).write_text(self.config, encoding="utf-8")
