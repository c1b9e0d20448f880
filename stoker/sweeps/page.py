"""The page of a sweep: its table, and the data from which templates/sweep.js draws its plots."""

import math
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy

from stoker.data.typed import is_number
from stoker.runs import report
from stoker.runs.directory import METRICS
from stoker.runs.page import render
from stoker.runs.plots import thin
from stoker.runs.rows import metrics_in, read_rows
from stoker.sweeps import table
from stoker.sweeps.jobs import DEFAULT, Job
from stoker.sweeps.table import Sweep
from stoker.trainer.errors import printable
from stoker.trainer.number_format import counted, number

MOST_SETTINGS = 24  # maximum number of settings in the plots
MOST_POINTS = 20_000  # maximum points in all curves together
BINS = 5  # if a numeric setting has more values, they are grouped into this many bins


def of_sweep(sweep: Sweep, counts: str, best: str | None, typed: str, is_over: bool) -> str:
    """Return the page of a sweep.

    `counts` says how many jobs are done, `best` is the command for the best job, and `typed` is the
    command of the sweep (unless the sweep `is_over`, this command continues it).
    """
    shown = plots(sweep)
    return render(
        "sweep.html",
        sweep=sweep,
        table=table,
        tests=table.tests_of(sweep),
        numeric=[key["name"] for key in shown["keys"] if key["numbers"]],
        count=counted(len(sweep.jobs) + sweep.missing, "job"),
        counts=counts,
        best=best,
        typed=typed,
        is_over=is_over,
        link=lambda job: link_of(sweep, job),
        plots=shown,
        importances=importances(shown),
    )


def link_of(sweep: Sweep, job: Job) -> str | None:
    """Return the link to a job's report; None if there is no report or the folder is a symlink."""
    folder = sweep.folder / job.name
    if folder.is_symlink() or not (folder / report.NAME).is_file():
        return None
    return f"{quote(os.fsencode(job.name))}/{report.NAME}"


def plots(sweep: Sweep) -> dict[str, Any]:
    """Return the data for the plots: the settings, and a record for each job that has ended.

    The data is written as JSON. It contains only numbers and text without control characters.
    """
    choices = {key: values_of(sweep, key) for key in sweep.keys[:MOST_SETTINGS]}
    most = MOST_POINTS // max(1, len(sweep.jobs))
    records = []
    for row, group in enumerate(sweep.rows):
        for job in group:
            if job.status not in ("done", "pruned", "failed"):
                continue
            value = sweep.value(job)
            places = [
                values.index(job.settings.get(key, DEFAULT)) for key, values in choices.items()
            ]
            record = {
                "name": printable(job.name),
                "link": link_of(sweep, job),
                "row": row,
                "status": job.status,
                "value": value if value is not None and math.isfinite(value) else None,
                "shown": "" if value is None else number(value),
                "settings": places,
                "curve": curve_of(sweep, job, most),
            }
            records.append(record)
    return {
        "metric": printable(sweep.name or "result"),
        "high": sweep.high,
        "keys": [axis(key, values) for key, values in choices.items()] if records else [],
        "jobs": records,
    }


def values_of(sweep: Sweep, key: str) -> list[str]:
    """Return the values of a setting: in the order typed for a grid, sorted for a search."""
    values = list(dict.fromkeys(job.settings.get(key, DEFAULT) for job in sweep.jobs))
    if sweep.is_search:
        values.sort(key=lambda value: (len(value), value))
    return values


def axis(key: str, values: list[str]) -> dict[str, Any]:
    """Return the data for a setting's axis. `numbers` is None unless all values are numbers."""
    numbers = list(map(table.as_number, values))
    return {
        "name": printable(key),
        "values": [printable(table.short(value)) for value in values],
        "numbers": None if None in numbers else numbers,
    }


def curve_of(sweep: Sweep, job: Job, most: int) -> list[tuple[float, float]]:
    """Return (epoch, value) of the monitored metric, with no more than about `most` points."""
    points = []
    for row in map(metrics_in, read_rows(sweep.folder / job.name / METRICS)):
        if is_number(row.get("epoch")) and is_number(row.get(sweep.name)):
            points.append((round(row["epoch"], 4), float(f"{row[sweep.name]:.5g}")))
    return list(thin(points, max(4, most)))


def importances(plots: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (setting, fraction) for each setting, the most important one first."""
    jobs = [job for job in plots["jobs"] if job["status"] == "done"]
    done = [job for job in jobs if job["value"] is not None]
    values = [job["value"] for job in done]
    groups = []
    for i, key in enumerate(plots["keys"]):
        places = [job["settings"][i] for job in done]
        numbers = key["numbers"]
        if numbers and len(set(places)) > BINS:
            typed = [numbers[place] for place in places]
            edges = numpy.quantile(typed, numpy.linspace(0, 1, BINS + 1)[1:-1])
            places = list(numpy.searchsorted(edges, typed))
        groups.append(places)
    names = [key["name"] for key in plots["keys"]]
    pairs = zip(names, fractions(groups, values), strict=True)
    return sorted(pairs, key=lambda pair: pair[1], reverse=True)


def fractions(settings: Sequence[Sequence[Any]], values: Sequence[float]) -> list[float]:
    """Return the fraction of the variance in the ranks of the values that each setting explains.

    Each sequence in `settings` has the group of each value. A fraction is what the fit of all
    settings loses without this one, adjusted for chance, so it is about 0 for a setting without
    effect (the epsilon squared of Kelley 1935). If the values are too few to tell a setting from
    the others, it is what the setting explains by itself. Ranks are used because the value of a
    single diverged job would outweigh all others.
    """
    if len(values) == 0:
        return [0.0] * len(settings)
    _, ranks = numpy.unique(values, return_inverse=True)
    total, _ = unexplained(ranks, [])
    whole, freedom = unexplained(ranks, settings)
    explained = []
    for i, setting in enumerate(settings):
        rest, others = unexplained(ranks, [*settings[:i], *settings[i + 1 :]])
        if len(settings) > 1 and (freedom < 3 or others == freedom):
            explained += fractions([setting], values)
        elif freedom == 0 or total == 0:
            explained.append(0.0)
        else:
            by_chance = (others - freedom) * whole / freedom
            explained.append(max(0.0, (rest - whole - by_chance) / total))
    return explained


def unexplained(ranks: Any, settings: Sequence[Sequence[Any]]) -> tuple[float, int]:
    """Return the squared error of the least-squares fit of the ranks, and its degrees of freedom.

    The fit is a constant plus one number per group of each setting.
    """
    groups = [numpy.equal.outer(one, numpy.unique(one)) for one in settings]
    design = numpy.column_stack([numpy.ones(len(ranks)), *groups])
    weights, _, rank, _ = numpy.linalg.lstsq(design, ranks, rcond=None)
    return float(numpy.square(ranks - design @ weights).sum()), len(ranks) - int(rank)
