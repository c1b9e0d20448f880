"""The page of a sweep: its tables, and a plot of the results over each setting."""

from typing import Any

from stoker.runs import plots, report
from stoker.runs.page import render
from stoker.runs.report.words import shortened
from stoker.sweeps import jobs, table
from stoker.sweeps.table import Sweep
from stoker.trainer.readable import number

MOST_SETTINGS = 24  # plotted settings


def of_sweep(
    sweep: Sweep, counts: str, best: str | None, again: str | None, link: str | None = None
) -> str:
    """Return the page of a sweep.

    `counts` says how many jobs are done; `best` and `again` are the commands for the best job and
    for the remaining jobs; `link` leads to the best job's report.
    """
    return render(
        "sweep.html",
        sweep=sweep,
        table=table,
        typed_for=jobs.typed_for,
        number=number,
        tests=table.tests_of(sweep),
        counts=counts,
        best=best,
        again=again,
        link=link,
        report=report.NAME,
        reported=[job.name for job in sweep.jobs if has_report(sweep, job)],
        figures=figures(sweep),
    )


def has_report(sweep: Sweep, job: jobs.Job) -> bool:
    """Whether there is a report of the job in the sweep's folder, where no link leads out of it."""
    folder = sweep.folder / job.name
    return not folder.is_symlink() and (folder / report.NAME).is_file()


def figures(sweep: Sweep) -> list[dict[str, Any]]:
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
