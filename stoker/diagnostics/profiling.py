"""The profile of a few steps: a trace to look at, and the operators that take longest."""

import contextlib
import gzip
import os
import shutil
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from stoker.diagnostics.timing import Timing
from stoker.trainer import device as devices
from stoker.trainer.callbacks import Callback, Progress
from stoker.trainer.files import replacing, write_text

BEFORE, WARMUP, ACTIVE = (
    10,
    3,
    5,
)  # steps in front of it, with the profiler on and unread, and in the trace
MOST = 10  # operators in the table


@dataclass
class Operator:
    """One row of the table, for a step: `seconds` of its own, without what it calls."""

    name: str
    seconds: float
    share: float
    calls: float


class Profile(Callback):
    """Writes a trace of ACTIVE steps, and a table of the most expensive operators, into `folder`; prints the table.

    The steps come after the first ones, or as late as the run has so many. They are slower than others, and come out
    as they would have. The trace is for chrome://tracing, ui.perfetto.dev, or TensorBoard's profiler. The first of the
    callbacks, or its own time is taken for theirs.
    """

    first_rank_only = True

    def __init__(self, folder):
        self.folder = Path(folder)
        self.profiler, self.recorded = None, 0

    def on_fit_start(self, trainer):
        left = trainer.total_steps - trainer.step
        self.active = min(ACTIVE, max(1, left - 1)) if left else 0
        self.warmup = min(WARMUP, left - self.active)
        self.begin_at = trainer.step + min(BEFORE, left - self.active - self.warmup)
        self.profiler, self.recorded = None, 0
        self.begin_when_due(trainer)

    def begin_when_due(self, trainer):
        if self.active and trainer.step == self.begin_at:
            with aside(trainer):
                self.begin(trainer)

    def begin(self, trainer):
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "99"
        )  # it tells stderr that it has begun, and of GPUs that are none
        from torch import profiler

        own = getattr(profiler.ProfilerActivity, trainer.device.type.upper(), None)  # mps has none
        kinds = [kind for kind in {profiler.ProfilerActivity.CPU, own} if kind is not None]
        with warnings.catch_warnings():  # a run of one step has no other for a warmup
            warnings.simplefilter("ignore")
            plan = profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
        self.profiler = profiler.profile(activities=kinds, schedule=plan)
        self.profiler.start()

    def on_step_end(self, trainer):
        if self.profiler is None:
            return self.begin_when_due(trainer)
        done = trainer.step - self.begin_at
        if done == self.warmup + self.active:
            devices.synchronize(trainer.device)  # what the steps have left to do is a part of them
            with aside(trainer):
                self.finish(trainer)
        else:
            self.profiler.step()

    def on_fit_end(self, trainer):
        if self.profiler is not None:  # the run has ended in the middle of it
            self.profiler.stop()
            self.profiler = None

    def finish(self, trainer):
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        self.recorded = self.active
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.begin_at + self.warmup + 1
        trace = self.folder / f"steps_{first}_to_{trainer.step}.pt.trace.json.gz"
        write_trace(profiler, trace)
        text = "\n".join(table(operators(profiler.key_averages(), self.active, trainer.device)))
        write_text(self.folder / "operators.txt", text + "\n")
        lines = f"profile  steps {first} to {trainer.step} on {trainer.device}, by operator:\n{text}\n         {trace}"
        write = next((c.write for c in trainer.callbacks if isinstance(c, Progress)), print)
        write(lines)


@contextlib.contextmanager
def aside(trainer):
    """The time within is no part of the training's, nor of any stage's: it is the profiler's own."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    trainer.window_start += seconds
    for callback in trainer.callbacks:
        if isinstance(callback, Timing):
            callback.leave_out(seconds)


def write_trace(profiler, path):
    """The trace as gzipped JSON."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        with (
            replacing(path) as partial,
            open(plain, "rb") as source,
            gzip.open(partial, "wb", compresslevel=6) as out,
        ):
            shutil.copyfileobj(source, out)


def operators(averages, steps, device):
    """The MOST expensive operators, by the time of the device that is their own, a step's mean."""
    on_gpu = hasattr(torch.profiler.ProfilerActivity, device.type.upper()) and device.type != "cpu"
    # A kernel has a row of its own beside that of the operator which has launched it.
    rows = [row for row in averages if row.device_type == torch.autograd.DeviceType.CPU]
    rows = [
        row
        for row in rows
        if not row.key.startswith(("ProfilerStep", devices.GRAPHS[0], "Activity Buffer", "Lazy "))
    ]
    times = [row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in rows]
    total = sum(times) or 1
    found = [
        Operator(row.key, 1e-6 * took / steps, took / total, row.count / steps)
        for row, took in zip(rows, times, strict=True)
        if took > 0
    ]
    return sorted(found, key=lambda operator: -operator.seconds)[:MOST]


def table(rows):
    """The lines of the table."""
    yield "          ms/step   share   calls/step  operator"
    for row in rows:
        yield f"         {1000 * row.seconds:8.3f}  {row.share:6.1%}  {row.calls:11.4g}  {row.name}"
