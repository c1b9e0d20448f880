"""Show the progress of a sweep: print a line for each job that ends, and save the jobs' output."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from stoker.runs.directory import RESULT
from stoker.runs.readable import seconds
from stoker.runs.sweep_record import SweepRecord
from stoker.sweeps import ranking
from stoker.sweeps.jobs import Job, command_line, read_job, typed_for
from stoker.sweeps.table import Sweep, list_in_index, short
from stoker.trainer import terminal
from stoker.trainer.errors import printable
from stoker.trainer.number_format import counted, number

# The minimum widths of the columns of a line.
OUTCOME = 14
LEFT = 15
OUTPUT = "jobs"  # the subfolder of a sweep for the output of its jobs


class Ends:
    """The jobs of a sweep that have ended, and a line to print for each new one.

    `total` is the total number of jobs, and `keys` are the settings in which they differ.
    """

    def __init__(self, folder: Path, total: int, keys: list[str]) -> None:
        self.folder = folder
        self.total = total
        self.keys = keys
        self.lock = threading.Lock()
        self.start = time.monotonic()
        self.times: dict[Path, int] = {}  # when each result was written
        jobs = [job for job in self.new() if job.status in ("done", "pruned")]
        self.jobs = {job.name: job for job in jobs}
        self.earlier = len(jobs)

    def new(self) -> Iterator[Job]:
        """Yield each job that has ended since the last call."""
        for path in sorted(self.folder.glob(f"*/{RESULT}")):
            with contextlib.suppress(OSError):  # the job may be replacing the file
                time_ns = path.stat().st_mtime_ns
                if time_ns != self.times.get(path):
                    self.times[path] = time_ns
                    yield read_job(path.parent)

    def show_new(self) -> list[Job]:
        """Print a line for each job that has ended since the last call, and return these jobs."""
        with self.lock:
            ended = list(self.new())
            for job in ended:
                terminal.show(self.line(job))
        return ended

    @property
    def best(self) -> Job | None:
        """The best job so far, among the jobs that have the metric that most jobs monitor."""
        done = [job for job in self.jobs.values() if job.status == "done"]
        name, high = ranking.monitored(done)
        rated = [job for job in done if name in job.numbers]
        pick = max if high else min
        return pick(rated, key=lambda job: job.numbers[name], default=None)

    def line(self, job: Job) -> str:
        """Return the line for a job that has ended, such as '7/12  val/acc 0.98  3 min left'."""
        self.jobs[job.name] = job
        count = len(self.jobs)
        mark = "(best)" if self.best is job else ""
        if job.status == "pruned":
            mark = job.status
        ended = max(1, count - self.earlier)  # 0 if a job that ended earlier has run again
        each = (time.monotonic() - self.start) / ended
        left = f"{seconds(each * (self.total - count))} left" if count < self.total else ""
        parts = [
            f"{count:>{len(str(self.total))}}/{self.total}",
            f"{outcome(job):{OUTCOME}} {mark:6}",
            left.rjust(LEFT),
            " ".join([f"job {job.name}", *typed_for(job, self.keys, short)]),
        ]
        return printable("  ".join(parts))


def outcome(job: Job) -> str:
    """Return 'val/acc 0.9861' or 'failed, the loss is nan at step 3.'."""
    if job.best:
        return f"{job.best.name} {number(job.best.value)}"
    sentence = re.sub(r"(?<=\.) .*", "", job.reason)
    return ", ".join(filter(None, [job.status, sentence]))


ends: Ends | None = None  # set once this process has checked its sweep against the directory
output = contextlib.ExitStack()  # closed at the end of this process's job


def announce(
    folder: Path, count: int, varied: list[str], searched: list[str] | None = None
) -> None:
    """Record and print what this process will run. Call this after checking the directory."""
    global ends
    SweepRecord(command_line(), count, searched, started=time.time()).write(folder)
    list_in_index(Sweep(folder))
    ends = Ends(folder, count, varied)
    done = f", {ends.earlier} already done" if ends.earlier else ""
    terminal.show(f"sweep    {counted(count, 'job')}{done}; output in {folder / OUTPUT}")


def show_ends() -> list[Job]:
    """Print a line for each new result. Return the jobs that have failed."""
    ended = ends.show_new() if ends else []
    return [job for job in ended if job.status == "failed"]


def open_output(folder: Path) -> TextIO:
    """Open the file for the output of the job in a folder, at its end."""
    path = folder.parent / OUTPUT / f"{folder.name}.txt"
    path.parent.mkdir(exist_ok=True)
    return path.open("a+", buffering=1, encoding="utf-8", errors="replace")


def last_error(output: TextIO) -> str | None:
    """Return the last error message in the rest of a job's output, or None."""
    errors = [line for line in output if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ").rstrip() if errors else None


def redirect(folder: Path) -> None:
    """Redirect standard output to the file of a job until `output` is closed."""
    file = output.enter_context(open_output(folder))
    output.enter_context(contextlib.redirect_stdout(file))
