"""Loggers: callbacks that write each row of numbers somewhere. JSONL is always on; TensorBoard is an extra."""

import json
import os
from pathlib import Path

from trainer.callbacks import Callback
from trainer.errors import UserError
from trainer.rundir import finite


class JSONL(Callback):
    """Appends each row to the file `path`, one JSON object a line.

    A fit first cuts the rows after its step (from step 0: all), so none is there twice.
    """

    def __init__(self, path):
        self.path = Path(path)

    def on_fit_start(self, trainer):
        if not self.path.exists():
            return
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not trainer.step or not line.endswith(b"\n") or json.loads(line)["step"] > trainer.step:
                break
            end += len(line)
        os.truncate(self.path, end)

    def on_log(self, trainer, row):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:  # one write a row: a killed run leaves whole lines
            file.write(json.dumps(finite(row)) + "\n")


def read_rows(path):
    """The rows that JSONL wrote, none where there is no such file."""
    return (
        [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        if Path(path).exists()
        else []
    )


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
        self.path.write_text(self.config, encoding="utf-8")
