"""Which job of a sweep is best: the rule that the sweep's table and its page share."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from stoker.sweeps.jobs import STATUSES, Job

REPEATS = ("seed", "dataset.fold")  # jobs that differ only in these settings form one group


def varied(jobs: list[dict[str, str]]) -> list[str]:
    """Return the keys whose values differ between jobs, in the order in which they were typed."""
    keys = dict.fromkeys(itertools.chain(*jobs))
    return [key for key in keys if len({job.get(key) for job in jobs}) > 1]


def monitored(jobs: Iterable[Job]) -> tuple[str, bool]:
    """Return the metric that most jobs monitor, and whether higher is better."""
    bests = Counter((job.best.name, job.best.mode) for job in jobs if job.best)
    name, mode = max(bests, key=bests.__getitem__, default=("", "max"))
    return name, mode == "max"


def ranked(jobs: Iterable[Job], name: str, high: bool) -> list[list[Job]]:
    """Return the jobs as the rows of a table, sorted by status and by the metric `name`.

    Finished jobs whose settings differ only in their seed or fold form one row, which is sorted by
    the mean of the metric. Rows without a value come last, and equal rows keep the order of their
    jobs.
    """
    rows: dict[Any, list[Job]] = {}
    for job in jobs:
        settings = frozenset((key, job.settings[key]) for key in job.settings if key not in REPEATS)
        rows.setdefault(settings if job.status == "done" else job.name, []).append(job)

    def rank(row: list[Job]) -> tuple[int, float]:
        values = values_of(row, name)
        sign = -1 if high else 1
        mean = sign * statistics.fmean(values) if values else math.inf
        return STATUSES.index(row[0].status), mean

    return sorted(rows.values(), key=rank)


def values_of(jobs: Iterable[Job], name: str) -> list[float]:
    """Return the values of a metric in the jobs that have it."""
    return [job.numbers[name] for job in jobs if name in job.numbers]
