"""Profile a few steps: a trace, and the operators that take longest."""

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.diagnostics.timing import Timing
from stoker.trainer import device as devices
from stoker.trainer.callbacks import Callback, Progress
from stoker.trainer.files import replacing, write_text
from stoker.trainer.trainer import Trainer

BEFORE = 10  # steps without the profiler
WARMUP = 3  # steps with the profiler on, whose events are dropped
ACTIVE = 5  # steps in the trace
MOST = 10  # operators in the table
# Rows of the averages that are not operators.
NOT_OPERATORS = ("ProfilerStep", devices.GRAPHS[0], "Activity Buffer", "Lazy ")


@dataclass
class Operator:
    """One row of the table, per step; `seconds` are its own, without what it calls."""

    name: str
    seconds: float
    share: float
    calls: float


class Profile(Callback):
    """Write a trace of ACTIVE steps and a table of the most expensive operators into `folder`.

    The table is printed as well. The first steps are skipped if the run is long enough. Profiled
    steps are slower, with the same results. Open the trace in chrome://tracing, ui.perfetto.dev or
    TensorBoard's profiler. Put it first in the list of callbacks, so that its own time does not
    count as theirs.
    """

    first_rank_only = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.profiler: Any = None  # a torch.profiler.profile while it runs
        self.recorded = 0  # steps

    def on_fit_start(self, trainer: Trainer) -> None:
        left = trainer.total_steps - trainer.step
        self.active = min(ACTIVE, max(1, left - 1)) if left else 0
        self.warmup = min(WARMUP, left - self.active)
        self.begin_at = trainer.step + min(BEFORE, left - self.active - self.warmup)
        self.profiler = None
        self.recorded = 0
        self.begin_if_due(trainer)

    def begin_if_due(self, trainer: Trainer) -> None:
        if not self.active or trainer.step != self.begin_at:
            return
        with untimed(trainer), quiet():
            # Kineto would write about its start and missing GPUs to stderr.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if has_device_times(trainer.device):
                activities.append(getattr(profiler.ProfilerActivity, trainer.device.type.upper()))
            schedule = profiler.schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1)
            self.profiler = profiler.profile(activities=activities, schedule=schedule)
            self.profiler.start()

    def on_step_end(self, trainer: Trainer) -> None:
        if self.profiler is None:
            self.begin_if_due(trainer)
        elif trainer.step - self.begin_at < self.warmup + self.active:
            with quiet():
                self.profiler.step()
        else:
            devices.synchronize(trainer.device)  # wait for the rest of the steps' work
            with untimed(trainer):
                self.finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.profiler is not None:  # the run ended before the last of the steps
            self.stop()

    def stop(self) -> Any:
        """Stop the profiler, and return it."""
        profiler = self.profiler
        self.profiler = None
        with quiet():
            profiler.stop()
        return profiler

    def finish(self, trainer: Trainer) -> None:
        """Write and print what was recorded."""
        profiler = self.stop()
        self.recorded = self.active
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.begin_at + self.warmup + 1
        trace = self.folder / f"steps_{first}_to_{trainer.step}.pt.trace.json.gz"
        with tempfile.TemporaryDirectory() as place, replacing(trace) as partial, quiet():
            zipped = f"{place}/{trace.name}"  # the profiler zips a file with this ending
            profiler.export_chrome_trace(zipped)
            shutil.copyfile(zipped, partial)
            averages = profiler.key_averages()
        text = "\n".join(table(operators(averages, self.active, trainer.device)))
        write_text(self.folder / "operators.txt", text + "\n")
        title = f"profile  steps {first} to {trainer.step} on {trainer.device}, by operator:"
        writers = [c.write for c in trainer.callbacks if isinstance(c, Progress)]
        write = writers[0] if writers else print
        write(f"{title}\n{text}\n         {trace}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the profiler's warnings, which vary by version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def untimed(trainer: Trainer) -> Iterator[None]:
    """Do not count the time of the block, which is the profiler's, as training."""
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    trainer.window.start += seconds
    for callback in trainer.callbacks:
        if isinstance(callback, Timing):
            callback.leave_out(seconds)


def has_device_times(device: torch.device) -> bool:
    """Return whether the profiler measures this device, not only the CPU; it cannot for mps."""
    return device.type != "cpu" and hasattr(torch.profiler.ProfilerActivity, device.type.upper())


def operators(averages: Iterable[Any], steps: int, device: torch.device) -> list[Operator]:
    """Return the MOST expensive operators, by their own time on the device, per step."""
    attribute = "self_device_time_total" if has_device_times(device) else "self_cpu_time_total"
    # A kernel has its own row, in addition to that of the operator that launched it.
    rows = [
        row
        for row in averages
        if row.device_type == torch.autograd.DeviceType.CPU
        and not row.key.startswith(NOT_OPERATORS)
    ]
    total = sum(getattr(row, attribute) for row in rows) or 1
    found = []
    for row in rows:
        microseconds = getattr(row, attribute)
        if microseconds > 0:
            seconds = 1e-6 * microseconds / steps
            found.append(Operator(row.key, seconds, microseconds / total, row.count / steps))
    return sorted(found, key=lambda operator: -operator.seconds)[:MOST]


def table(rows: Iterable[Operator]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "          ms/step   share   calls/step  operator"
    for row in rows:
        yield f"         {1000 * row.seconds:8.3f}  {row.share:6.1%}  {row.calls:11.4g}  {row.name}"
