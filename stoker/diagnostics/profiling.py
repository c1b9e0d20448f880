"""Profile a few steps: write a trace, and print the operators that take longest."""

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.trainer.callbacks import Callback
from stoker.trainer.trainer import Trainer

BEFORE = 2  # steps without the profiler
WARMUP = 1  # steps whose recorded events are dropped
ACTIVE = 5  # steps in the trace
MOST = 10  # operators in the table


class Profile(Callback):
    """Write a trace of ACTIVE steps into `folder`, and print the most expensive operators.

    The first steps are skipped. Profiling slows steps down, but does not change their results.
    Open the trace in chrome://tracing, ui.perfetto.dev or TensorBoard's profiler.
    """

    first_rank_only = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.profiler: Any = None  # a torch.profiler.profile during a fit

    def on_fit_start(self, trainer: Trainer) -> None:
        with quiet():
            # Otherwise, Kineto writes messages about its start and missing GPUs to stderr.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            from torch import profiler

            self.profiler = profiler.profile(
                schedule=profiler.schedule(wait=BEFORE, warmup=WARMUP, active=ACTIVE, repeat=1),
                on_trace_ready=functools.partial(self.finish, trainer),
            )
            self.profiler.start()

    def on_step_end(self, trainer: Trainer) -> None:
        with quiet():
            self.profiler.step()

    def on_fit_end(self, trainer: Trainer) -> None:
        with quiet():
            self.profiler.stop()

    def finish(self, trainer: Trainer, profiler: Any) -> None:
        """Write the trace, and print the table of operators."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard looks for files with this suffix.
        trace = self.folder / f"step_{trainer.step}.pt.trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        part = "device" if trainer.device.type == profiler.use_device else "cpu"
        averages = profiler.key_averages()
        text = averages.table(sort_by=f"self_{part}_time_total", row_limit=MOST).rstrip()
        steps = f"the {ACTIVE} steps up to {trainer.step}"
        print(f"profile  {steps} on {trainer.device}, by operator:\n{text}\n         {trace}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore the profiler's warnings, which vary by version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
