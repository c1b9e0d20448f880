"""Show the progress of a sweep: print a line for each job that ends, and save the jobs' output."""

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
from stoker.trainer.number_format import number

# The minimum widths of the columns of a line.
OUTCOME = 14
BEST = 21
LEFT = 12
OUTPUT = "jobs"  # the subfolder of a sweep for the output of its jobs and for locks


class Ends:
    """The jobs of a sweep that have ended, and a line to print for each new one.

    `total` is the number of all jobs, or None if it is not known. `keys` are the settings in which
    the jobs differ.
    """

    def __init__(self, folder: Path, total: int | None, keys: list[str]) -> None:
        self.folder = folder
        self.total = total
        self.keys = keys
        self.start = time.monotonic()
        self.times = {path: path.stat().st_mtime_ns for path in self.results()}
        jobs = [job for job in read_jobs(folder) if job.status in ("done", "pruned")]
        self.jobs = {job.name: job for job in jobs}
        self.earlier = len(jobs)

    def results(self) -> list[Path]:
        return sorted(self.folder.glob(f"*/{RESULT}"))

    def show_new(self) -> list[Job]:
        """Print a line for each job that has ended since the last call, and return these jobs."""
        ended = []
        for path in self.results():
            with contextlib.suppress(OSError):  # the job may be replacing the file
                time_ns = path.stat().st_mtime_ns
                if time_ns != self.times.get(path):
                    self.times[path] = time_ns
                    ended.append(read_job(path.parent))
                    terminal.show(self.line(ended[-1]))
        return ended

    @property
    def best(self) -> Job | None:
        """The best job so far, among the jobs that have the metric of the first job."""
        done = [job for job in self.jobs.values() if job.status == "done" and job.best]
        if not done:
            return None
        first = done[0].best
        assert first is not None
        values = {job.name: job.numbers[first.name] for job in done if first.name in job.numbers}
        pick = min if first.mode == "min" else max
        return self.jobs[pick(values, key=values.__getitem__)]

    def line(self, job: Job) -> str:
        """Return the line for a job that has ended: '7/12  val/acc 0.98  best 0.99 (job 3)'."""
        self.jobs[job.name] = job
        count = len(self.jobs)
        total = self.total or count
        width = len(str(total))
        of_total = f"/{total}" if self.total else ""
        parts = [f"{count:>{width}}{of_total}", outcome(job).ljust(OUTCOME)]
        best = self.best
        if best is job:
            parts.append("the best so far".ljust(BEST))
        elif best is not None and best.best is not None:
            parts.append(f"best {number(best.best.value)} (job {best.name})".ljust(BEST))
        if self.total:
            ended = max(1, count - self.earlier)  # a job may end more than once
            each = (time.monotonic() - self.start) / ended
            left = f"{seconds(each * (total - count))} left" if count < total else ""
            parts.append(left.rjust(LEFT))
        parts.append(" ".join([f"job {job.name}", *typed_for(job, self.keys, short)]))
        return printable("  ".join(parts))


def outcome(job: Job) -> str:
    """Return 'val/acc 0.9861', 'pruned at evaluation 3' or 'failed, The loss is nan.'."""
    if job.status == "pruned":
        return job.note
    if job.best:
        return f"{job.best.name} {number(job.best.value)}"
    return ", ".join(filter(None, [job.status, job.reason]))


ends: Ends | None = None  # set once this process has checked its sweep against the directory
output = contextlib.ExitStack()  # closed at the end of this process's job


def announce(
    folder: Path, count: int | None, varied: list[str], searched: list[str] | None = None
) -> None:
    """Record and print what this process is about to run. The directory must already be checked."""
    global ends
    added = arguments.search_path()
    typed = [argument for argument in sys.argv[1:] if argument not in added]
    SweepRecord(typed, count, searched).write(folder)
    index.update(folder, draws=False)
    ends = Ends(folder, count, varied)
    done = f", {ends.earlier} of them already done" if ends.earlier else ""
    terminal.show(f"sweep    {count or ''} jobs{done}; their output is in {folder / OUTPUT}")


def redirect(folder: Path, name: str, until: contextlib.ExitStack = output) -> None:
    """Redirect standard output to the file of a job until the stack `until` is closed."""
    path = folder / OUTPUT / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    file = until.enter_context(path.open("a", buffering=1, encoding="utf-8"))
    until.enter_context(contextlib.redirect_stdout(file))
