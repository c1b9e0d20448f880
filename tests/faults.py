"""A callback by which a test has one rank of several fail, at a step of its own choice."""

import os
import signal
import time
from pathlib import Path

from stoker.trainer import launch, stopping
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError


class Fault(Callback):
    """After `step`, `rank` does what `kind` says, once: in the first attempt of torchrun. -1: all
    ranks do.
    """

    def __init__(self, kind, step, rank=1):
        self.kind, self.step, self.rank = kind, step, rank

    def on_step_end(self, trainer):
        if launch.is_first():
            Path("steps").write_text(str(trainer.step))
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if trainer.step == self.step and self.rank in (-1, launch.rank()) and not again:
            getattr(self, self.kind)()

    def on_fit_end(self, trainer):
        """Under kill_then_signal, the signal of an agent comes while this rank's fit fails."""
        if self.kind == "kill_then_signal" and trainer.failed:
            stopping.on_signal = None  # as after the fit
            os.kill(os.getpid(), signal.SIGTERM)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    kill_then_signal = kill

    def hang(self):
        time.sleep(600)

    def nap(self):
        while not Path("err.0").stat().st_size:  # rank 0 has said something
            time.sleep(0.1)

    def mistake(self):
        raise UserError("callbacks.fault: a mistake.")

    def fails(self):
        raise TrainingError("it is no good.")

    def bug(self):
        raise ZeroDivisionError("a bug")

    def children(self):
        try:
            Path("children").write_text(
                str(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT))
            )
        except ChildProcessError:
            Path("children").write_text("none")

    def slow(self):
        time.sleep(0.1)
        self.step += 1


def other():
    """A data set that is another one on each rank."""
    from stoker.data.datasets import synthetic

    data = synthetic(n=190, split_seed=launch.rank())
    data.name = "other"
    return data
