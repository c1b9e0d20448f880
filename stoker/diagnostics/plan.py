"""Estimate the memory, disk space and time of a run from a few real steps."""

import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

from stoker.trainer import checkpoint, graph, summary, terminal
from stoker.trainer import device as devices
from stoker.trainer.batches import entries
from stoker.trainer.callbacks import EMA, Callback, Freeze, Lookahead
from stoker.trainer.loading import by_name, length_of, resident_bytes
from stoker.trainer.memory import MIB
from stoker.trainer.trainer import Trainer

WARMUP = graph.WARMUP  # untimed steps, in which torch chooses kernels and creates optimizer state
STEPS = 10  # timed steps, at least
LONG = 1.0  # seconds after which no more steps are timed
MOST = 200  # timed steps, at most
BATCHES = 10  # batches in a timed evaluation


@dataclass
class Estimate:
    """The measurements, in seconds and MiB."""

    steps: int  # steps in the whole run
    timed: int
    first: float  # extra time of the first step, to compile and to choose kernels
    step: float
    evaluation: float  # one evaluation on the validation split
    test: float
    checkpoint: float
    memory: dict[str, float]


class Watch(Callback):
    """Time a few steps after the first ones, and end the fit."""

    # Copies of the state, like those that a run keeps for its NaNGuard and while it writes a
    # checkpoint. They count toward the measured memory.
    first_state: Any
    state: Any

    def on_fit_start(self, trainer: Trainer) -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        self.untimed = min(WARMUP, trainer.total_steps - 1)
        self.first_state = checkpoint.copy(trainer.state_dict())
        self.began = time.perf_counter()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 1:
            self.first = self.elapsed(trainer)
            self.state = checkpoint.copy(trainer.state_dict())
        if trainer.step == self.untimed:
            self.began += self.elapsed(trainer)
        self.timed = trainer.step - self.untimed
        is_long = time.perf_counter() - self.began >= LONG
        if self.timed >= MOST or (self.timed >= STEPS and is_long):
            trainer.stop("planned")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.seconds = self.elapsed(trainer)

    def elapsed(self, trainer: Trainer) -> float:
        """Wait for the device, and return the seconds since `began`."""
        devices.synchronize(trainer.device)
        return time.perf_counter() - self.began


def look(
    trainer: Trainer,
    train_loader: Any,
    val_loader: Any = None,
    test_loader: Any = None,
) -> Estimate:
    """Train a few steps and return the estimate.

    The only callbacks that run are those that average weights or freeze them for the whole run. Do
    not use the trainer afterward, because these steps change its weights.
    """
    watch = Watch()
    averages = [c for c in trainer.callbacks if isinstance(c, EMA | Lookahead)]
    # Weights that thaw later need memory from then on, so they are not frozen here.
    frozen = [c for c in trainer.callbacks if isinstance(c, Freeze) and c.thaw_step == math.inf]
    trainer.callbacks = [*frozen, *averages, watch]
    trainer.fit(train_loader)
    validation = by_name(val_loader).values()
    evaluation = math.fsum(seconds_of(trainer, loader) for loader in validation)
    test = seconds_of(trainer, test_loader)
    memory = trainer.memory_report()
    memory["data"] = resident_bytes(train_loader, *validation, test_loader) / MIB
    if averages:
        memory["averages"] = mib_of([average.state_dict() for average in averages])
    step = watch.seconds / max(1, watch.timed)
    return Estimate(
        steps=trainer.total_steps,
        timed=watch.timed,
        first=max(0.0, watch.first - step),
        step=step,
        evaluation=evaluation,
        test=test,
        checkpoint=mib_of(watch.state),
        memory=memory,
    )


def mib_of(state: Any) -> float:
    """Return the size in MiB of all tensors in a nested state."""
    return summary.mib(tensor for _, tensor in entries(state))


def seconds_of(trainer: Trainer, loader: Any) -> float:
    """Estimate the seconds of an evaluation from its first batches; 0 without a loader."""
    if loader is None:
        return 0.0
    trainer.evaluate(itertools.islice(iter(loader), 1))
    length = length_of(loader) or BATCHES  # for a stream, this is a lower bound
    count = min(BATCHES, length)
    start = time.perf_counter()
    trainer.evaluate(itertools.islice(iter(loader), count))  # waits for the device
    return (time.perf_counter() - start) / count * length
