"""A sweep while it runs: a line for each job that ends, and the output of the jobs in files."""

import contextlib
import sys
import time
from pathlib import Path

from stoker.command import arguments
from stoker.runs import index
from stoker.runs.directory import RESULT
from stoker.runs.readable import seconds
from stoker.sweeps.jobs import Job, SweepRecord, read_job, read_jobs, typed_for
from stoker.sweeps.table import short
from stoker.trainer import terminal
from stoker.trainer.errors import printable
from stoker.trainer.readable import number

OUTPUT = "jobs"  # the sweep's folder for its jobs' output and for locks


class Ends:
    """The jobs of a sweep that have ended, and the line for the next one.

    `total` is the number of jobs, None if it is not known, and `keys` are the settings in which
    they differ.
    """

    def __init__(self, folder: Path, total: int | None, keys: list[str]) -> None:
        self.folder = folder
        self.total = total
        self.keys = keys
        self.best: Job | None = None
        self.start = time.monotonic()
        self.times = {path: path.stat().st_mtime_ns for path in self.results()}
        self.names: set[str] = set()
        for job in read_jobs(folder):
            if job.status in ("done", "pruned"):
                self.add(job)
        self.earlier = len(self.names)

    def results(self) -> list[Path]:
        return sorted(self.folder.glob(f"*/{RESULT}"))

    def show_new(self) -> list[Job]:
        """Print a line for each job that has ended since the last call, and return these jobs."""
        ended = []
        for path in self.results():
            with contextlib.suppress(OSError):  # the file may be in the middle of being replaced
                time_ns = path.stat().st_mtime_ns
                if time_ns != self.times.get(path):
                    self.times[path] = time_ns
                    ended.append(read_job(path.parent))
                    terminal.show(self.line(ended[-1]))
        return ended

    def add(self, job: Job) -> None:
        """Count a job that has ended, and keep it if it is the best so far."""
        self.names.add(job.name)
        new = job.best
        if job.status != "done" or new is None:
            return
        best = self.best.best if self.best else None
        sign = 1 if new.mode == "min" else -1
        if best is None or (best.name == new.name and sign * new.value < sign * best.value):
            self.best = job

    def line(self, job: Job) -> str:
        """Return the line for a job that has ended: '7/12  val/acc 0.98  best 0.99 (job 3)'."""
        self.add(job)
        count = str(len(self.names))
        parts = [f"{count}/{self.total}" if self.total else count, outcome(job)]
        if self.best is not None and self.best.best is not None:
            parts.append(f"best {number(self.best.best.value)} (job {self.best.name})")
        to_go = (self.total or 0) - len(self.names)
        if to_go > 0:
            ended = max(1, len(self.names) - self.earlier)  # a job may end more than once
            each = (time.monotonic() - self.start) / ended
            parts.append(f"{seconds(each * to_go)} left")
        parts.append(" ".join(typed_for(job, self.keys, short)) or f"job {job.name}")
        return printable("  ".join(parts))


def outcome(job: Job) -> str:
    """'val/acc 0.9861', 'pruned at evaluation 3', 'failed, The loss is nan.'."""
    if job.status == "pruned":
        return job.note
    if job.best:
        return f"{job.best.name} {number(job.best.value)}"
    reason, _, _ = job.note.partition("\n")
    return f"{job.status}, {reason}" if reason else job.status


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


def redirect(folder: Path, name: str, until: contextlib.ExitStack = output) -> None:
    """Write the standard output to the file of a job until the stack is closed."""
    path = folder / OUTPUT / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    file = until.enter_context(path.open("a", buffering=1, encoding="utf-8"))
    until.enter_context(contextlib.redirect_stdout(file))
