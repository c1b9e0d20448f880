"""The page of a sweep: its tables, and a plot of the results over each setting."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup, escape

from stoker.runs import plots, report
from stoker.runs.page import Column, render
from stoker.runs.report.words import shortened
from stoker.trainer.errors import printable
from stoker.trainer.readable import number

if TYPE_CHECKING:
    from stoker.sweeps.jobs import Job
    from stoker.sweeps.table import Sweep

MOST_SETTINGS = 24  # plotted settings


def of_sweep(
    sweep: "Sweep", counts: str, best: str | None, again: str | None, report: str | None = None
) -> str:
    """Return the page of a sweep.

    `counts` says how many jobs are done; `best` and `again` are the commands for the best job and
    for the remaining jobs; `report` links to the best job's report.
    """
    return render(
        "sweep.html",
        sweep=sweep,
        counts=counts,
        best=best,
        again=again,
        report=report,
        figures=figures(sweep),
        groups=of_groups(sweep),
        jobs=of_jobs(sweep),
    )


def figures(sweep: "Sweep") -> list[dict[str, Any]]:
    """Return {"title", "svg"} of the results over each setting; [] if nothing can be compared."""
    jobs = sweep.of("done") + sweep.of("pruned") + sweep.of("failed")
    if not sweep.compares or not jobs:
        return []
    values = [sweep.value(job) if job.status == "done" else None for job in jobs]
    done = [i for i, value in enumerate(values) if value is not None]
    choose = max if sweep.high else min
    best = choose(done, key=lambda i: values[i] or 0, default=0)
    drawn = []
    for i, key in enumerate(sweep.keys[:MOST_SETTINGS]):
        settings = [job.settings.get(key, "(default)") for job in jobs]
        label = f"{sweep.name or 'result'} over {key}, best at {settings[best]}"
        svg = plots.results(f"setting{i}", settings, values, best, label)
        drawn.append({"title": shortened(key, 60), "svg": svg})
    return drawn


def of_groups(sweep: "Sweep") -> list[Column]:
    """Return the table of the jobs that are done, those that differ only in their seed in one row.

    The deciding value comes first, where a phone has room. Runs outside a sweep may have little in
    common, so their settings are one column.
    """
    from stoker.sweeps.jobs import typed_for
    from stoker.sweeps.table import groups, tests_of

    if not sweep.groups:
        return []
    tests = tests_of(sweep)
    rows = groups(sweep, tests, "±")
    names, counts, values, *means = map(list, zip(*rows, strict=True))
    is_grouped = any(len(group) > 1 for group in sweep.groups)
    keys = [key for key in sweep.keys if not is_grouped or key != "seed"]
    firsts = [group[0] for group in sweep.groups]
    columns = []
    if sweep.name:
        columns.append(Column(sweep.name, values, True))
    if is_grouped:
        columns.append(Column("n", counts, True))
    if sweep.swept:
        columns += settings_of(firsts, keys)
    else:
        columns.append(Column("settings", [" ".join(typed_for(job, keys)) for job in firsts]))
    for name, cells in zip([*tests, "seconds"], means, strict=True):
        columns.append(Column(name, cells, True))
    jobs = Column("jobs" if sweep.swept else "runs", names)
    columns.insert(len(columns) if sweep.swept else 0, jobs)
    return columns


def of_jobs(sweep: "Sweep") -> list[Column]:
    """Return the table of all jobs, in their order, with a column of notes if there are any."""
    from stoker.sweeps.jobs import typed_for
    from stoker.sweeps.table import tests_of

    jobs = sweep.jobs
    columns = [
        Column("job" if sweep.swept else "run", [linked(sweep.folder, job) for job in jobs]),
        Column("status", [job.status for job in jobs]),
        Column(sweep.name or "best", [best_of(job, sweep.name) for job in jobs], True),
    ]
    if sweep.swept:
        columns += settings_of(jobs, sweep.keys)
    else:
        columns.append(Column("settings", [" ".join(typed_for(job, sweep.keys)) for job in jobs]))
    for test in tests_of(sweep):
        cells = [number(job.test[test]) if test in job.test else "" for job in jobs]
        columns.append(Column(test, cells, True))
    seconds = ["" if job.seconds is None else f"{job.seconds:.1f}" for job in jobs]
    columns.append(Column("seconds", seconds, True))
    if any(job.note for job in jobs):
        columns.append(Column("note", [" ".join(job.note.split()) for job in jobs]))
    return columns


def settings_of(jobs: "list[Job]", keys: list[str]) -> list[Column]:
    return [Column(key, [job.settings.get(key, "") for job in jobs]) for key in keys]


def best_of(job: "Job", name: str) -> str:
    """Return the best value of a job, with the metric's name unless that is `name`."""
    if not job.best:
        return ""
    value = number(job.best.value)
    return value if job.best.name == name else f"{job.best.name} {value}"


def linked(folder: Path, job: "Job") -> str:
    """Return the job's name, as a link to its report if it has one."""
    place = folder / job.name
    if place.is_symlink() or not (place / report.NAME).is_file():  # a link may lead anywhere
        return job.name
    name = escape(printable(job.name))
    return Markup(f'<a href="{quote(job.name)}/{report.NAME}">{name}</a>')
