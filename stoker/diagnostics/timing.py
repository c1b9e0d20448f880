"""Split the time of a fit into stages by sampling steps; `speed_advice` says what to change."""

import itertools
import random
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

from stoker.diagnostics.speed_advice import speed_verdict
from stoker.runs.result import STAGES
from stoker.trainer import device as devices
from stoker.trainer.callbacks import Callback, Progress
from stoker.trainer.spans import NAMES, SILENT, silent_spans
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

ALWAYS = 32  # steps after the first one, all of which are sampled
SHARE = 0.02  # fraction of the later steps to sample, besides the first steps of epochs
TIMED = ("evaluation", "checkpoint", "logging", "report")  # spans that are always timed
SAMPLED = tuple(name for name in NAMES if name not in TIMED)  # timed only in sampled steps

Mark = tuple[str | None, Any]  # (the stage that ends here, a point in the queue of the device)


class Span(AbstractContextManager[None]):
    """A span of the fit that `Timing` listens to."""

    def __init__(self, timing: "Timing", name: str) -> None:
        self.timing = timing
        self.name = name

    def __enter__(self) -> None:
        self.timing.enter(self.name)

    def __exit__(self, *_: object) -> None:
        self.timing.leave(self.name)


class Timing(Callback):
    """Divide the time of a fit into STAGES; after the first epoch, say what to change.

    This callback listens to the spans of the Trainer. Evaluations, checkpoints, loggers and updates
    of the live report are always timed. The clock starts after the first step of the fit. Then only
    some steps are timed: the next ALWAYS steps, the first step of each epoch, in which a loader may
    start its workers, and a random fraction SHARE of the others. A sampled step is divided by marks
    in the queue of the device (events on a GPU), without waiting for the device. A step that is a
    single graph, or a `train_step` that enters no spans, counts as the stage "step".

    Put this callback last in the list, because the time from the end of its `on_step_end` to the
    next batch counts as the stage "data".
    """

    first_rank_only = True

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.said: str | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self.took = {}
        self.said = None
        self.device = trainer.device
        self.first_step = trainer.step + 1
        self.began = 0.0  # until the end of the first step
        self.timed = dict.fromkeys(TIMED, 0.0)  # seconds
        self.within: list[str] = []  # the open spans in `timed`, innermost last
        self.turned = 0.0
        # The number of sampled steps, by whether they were the first of an epoch, and the seconds
        # of these steps, by the same and by stage.
        self.samples = {True: 0, False: 0}
        self.sampled: dict[tuple[bool, str], float] = defaultdict(float)
        # samples with marks that the device may not have reached yet
        self.unread: list[tuple[bool, list[Mark]]] = []
        self.marks: list[Mark] = []  # marks of the step being sampled
        self.waited = False  # whether Python waited for the device in that step
        self.idle: list[bool] = []  # for each sample, whether the device was idle at its end
        self.random = random.Random(0)

    def on_fit_end(self, trainer: Trainer) -> None:
        trainer.spans.update(silent_spans())
        if not trainer.failed and self.began > 0:
            self.took = self.split(trainer)
            self.said = self.sentence(trainer, self.took)

    def on_log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.waited = True
        if "train/loss" in row:  # the device has finished all earlier steps
            self.read()

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step < self.first_step:  # a resumed run evaluates before its first step
            return
        if trainer.step == self.first_step:
            self.start_clock(trainer)
        elif self.marks:
            self.end_sample(trainer)
        starts = trainer.step % trainer.steps_per_epoch == 0
        if starts:
            self.say(trainer)
        # Sample at random: a loader may, for example, do more work in every fourth step.
        is_early = trainer.step < self.first_step + ALWAYS
        if starts or is_early or self.random.random() < SHARE:
            self.begin_sample(trainer, starts)

    def start_clock(self, trainer: Trainer) -> None:
        """Start to measure the fit, after its first step."""
        for name in TIMED:
            trainer.spans[name] = Span(self, name)
        devices.synchronize(self.device)
        self.began = time.perf_counter()

    def say(self, trainer: Trainer) -> None:
        """Print the sentence once, below the line of the first full epoch."""
        is_whole = trainer.step - self.first_step + 1 >= trainer.steps_per_epoch
        if self.said is not None or not is_whole or trainer.step == trainer.total_steps:
            return
        self.said = self.sentence(trainer, self.split(trainer))
        for callback in trainer.callbacks:
            if isinstance(callback, Progress) and self.said is not None:
                callback.write(f"speed    so far, {self.said}")

    def enter(self, name: str) -> None:
        """Note that a span has started."""
        if name in self.timed:
            self.turn()
            self.within.append(name)
        elif not self.within:
            self.mark("data" if name == "transfer" else "other")
            self.gap = "other"

    def leave(self, name: str) -> None:
        """Note that a span has ended."""
        if name in self.timed:
            self.turn()
            self.within.pop()
        elif not self.within:
            self.mark(name)
            if name == "transfer":
                self.gap = "step"  # until the step enters a span

    def turn(self) -> None:
        """Add the time since the last call to the innermost open span in `timed`."""
        devices.synchronize(self.device)  # so that this time does not include earlier work
        self.waited = True
        now = time.perf_counter()
        if self.within:
            self.timed[self.within[-1]] += now - self.turned
        self.turned = now
        self.mark(None if self.within else self.gap)
        self.gap = "other"

    def mark(self, stage: str | None) -> None:
        """Set a mark in the sampled step; the time since the last mark belongs to `stage`."""
        if self.marks:
            self.marks.append((stage, devices.mark(self.device)))

    def begin_sample(self, trainer: Trainer, starts: bool) -> None:
        """Sample the next step, which may start an epoch."""
        self.starts = starts
        self.waited = False
        self.gap = "other"  # the stage for work outside of spans
        # If the step is captured as a graph, marks inside it would become part of the graph.
        for name in ["transfer"] if captures(trainer) else SAMPLED:
            trainer.spans[name] = Span(self, name)
        self.marks = [(None, devices.mark(self.device))]

    def end_sample(self, trainer: Trainer) -> None:
        """Store the marks of the step that has ended."""
        self.mark(self.gap)
        for name in SAMPLED:
            trainer.spans[name] = SILENT
        if not self.waited:
            _, done = self.marks[-2]
            self.idle.append(devices.has_caught_up(done))
        self.unread.append((self.starts, self.marks))
        self.marks = []

    def read(self) -> None:
        """Convert the marks of sampled steps to seconds; the device must have reached them."""
        for starts, marks in self.unread:
            self.samples[starts] += 1
            for (_, start), (stage, end) in itertools.pairwise(marks):
                if stage is not None:
                    self.sampled[starts, stage] += devices.seconds_between(start, end)
        self.unread = []

    def split(self, trainer: Trainer) -> dict[str, float]:
        """Return {stage: seconds} since the first step; they add up to the total time."""
        devices.synchronize(self.device)
        self.read()
        total = time.perf_counter() - self.began
        per_epoch = trainer.steps_per_epoch
        epochs = (trainer.step - 1) // per_epoch - (self.first_step - 1) // per_epoch
        count = {True: epochs, False: trainer.step - self.first_step - epochs}
        took = dict.fromkeys(STAGES, 0.0)
        for (starts, stage), seconds in self.sampled.items():
            took[stage] += count[starts] / self.samples[starts] * seconds
        # The samples only give an estimate, so scale it to the measured time.
        scale = (total - sum(self.timed.values())) / max(sum(took.values()), 1e-9)
        took = {stage: self.timed.get(stage, scale * took[stage]) for stage in STAGES}
        return {stage: seconds for stage, seconds in took.items() if seconds > 0}

    def sentence(self, trainer: Trainer, seconds: dict[str, float]) -> str | None:
        """Return the `speed_verdict` for the fit so far, given its {stage: seconds}."""
        device = "CPU" if trainer.device.type == "cpu" else "GPU"
        idle = sum(self.idle) / max(1, len(self.idle))
        return speed_verdict(seconds, device, type(trainer.train_loader).__name__, idle)


def result_of(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of result.json for the last fit: the time per stage, and the verdict."""
    for callback in trainer.callbacks:
        if isinstance(callback, Timing) and callback.took:
            took = {stage: round(seconds, 6) for stage, seconds in callback.took.items()}
            return {"time": took, "speed": callback.said}
    return {}
