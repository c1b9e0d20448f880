"""Profile a few steps: write a trace, and list the operators that take longest."""

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from stoker.trainer import device as devices
from stoker.trainer.callbacks import Callback
from stoker.trainer.files import replacing, write_text
from stoker.trainer.trainer import Trainer

BEFORE = 10  # steps without the profiler
WARMUP = 3  # steps whose recorded events are dropped
ACTIVE = 5  # steps in the trace
MOST = 10  # operators in the table


class Profile(Callback):
    """Write a trace of ACTIVE steps and a table of the most expensive operators into `folder`.

    The table is also printed. The first steps are skipped if the run is long enough. Profiling
    slows these steps down, but does not change their results. Open the trace in chrome://tracing,
    ui.perfetto.dev or TensorBoard's profiler.
    """

    first_rank_only = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.profiler: Any = None  # a torch.profiler.profile while active

    def on_fit_start(self, trainer: Trainer) -> None:
        left = trainer.total_steps - trainer.step
        if left == 0:
            return
        active = min(ACTIVE, max(1, left - 1))
        warmup = min(WARMUP, left - active)
        wait = min(BEFORE, left - active - warmup)
        self.first = trainer.step + wait + warmup + 1
        self.last = self.first + active - 1
        with quiet():
            # Otherwise, Kineto writes messages about its start and missing GPUs to stderr.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if has_device_times(trainer.device):
                activities.append(getattr(profiler.ProfilerActivity, trainer.device.type.upper()))
            schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
            self.profiler = profiler.profile(activities=activities, schedule=schedule)
            self.profiler.start()

    def on_step_end(self, trainer: Trainer) -> None:
        if self.profiler is None:
            return
        if trainer.step < self.last:
            with quiet():
                self.profiler.step()
        else:
            devices.synchronize(trainer.device)  # wait until the device has finished these steps
            self.finish(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if self.profiler is not None:  # the run ended before the last step of the trace
            self.stop()

    def stop(self) -> Any:
        """Stop the profiler, and return it."""
        profiler = self.profiler
        self.profiler = None
        with quiet():
            profiler.stop()
        return profiler

    def finish(self, trainer: Trainer) -> None:
        """Write the trace, and write and print the table of operators."""
        profiler = self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = f"steps {self.first} to {self.last}"
        trace = self.folder / f"{steps.replace(' ', '_')}.pt.trace.json.gz"
        with tempfile.TemporaryDirectory() as place, replacing(trace) as partial, quiet():
            zipped = f"{place}/{trace.name}"  # the profiler compresses a file with this ending
            profiler.export_chrome_trace(zipped)
            shutil.copyfile(zipped, partial)
            averages = profiler.key_averages()
        part = "device" if has_device_times(trainer.device) else "cpu"
        text = averages.table(sort_by=f"self_{part}_time_total", row_limit=MOST).rstrip()
        write_text(self.folder / "operators.txt", f"{text}\n")
        print(f"profile  {steps} on {trainer.device}, by operator:\n{text}\n         {trace}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the profiler's warnings, which vary by version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def has_device_times(device: torch.device) -> bool:
    """Return whether the profiler records times of the device itself (not on CPU or MPS)."""
    return device.type != "cpu" and hasattr(torch.profiler.ProfilerActivity, device.type.upper())
