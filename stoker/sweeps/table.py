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
from stoker.trainer.readable import number

REPEATS = ("seed", "dataset.fold")  # settings of runs that are shown as one, by their mean
MOST_ROWS = 40  # in the table on the screen
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
        self.is_grouped = any(len(group) > 1 for group in self.groups)
        self.left_out = REPEATS if self.is_grouped else ()
        self.group_keys = [key for key in self.keys if key not in self.left_out]

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


def mean_and_deviation(values: Iterable[float | None], sign: str = "+-") -> str:
    """'0.9888 +- 0.0012'; no deviation for one value, '' for none."""
    numbers = present(values)
    if not numbers:
        return ""
    text = number(statistics.fmean(numbers))
    if len(numbers) > 1:
        text += f" {sign} {number(statistics.stdev(numbers))}"
    return text


def value_of(sweep: Sweep, group: list[Job], sign: str = "+-") -> str:
    """Return a group's mean of the monitored metric, or else of what it monitored itself."""
    value = mean_and_deviation(map(sweep.value, group), sign)
    best = group[0].best
    if value or best is None:
        return value
    others = mean_and_deviation((job.best.value for job in group if job.best), sign)
    return f"{best.name} {others}"


def test_of(group: list[Job], test: str, sign: str = "+-") -> str:
    """Return a group's mean of a test metric."""
    return mean_and_deviation((job.test.get(test) for job in group), sign)


def seconds_of(group: list[Job]) -> str:
    """Return the mean seconds of a group's jobs; '' if none has any."""
    times = present(job.seconds for job in group)
    return f"{statistics.fmean(times):.1f}" if times else ""


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
    rows = [
        [
            "jobs",
            "n",
            sweep.name or "best",
            test or "test",
            "seconds",
            "settings",
        ]
    ]
    for group in sweep.groups:
        typed = typed_for(group[0], keys)
        rows.append(
            [
                ranges(group),
                str(len(group)),
                value_of(sweep, group),
                test_of(group, test),
                seconds_of(group),
                " ".join(typed),
            ]
        )
    others = [job for status in STATUSES[1:] for job in sweep.of(status)]
    for job in others:
        note = with_note(job, sweep.keys)
        rows.append([job.name, "", job.status, "", "", note])
    hidden = len(rows) - 1 - MOST_ROWS
    if hidden > 0:  # keep the best and some of the unfinished ones
        first = 1 + max(MOST_ROWS - len(others), MOST_ROWS // 2)
        more = ["...", "", "", "", "", f"{hidden} more: see sweep.csv"]
        rows[first : first + hidden] = [more]
    if not sweep.is_grouped:
        rows[0][0] = "job"
        for row in rows:
            del row[1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0
    return ["  ".join(map(str.ljust, row, widths)) for row in rows]


def with_note(job: Job, keys: list[str]) -> str:
    """Return the settings of an unfinished job, and the first line of its note."""
    why = job.note.partition("\n")[0]
    typed = typed_for(job, keys or job.settings)
    blamed = why.partition(": ")[0]
    if blamed in typed:  # say it once
        typed.remove(blamed)
        return " ".join([*typed, why])
    return f"{' '.join(typed)}: {why}"


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
