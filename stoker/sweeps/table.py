"""The table of a sweep, on screen and in sweep.csv: jobs grouped by settings, best first."""

import contextlib
import csv
import statistics
from pathlib import Path
from typing import Any

from stoker.data.typed import is_number
from stoker.runs import index
from stoker.runs.readable import aligned
from stoker.runs.result import Best, tests_in
from stoker.runs.sweep_record import SweepRecord
from stoker.sweeps.jobs import Job, read_jobs, typed_for
from stoker.sweeps.ranking import REPEATS, monitored, ranked, values_of, varied
from stoker.trainer import files
from stoker.trainer.errors import printable
from stoker.trainer.number_format import number

ENDED = ("done", "pruned", "failed")
MOST_ROWS = 40  # maximum rows in the printed table


class Sweep:
    """The jobs in the directory of a sweep.

    `keys` are the settings in which the jobs differ. `name` is the metric that most jobs monitor,
    and `high` says whether higher is better. `rows` are the rows of the table: first the `groups`
    of finished jobs, best first (jobs that differ only in their seed or fold form one group, and
    jobs without the metric come last), then the pruned jobs, best first, and then the other jobs.
    `group_keys` are the settings in which the groups differ.
    """

    def __init__(self, folder: Path) -> None:
        record = SweepRecord.read(folder)
        self.folder = folder
        self.jobs = read_jobs(folder)
        self.is_search = record.searched is not None
        self.missing = max(0, (record.jobs or 0) - len(self.jobs))  # jobs that have not begun
        self.keys = varied([job.settings for job in self.jobs])
        self.left_out = [key for key in self.keys if key in REPEATS]
        self.group_keys = [key for key in self.keys if key not in REPEATS]
        self.name, self.high = monitored(self.jobs)
        self.rows = ranked(self.jobs, self.name, self.high)
        self.groups = [row for row in self.rows if row[0].status == "done"]

    def of(self, status: str) -> list[Job]:
        return [job for job in self.jobs if job.status == status]

    def value(self, job: Job) -> float | None:
        """Return the job's value of the monitored metric; None if it has none."""
        return job.numbers.get(self.name)

    @property
    def best(self) -> list[Job]:
        """The jobs of the best group that have a value of the monitored metric."""
        return [job for job in next(iter(self.groups), []) if self.name in job.numbers]


def short(setting: str) -> str:
    """Shorten a typed value for the table: 0.123456 becomes 0.1235, and 10000.0 becomes 10000."""
    value = as_number(setting)
    if value is None or len(setting) <= 6:
        return setting
    if value.is_integer():
        return setting.removesuffix(".0")
    return f"{value:.4g}"


def as_number(setting: str) -> float | None:
    """Return the number that was typed; None for any other text and for huge numbers."""
    try:
        value = float(setting)
    except ValueError:
        return None
    return value if is_number(value) else None  # neither nan nor huge


def mean_of(jobs: list[Job], name: str, sign: str = "+-") -> str:
    """Return the mean and standard deviation of a metric, such as '0.9888 +- 0.0012'.

    A single value has no deviation. Without a value, the text is empty.
    """
    values = values_of(jobs, name)
    if not values:
        return ""
    mean = number(statistics.fmean(values))
    return f"{mean} {sign} {number(statistics.stdev(values))}" if len(values) > 1 else mean


def seconds_of(jobs: list[Job]) -> str:
    """Return the mean seconds of the jobs; '' if no job has a time."""
    times = [job.seconds for job in jobs if job.seconds is not None]
    return f"{statistics.fmean(times):.1f}" if times else ""


def tests_of(sweep: Sweep) -> list[str]:
    """Return the names of the test metrics of all jobs, with the monitored metric first."""
    tests: dict[str, float] = {}
    for job in sweep.jobs:
        tests |= job.test
    _, _, metric = sweep.name.partition("/")
    return list(tests_in(tests, f"test/{metric}"))


def list_in_index(sweep: Sweep) -> None:
    """Record in sweep.json what the indexes of runs show for the sweep, and update the indexes."""
    record = SweepRecord.read(sweep.folder)
    if record == SweepRecord():  # keep a malformed file, which may contain the sweep's command
        return index.update(sweep.folder)
    record.total = len(sweep.jobs) + sweep.missing
    record.ended = sum(job.status in ENDED for job in sweep.jobs)
    record.failed = len(sweep.of("failed"))
    record.seconds = sum(job.seconds or 0.0 for job in sweep.jobs) or None
    if sweep.best:
        mode = "max" if sweep.high else "min"
        value = statistics.fmean(values_of(sweep.best, sweep.name))
        record.best_jobs = [job.name for job in sweep.best]
        record.best = Best(sweep.name, mode, None, value)
        for test in list(sweep.best[0].test)[:1]:
            record.test = {test: statistics.fmean(values_of(sweep.best, test))}
    record.write(sweep.folder)
    index.update(sweep.folder)


def lines(sweep: Sweep) -> list[str]:
    """Return the lines of the table: the groups of jobs, best first, then each unfinished job.

    The table shows the settings that differ, without the seeds and folds of a group.
    """
    tests = tests_of(sweep)[:1]
    rows = [["job", sweep.name or "best", *tests, "seconds", "settings"]]
    empty = [""] * (1 + len(tests))
    for row in sweep.rows:
        job = row[0]
        if job.status == "done":
            others = len(row) - 1
            name = f"{job.name} (+{others})" if others else job.name
            means = [mean_of(row, metric) for metric in (sweep.name, *tests)]
            settings = " ".join(typed_for(job, sweep.group_keys, short))
            rows.append([name, *means, seconds_of(row), settings])
            continue
        typed = typed_for(job, sweep.keys, short)
        settings = " ".join(one for one in typed if not job.reason.startswith(f"{one}:"))
        parts = filter(None, [settings, job.reason])
        rows.append([job.name, job.status, *empty, ": ".join(parts)])
    hidden = len(rows) - 1 - MOST_ROWS
    if hidden > 0:
        rows[MOST_ROWS + 1 :] = [["...", "", *empty, f"{hidden} more: see sweep.csv"]]
    return list(aligned(rows, slice(1, -1)))


def write_csv(sweep: Sweep, path: Path) -> None:
    """Write sweep.csv, with one row per job, in the order of the jobs."""
    names = dict.fromkeys(job.best.name for job in sweep.jobs if job.best)
    columns = [*sweep.keys, *names, *tests_of(sweep)]
    rows: list[list[Any]] = [["job", "status", *columns, "seconds", "error"]]
    for job in sweep.jobs:
        values: dict[str, Any] = {**job.settings, **job.numbers}
        cells = [values.get(column) for column in columns]
        rows.append([job.name, job.status, *cells, job.seconds, job.note])
    with (
        files.replacing(path) as partial,
        open(partial, "w", newline="", encoding="utf-8") as file,
    ):
        csv.writer(file).writerows(map(safe_cell, row) for row in rows)


def safe_cell(value: Any) -> Any:
    """Return a cell as one line, with a "'" before text that a spreadsheet would run."""
    if not isinstance(value, str):
        return value
    text = printable(" ".join(value.splitlines()))
    with contextlib.suppress(ValueError):
        float(text)
        return text
    return f"'{text}" if text.lstrip().startswith(tuple("=+-@")) else text
