"""Which job of a sweep is best: the rule that the sweep's table and its page share."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from stoker.sweeps.jobs import Job

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


def ranked(done: Iterable[Job], keys: Sequence[str], name: str, high: bool) -> list[list[Job]]:
    """Return the finished jobs in groups, the best mean of the metric `name` first.

    The jobs of a group have the same settings, except for their seed or fold. Groups without a
    value come last, and equal groups keep the order of their jobs. `keys` are the settings in
    which the jobs of the sweep differ.
    """
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in done:
        settings = [job.settings.get(key) for key in keys if key not in REPEATS]
        groups.setdefault(tuple(settings), []).append(job)

    def rank(group: list[Job]) -> float:
        values = [job.best.value for job in group if job.best and job.best.name == name]
        if not values:
            return math.inf
        return statistics.fmean(values) * (-1 if high else 1)

    return sorted(groups.values(), key=rank)
