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

REPEATS = ("seed", "dataset.fold")  # settings whose runs are averaged in one row
MOST_DONE = 30  # rows of the printed table
MOST_UNFINISHED = 10
DATA = {  # keys that choose the data
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
        done = self.of("done")
        keys = [key for key in self.keys if key not in REPEATS]
        groups: dict[tuple[Any, ...], list[Job]] = {}
        for job in done:
            settings = [job.settings.get(key) for key in keys]
            is_other = self.value(job) is None
            group = groups.setdefault((is_other, *settings), [])
            group.append(job)
        self.groups = sorted(groups.values(), key=self.rank)
        is_grouped = len(groups) < len(done)
        self.left_out = REPEATS if is_grouped else ()
        self.group_keys = keys if is_grouped else self.keys
        self.unfinished: list[Job] = []
        for status in STATUSES[1:]:
            self.unfinished += self.of(status)

    def of(self, status: str) -> list[Job]:
        return [job for job in self.jobs if job.status == status]

    def value(self, job: Job) -> float | None:
        """Return the job's value of the monitored metric; None if it lacks it."""
        if job.best is None or job.best.name != self.name:
            return None
        return job.best.value

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
        if self.planned is None or self.is_search:  # a search may number its trials in any way
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
        again = ["unfinished"]
        if not self.is_search:
            again.append("failed")
        begun = [job for job in self.wanted if job.status in again]
        return self.missing + len(begun)


def present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def decimals(value: float) -> int:
    """Return how many decimals a number needs to show four digits."""
    size = abs(value)
    if size <= 1 or not math.isfinite(size):
        return 4
    return max(0, 3 - int(math.log10(size)))


def digits(value: float) -> str:
    """'0.9861', '12.35', '51,920', '3.2e-05': a number in three to four digits."""
    if 0 < abs(value) < 0.001 or abs(value) >= 1e15:
        return f"{value:.3g}".replace("e+", "e")
    return f"{value:,.{decimals(value)}f}"


def short(setting: str) -> str:
    """Return a typed value, a long fraction in four digits, and 10000.0 as 10000."""
    value = as_number(setting)
    if value is None or len(setting) <= 6:
        return setting
    if value.is_integer():
        return setting.removesuffix(".0")
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
    bests = [job.best.value for job in jobs if job.best]
    return f"{best.name} {mean_and_deviation(bests, sign)}"


def test_of(jobs: list[Job], test: str, sign: str = "+-") -> str:
    """Return the mean of a test metric."""
    values = [job.test.get(test) for job in jobs]
    return mean_and_deviation(values, sign)


def seconds_of(jobs: list[Job]) -> str:
    """Return the mean seconds of the jobs; '' if none has any."""
    times = present(job.seconds for job in jobs)
    if not times:
        return ""
    return f"{statistics.fmean(times):.1f}"


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
    tests = tests_of(sweep)
    _, _, metric = sweep.name.partition("/")
    if f"test/{metric}" in tests:
        return f"test/{metric}"
    return tests[0] if tests else ""


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
        row = [
            ranges(group),
            value_of(sweep, group),
            test_of(group, test),
            seconds_of(group),
            " ".join(typed_briefly(group[0], keys)),
        ]
        rows.append(row)
    for job in sweep.unfinished[:MOST_UNFINISHED]:
        note = with_note(job, sweep.keys)
        rows.append([job.name, job.status, "", "", note])
    shown = len(rows) - 1
    hidden = len(sweep.groups) + len(sweep.unfinished) - shown
    if hidden:
        rows.append(["...", "", "", "", f"{hidden} more: see sweep.csv"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = list(map(str.ljust, row, widths))
        cells[1:4] = map(str.rjust, row[1:4], widths[1:4])  # the numbers
        lines.append("  ".join(cells).rstrip())
    return lines


def with_note(job: Job, keys: list[str]) -> str:
    """Return the settings of an unfinished job, and the first line of its note."""
    why, _, _ = job.note.partition("\n")
    typed = []
    for setting in typed_briefly(job, keys or job.settings):
        if not why.startswith(f"{setting}: "):
            typed.append(setting)
    settings = " ".join(typed)
    if settings and why:
        return f"{settings}: {why}"
    return settings or why


def ranges(jobs: list[Job]) -> str:
    """'0-2,5' for the jobs 0, 1, 2 and 5; 'first +2' for three jobs with other names."""
    names = [job.name for job in jobs]
    if not all(re.fullmatch("[0-9]{1,9}", name) for name in names):
        more = len(names) - 1
        return f"{names[0]} +{more}" if more else names[0]
    parts = []
    for run in consecutive(sorted(map(int, names))):
        first = run[0]
        last = run[-1]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(parts)


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
    names: dict[str, None] = {}
    tests: dict[str, float] = {}
    for job in sweep.jobs:
        if job.best:
            names[job.best.name] = None
        tests |= job.test
    columns = [*sweep.keys, *names, *tests]
    yield ["job", "status", *columns, "seconds", "error"]
    for job in sweep.jobs:
        values: dict[str, Any] = dict(job.settings)
        if job.best:
            values[job.best.name] = job.best.value
        values |= job.test
        cells = [values.get(column) for column in columns]
        yield [job.name, job.status, *cells, job.seconds, job.note]


def safe_cell(value: Any) -> Any:
    """Return a cell in one line, with a "'" before text that a spreadsheet would run."""
    if not isinstance(value, str):
        return value
    text = printable(" ".join(value.splitlines()))
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.lstrip().startswith(tuple("=+-@")) else text
