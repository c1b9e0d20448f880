"""Estimate the memory, disk space and time of a run from a few real steps."""

import contextlib
import itertools
import math
import time
import warnings
from dataclasses import dataclass
from typing import Any

from stoker.diagnostics.activations import Saved, can_be_counted
from stoker.runs.page import render
from stoker.trainer import checkpoint, graph, schedules, summary, terminal
from stoker.trainer import device as devices
from stoker.trainer.batches import entries
from stoker.trainer.callbacks import EMA, Callback, Freeze, Lookahead, NaNGuard
from stoker.trainer.loading import by_name, length_of, resident_bytes
from stoker.trainer.memory import MIB
from stoker.trainer.trainer import Trainer

WARMUP = graph.WARMUP  # untimed steps, in which torch chooses kernels and creates optimizer state
STEPS = 10  # timed steps, at least
LONG = 1.0  # seconds after which no more steps are timed
MOST = 200  # timed steps, at most
BATCHES = 10  # batches in a timed evaluation
MOST_RATES = 10**6  # learning rates computed for a schedule


@dataclass
class Estimate:
    """The measurements, in seconds and MiB, and the learning rate of each step, counted from 1."""

    steps: int  # steps in the whole run
    timed: int
    first: float  # extra time of the first step, to compile and to choose kernels
    step: float
    evaluation: float  # one evaluation on the validation split
    test: float
    copy: float  # copying the state for a checkpoint
    checkpoint: float
    memory: dict[str, float]
    rates: dict[int, float]


class Watch(Callback):
    """Time a few steps after the first ones, measure the activations of one step, and end the fit.

    `every` is the number of steps between checkpoints. If a checkpoint is due before the end of the
    run, a copy of the state is held during the measured step, as when a checkpoint is written.
    `keeps_first` says whether to hold a copy of the initial state too, as NaNGuard does.
    """

    def __init__(self, every: float, keeps_first: bool) -> None:
        self.every = every
        self.keeps_first = keeps_first
        self.first_state: Any = None
        self.copy: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        self.steps = trainer.total_steps
        self.timed = 0
        self.first = 0.0
        self.seconds = 0.0
        self.saved = Saved(trainer.module)
        if self.keeps_first:
            self.first_state = checkpoint.copy(trainer.state_dict())
        self.settings = [dict(group) for group in trainer.optimizer.param_groups]
        self.measuring = contextlib.ExitStack()
        self.begun = time.perf_counter()

    def on_step_end(self, trainer: Trainer) -> None:
        self.measuring.close()
        self.copy = None
        if trainer.step == WARMUP - 1:
            self.measure_next(trainer)
        is_last = trainer.step == trainer.total_steps
        timed = trainer.step - WARMUP
        if trainer.step == 1 or timed % STEPS == 0 or is_last:
            devices.synchronize(trainer.device)
            now = time.perf_counter()
            if trainer.step == 1:
                self.first = now - self.begun
            if timed == 0 and not is_last:
                self.begun = now
            self.timed = timed if timed > 0 else trainer.step
            self.seconds = (now - self.begun) / self.timed
            if timed >= MOST or (timed >= STEPS and now - self.begun >= LONG):
                trainer.stop("planned")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.measuring.close()

    def measure_next(self, trainer: Trainer) -> None:
        """Measure the next step's activations while a copy of the state is held."""
        if self.every < trainer.total_steps:
            self.copy = checkpoint.copy(trainer.state_dict())
        if can_be_counted(trainer):
            self.measuring.enter_context(self.saved.counted())


def look(
    trainer: Trainer,
    train_loader: Any,
    val_loader: Any = None,
    test_loader: Any = None,
    every: float = math.inf,
) -> Estimate:
    """Train a few steps and return the estimate.

    The only callbacks that run are those that average weights, or freeze weights until the end.
    `every` is the number of steps between checkpoints, apart from the one at the end. Do not use
    the trainer afterward, because these steps change its weights.
    """
    is_guarded = any(isinstance(callback, NaNGuard) for callback in trainer.callbacks)
    watch = Watch(every, keeps_first=is_guarded)
    averages = [c for c in trainer.callbacks if isinstance(c, EMA | Lookahead)]
    # Weights that thaw later need memory from then on, so they are not frozen here.
    frozen = [c for c in trainer.callbacks if isinstance(c, Freeze) and c.count == math.inf]
    trainer.callbacks = [*frozen, *averages, watch]
    trainer.fit(train_loader)
    validation = by_name(val_loader).values()
    evaluation = math.fsum(seconds_of(trainer, loader) for loader in validation)
    test = seconds_of(trainer, test_loader)
    start = time.perf_counter()
    state = checkpoint.copy(trainer.state_dict())
    copy = time.perf_counter() - start

    step = summary.memory_of_a_step(trainer)
    memory = {part: step[part] for part in ("parameters", "gradients", "optimizer")}
    memory["data"] = resident_bytes(train_loader, *validation, test_loader) / MIB
    if watch.saved.most:
        memory["activations"] = watch.saved.most / MIB
    if averages:
        memory["averages"] = mib_of([average.state_dict() for average in averages])
    if trainer.device.type == "cpu":
        memory["copy for a checkpoint"] = mib_of(state)
        if is_guarded:
            memory["copy of the initial state"] = mib_of(watch.first_state)
    memory["peak"] = step["peak"]
    return Estimate(
        steps=watch.steps,
        timed=watch.timed,
        first=max(0.0, watch.first - watch.seconds),
        step=watch.seconds,
        evaluation=evaluation,
        test=test,
        copy=copy,
        checkpoint=mib_of(state),
        memory=memory,
        rates=rates(trainer, watch.settings, watch.steps),
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


def rates(trainer: Trainer, before: list[dict[str, Any]], steps: int) -> dict[int, float]:
    """Return {step: learning rate of the first group}; {} if it would take too long to compute.

    `before` contains the parameter groups before the first step.
    """
    if steps > MOST_RATES:
        return {}
    for group, settings in zip(trainer.optimizer.param_groups, before, strict=True):
        group.clear()
        group.update(settings)
    result: dict[int, float] = {}
    with warnings.catch_warnings():  # torch warns about schedulers whose optimizer takes no steps
        warnings.simplefilter("ignore")
        scheduler = schedules.build(trainer.make_scheduler, trainer.optimizer, steps)
        for step in range(1, steps + 1):
            result[step] = float(trainer.optimizer.param_groups[0]["lr"])
            scheduler.step()
    return result


def lines(
    estimate: Estimate,
    started: float,
    evaluations: int,
    saves: int,
    keep: int,
    minutes: float | None = None,
) -> list[str]:
    """Return the lines of the plan, which follow the opening lines of a run.

    Args:
        estimate: The measurements.
        started: Seconds until the first step.
        evaluations: How many evaluations the run has.
        saves: How many checkpoints the run writes.
        keep: How many checkpoints are kept.
        minutes: The time limit.
    """
    rates = estimate.rates
    parts = {name: size for name, size in estimate.memory.items() if name != "peak"}
    peak = estimate.memory["peak"]
    text = render(
        "plan.txt.jinja",
        run=estimate,
        named=sorted({1, max(rates, key=rates.__getitem__), max(rates)}) if rates else [],
        parts=parts,
        peak=sum(parts.values()) if math.isnan(peak) else peak,
        started=started,
        evaluations=evaluations,
        saves=saves,
        keep=keep,
        minutes=minutes,
    )
    return text.splitlines()
