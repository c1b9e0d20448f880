"""A sweep while it runs: a line for each job that ends, and the output of the jobs in files."""

import contextlib
import sys
import time
from pathlib import Path

from stoker.command import arguments
from stoker.runs import index
from stoker.runs.readable import seconds
from stoker.sweeps.jobs import Job, SweepRecord, read_jobs
from stoker.sweeps.table import digits, typed_briefly
from stoker.trainer import terminal
from stoker.trainer.errors import printable

OUTPUT = "jobs"  # the folder of a sweep for the output of its jobs, and for locks
ENDED = ("done", "pruned")


class Ends:
    """The jobs of a sweep that have ended, and the line for the next one.

    `total` is the number of jobs, None if it is not known, and `keys` are the settings in which
    they differ.
    """

    def __init__(self, folder: Path, total: int | None, keys: list[str]) -> None:
        self.total = total
        self.keys = keys
        self.best: Job | None = None
        self.widths = [0] * 4  # of the parts of a line, so far
        self.start = time.monotonic()
        earlier = [job for job in read_jobs(folder) if job.status in ENDED]
        self.names = {job.name for job in earlier}
        self.earlier = len(earlier)
        for job in earlier:
            self.compare(job)

    def compare(self, job: Job) -> None:
        """Keep the job if it is the best so far."""
        if job.status != "done" or job.best is None:
            return
        if self.best is None or self.best.best is None:
            self.best = job
        elif job.best.name == self.best.best.name:
            sign = 1 if job.best.mode == "max" else -1
            if sign * job.best.value > sign * self.best.best.value:
                self.best = job

    def line(self, job: Job, with_reason: bool = False) -> str:
        """Return the line for a job that has ended, `with_reason` if it has failed."""
        self.names.add(job.name)
        self.compare(job)
        count = str(len(self.names))
        if self.total is not None:
            count = f"{count:>{len(str(self.total))}}/{self.total}"
        parts = [count, outcome(job, with_reason), "", ""]
        if self.best is not None and self.best.best is not None:
            parts[2] = f"best {digits(self.best.best.value)} (job {self.best.name})"
        to_go = (self.total or 0) - len(self.names)
        if to_go > 0:
            ended = max(1, len(self.names) - self.earlier)  # a job may end again
            each = (time.monotonic() - self.start) / ended
            parts[3] = f"{seconds(each * to_go)} left"
        self.widths = [
            max(width, len(part)) for width, part in zip(self.widths, parts, strict=True)
        ]
        parts = list(map(str.ljust, parts, self.widths))
        typed = " ".join(typed_briefly(job, self.keys)) or f"job {job.name}"
        return printable("  ".join([*filter(None, parts), typed]))


def outcome(job: Job, with_reason: bool) -> str:
    """'val/acc 0.9861', 'pruned at evaluation 3', 'failed'."""
    if job.status == "pruned":
        return job.note
    if job.status != "done":
        reason = job.note.partition("\n")[0]
        return f"{job.status}, {reason}" if with_reason else job.status
    return f"{job.best.name} {digits(job.best.value)}" if job.best else "done"


ends: Ends | None = None  # once this process has checked its sweep against the directory
output = contextlib.ExitStack()  # to close at the end of this process's job


def announce(
    folder: Path, count: int | None, varied: list[str], searched: list[str] | None = None
) -> None:
    """Write what this process is about to run, after its directory has been checked."""
    global ends
    added = arguments.search_path()
    typed = [argument for argument in sys.argv[1:] if argument not in added]
    SweepRecord(typed, count, searched).write(folder)
    index.update(folder, draws=False)
    ends = Ends(folder, count, varied)
    done = f", {ends.earlier} of them done earlier" if ends.earlier else ""
    jobs = "jobs" if count is None else f"{count} jobs"
    terminal.show(f"sweep    {jobs}{done}; their output is in {folder / OUTPUT}")


def redirect(folder: Path, name: str) -> None:
    """Write the standard output to the file of a job until `output` is closed."""
    path = folder / OUTPUT / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    file = output.enter_context(path.open("a", buffering=1, encoding="utf-8"))
    output.enter_context(contextlib.redirect_stdout(file))
