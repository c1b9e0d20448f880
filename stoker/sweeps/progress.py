"""A sweep while it runs: a line for each job that ends, and the output of the jobs in files."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from stoker.command import arguments
from stoker.runs import index
from stoker.runs.readable import natural, seconds
from stoker.sweeps.jobs import Job, SweepRecord, read_jobs
from stoker.sweeps.table import digits, typed_briefly
from stoker.trainer import terminal
from stoker.trainer.errors import printable

OUTPUT = "jobs"  # the sweep's folder for its jobs' output and for locks
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
        self.widths = [0] * 4  # widths of a line's columns so far
        self.start = time.monotonic()
        earlier = [job for job in read_jobs(folder) if job.status in ENDED]
        self.names = {job.name for job in earlier}
        self.earlier = len(earlier)
        for job in earlier:
            self.compare(job)

    def compare(self, job: Job) -> None:
        """Keep the job if it is the best so far."""
        new = job.best
        if job.status != "done" or new is None:
            return
        best = self.best
        if best is None or best.best is None:
            self.best = job
        elif new.name == best.best.name:
            self.best = min(best, job, key=rank)

    def line(self, job: Job, with_reason: bool = False) -> str:
        """Return the line for a job that has ended, `with_reason` if it has failed."""
        self.names.add(job.name)
        self.compare(job)
        best = ""
        if self.best is not None and self.best.best is not None:
            value = digits(self.best.best.value)
            best = f"best {value} (job {self.best.name})"
        parts = [
            self.count(),
            outcome(job, with_reason),
            best,
            self.time_left(),
        ]
        line = ""
        for i, part in enumerate(parts):
            self.widths[i] = max(self.widths[i], len(part))
            if self.widths[i]:
                line += part.ljust(self.widths[i]) + "  "
        typed = " ".join(typed_briefly(job, self.keys))
        line += typed or f"job {job.name}"
        return printable(line)

    def count(self) -> str:
        """' 7/12', of the jobs that have ended."""
        count = str(len(self.names))
        if self.total is None:
            return count
        total = str(self.total)
        return f"{count.rjust(len(total))}/{total}"

    def time_left(self) -> str:
        """'4 min 10 s left', '' at the end or if the number of jobs is not known."""
        to_go = (self.total or 0) - len(self.names)
        if to_go <= 0:
            return ""
        ended = max(1, len(self.names) - self.earlier)  # a job may end more than once
        each = (time.monotonic() - self.start) / ended
        return f"{seconds(each * to_go)} left"


def rank(job: Job) -> tuple[float, Any]:
    """Return the sort key of jobs with a best value: the best first, then the earliest."""
    assert job.best is not None
    sign = 1 if job.best.mode == "min" else -1
    return sign * job.best.value, natural(job.name)


def outcome(job: Job, with_reason: bool) -> str:
    """'val/acc 0.9861', 'pruned at evaluation 3', 'failed'."""
    if job.status == "pruned":
        return job.note
    if job.status == "done" and job.best:
        return f"{job.best.name} {digits(job.best.value)}"
    if job.status != "done" and with_reason:
        reason, _, _ = job.note.partition("\n")
        return f"{job.status}, {reason}"
    return job.status


ends: Ends | None = None  # set once this process has checked its sweep against the directory
output = contextlib.ExitStack()  # closed at the end of this process's job


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
