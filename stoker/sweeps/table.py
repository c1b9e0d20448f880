"""A sweep as a table, on the screen and in sweep.csv: its jobs in groups, best first."""

import contextlib
import csv
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stoker.runs.result import tests_in
from stoker.sweeps.jobs import (
    STATUSES,
    Job,
    SweepRecord,
    consecutive,
    is_sweep,
    read_jobs,
    typed_for,
    varied,
)
from stoker.trainer import files
from stoker.trainer.errors import printable

REPEATS = ("seed", "dataset.fold")  # settings of runs that are shown as one, by their mean
MOST_DONE = 30  # rows of the table on the screen
MOST_UNFINISHED = 10
DATA = {  # the keys that choose the data
    "dataset",
    "dataset._target_",
    "dataset.root",
    "dataset.path",
    "dataset.target",
}


class Sweep:
    """The jobs of a directory.

    `keys` are the settings in which they differ. `name` is the metric that most jobs monitor, and
    `high` whether higher is better. `groups` are the finished jobs, best first; those that differ
    only in their seed or fold form one group, and those without the metric come last. `group_keys`
    are the settings in which groups differ. `swept` is False for runs that were started one by one.
    """

    def __init__(self, folder: Path) -> None:
        record = SweepRecord.read(folder)
        self.folder = folder
        self.jobs = read_jobs(folder)
        self.swept = is_sweep(folder)
        self.is_search = record.searched is not None
        self.planned = record.jobs
        self.keys = varied([job.settings for job in self.jobs])
        self.name = ""
        self.high = True
        bests = [(job.best.name, job.best.mode) for job in self.jobs if job.best]
        for (name, mode), _ in Counter(bests).most_common(1):
            self.name = name
            self.high = mode == "max"
        groups: dict[tuple[Any, ...], list[Job]] = {}
        for job in self.of("done"):
            is_other = self.value(job) is None
            settings = [job.settings.get(key) for key in self.keys if key not in REPEATS]
            group = groups.setdefault((is_other, *settings), [])
            group.append(job)
        self.groups = sorted(groups.values(), key=self.rank)
        is_grouped = any(len(group) > 1 for group in self.groups)
        self.left_out = REPEATS if is_grouped else ()
        self.group_keys = [key for key in self.keys if key not in self.left_out]
        self.unfinished = [job for status in STATUSES[1:] for job in self.of(status)]

    def of(self, status: str) -> list[Job]:
        return [job for job in self.jobs if job.status == status]

    def value(self, job: Job) -> float | None:
        """Return the job's value of the monitored metric; None if it lacks it."""
        return job.best.value if job.best and job.best.name == self.name else None

    def rank(self, group: list[Job]) -> float:
        """Return the sort key of a group: the best mean first, no value last."""
        values = present(map(self.value, group))
        if not values:
            return math.inf
        mean = statistics.fmean(values)
        return -mean if self.high else mean

    @property
    def compares(self) -> bool:
        """Whether one job can be the best, and not just the one on the easiest data."""
        keys = varied([job.settings for job in self.of("done")])
        return self.swept or DATA.isdisjoint(keys)

    @property
    def wanted(self) -> list[Job]:
        """The jobs of the last command. A larger sweep may have used the directory before."""
        if self.planned is None or self.is_search:  # a search may give its trials any number
            return self.jobs
        return [
            job for job in self.jobs if not job.name.isdecimal() or int(job.name) < self.planned
        ]

    @property
    def missing(self) -> int:
        """How many jobs have not begun."""
        return max(0, (self.planned or 0) - len(self.wanted))

    @property
    def to_run(self) -> int:
        """How many jobs the same command would run. A search does not repeat failed trials."""
        again = ("unfinished",) if self.is_search else ("failed", "unfinished")
        return self.missing + sum(job.status in again for job in self.wanted)


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def decimals(value: float) -> int:
    """Return how many decimals a number needs to show four digits."""
    size = abs(value)
    return 4 if size <= 1 or not math.isfinite(size) else max(0, 3 - int(math.log10(size)))


def digits(value: float) -> str:
    """'0.9861', '12.35', '51,920', '3.2e-05': a number in three to four digits."""
    if 0 < abs(value) < 0.001 or abs(value) >= 1e15:
        return f"{value:.3g}"
    return f"{value:,.{decimals(value)}f}"


def short(setting: str) -> str:
    """Return a typed value, a long fraction in four digits."""
    value = as_number(setting)
    if value is None or len(setting) <= 6 or value.is_integer():
        return setting
    return f"{value:.4g}"


def as_number(setting: str) -> float | None:
    """Return the number that was typed; None for other texts and for huge numbers."""
    try:
        value = float(setting)
    except ValueError:
        return None
    return value if abs(value) < 1e100 else None


def mean_and_deviation(values: Iterable[float | None], sign: str = "+-") -> str:
    """'0.9888 +- 0.0012'; no deviation for one value, '' for none."""
    numbers = present(values)
    if not numbers:
        return ""
    mean = statistics.fmean(numbers)
    if len(numbers) == 1:
        return digits(mean)
    deviation = statistics.stdev(numbers)
    return f"{digits(mean)} {sign} {deviation:,.{decimals(mean)}f}"


def value_of(sweep: Sweep, jobs: list[Job], sign: str = "+-") -> str:
    """Return the mean of the monitored metric, or else of what the jobs monitored themselves."""
    value = mean_and_deviation(map(sweep.value, jobs), sign)
    best = jobs[0].best
    if value or best is None:
        return value
    return f"{best.name} {mean_and_deviation([job.best.value for job in jobs if job.best], sign)}"


def test_of(jobs: list[Job], test: str, sign: str = "+-") -> str:
    """Return the mean of a test metric."""
    return mean_and_deviation((job.test.get(test) for job in jobs), sign)


def seconds_of(jobs: list[Job]) -> str:
    """Return the mean seconds of the jobs; '' if none has any."""
    times = present(job.seconds for job in jobs)
    return f"{statistics.fmean(times):.1f}" if times else ""


def typed_briefly(job: Job, keys: Iterable[str]) -> list[str]:
    """Return the settings of a job for these keys as a table shows them."""
    return typed_for(job, keys, short)


def tests_of(sweep: Sweep) -> list[str]:
    """Return the names of all jobs' test metrics, in the order of a report."""
    tests: dict[str, float] = {}
    for job in sweep.jobs:
        tests.update(job.test)
    return list(tests_in(tests))


def test_name(sweep: Sweep) -> str:
    """Return the test metric with the name of the monitored one, or the first; '' for none."""
    same = f"test/{sweep.name.partition('/')[2]}"
    return min(tests_of(sweep), key=lambda name: name != same, default="")


def lines(sweep: Sweep) -> list[str]:
    """Return the lines of the table: the groups of jobs, best first, then each unfinished job.

    The table shows the settings that differ, or all of them if none does.
    """
    test = test_name(sweep)
    keys = sweep.group_keys
    if not keys:
        keys = [key for key in sweep.jobs[0].settings if key not in sweep.left_out]
    rows = [["job", sweep.name or "best", test or "test", "seconds", "settings"]]
    for group in sweep.groups[:MOST_DONE]:
        value = value_of(sweep, group)
        settings = " ".join(typed_briefly(group[0], keys))
        rows.append([ranges(group), value, test_of(group, test), seconds_of(group), settings])
    for job in sweep.unfinished[:MOST_UNFINISHED]:
        rows.append([job.name, job.status, "", "", with_note(job, sweep.keys)])
    hidden = len(sweep.groups) + len(sweep.unfinished) - (len(rows) - 1)
    if hidden:
        rows.append(["...", "", "", "", f"{hidden} more: see sweep.csv"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def with_note(job: Job, keys: list[str]) -> str:
    """Return the settings of an unfinished job, and the first line of its note."""
    why = job.note.partition("\n")[0]
    typed = typed_briefly(job, keys or job.settings)
    typed = [setting for setting in typed if not why.startswith(f"{setting}: ")]
    return ": ".join(filter(None, [" ".join(typed), why]))


def ranges(jobs: list[Job]) -> str:
    """'0-2,5' for the jobs 0, 1, 2 and 5; 'first +2' for three jobs with other names."""
    names = [job.name for job in jobs]
    if all(re.fullmatch("[0-9]{1,9}", name) for name in names):
        runs = consecutive(sorted(map(int, names)))
        return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
    return f"{names[0]} +{len(names) - 1}" if names[1:] else names[0]


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write sweep.csv."""
    with (
        files.replacing(path) as partial,
        open(partial, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        for row in csv_rows(sweep):
            writer.writerow([safe_cell(value) for value in row])


def csv_rows(sweep: Sweep) -> Iterator[list[Any]]:
    """Yield the header of sweep.csv, then a row for each job, in their order."""
    names = dict.fromkeys(name for job in sweep.jobs for name in monitored(job))
    tests = dict.fromkeys(name for job in sweep.jobs for name in job.test)
    columns = [*sweep.keys, *names, *tests]
    yield ["job", "status", *columns, "seconds", "error"]
    for job in sweep.jobs:
        values = {**job.settings, **monitored(job), **job.test}
        yield [job.name, job.status, *map(values.get, columns), job.seconds, job.note]


def monitored(job: Job) -> dict[str, float]:
    return {job.best.name: job.best.value} if job.best else {}


def safe_cell(value: Any) -> Any:
    """Return a cell in one line, with a "'" before text that a spreadsheet would run."""
    if not isinstance(value, str):
        return value
    text = printable(" ".join(value.splitlines()))
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.lstrip().startswith(tuple("=+-@")) else text
