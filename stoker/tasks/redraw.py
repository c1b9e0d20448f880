"""`stoker redraw DIR`: redraw the page of a run, a sweep or a folder of runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from stoker.command import shell
from stoker.runs import index
from stoker.runs.directory import CONFIG, SWEEP
from stoker.trainer.errors import UserError


def redraw(arguments: Sequence[str]) -> None:
    """Write the page of the folder again from its files; for a sweep, also print its table."""
    from stoker.runs import report
    from stoker.sweeps import sweep, table

    if len(arguments) != 1:
        raise UserError(
            "redraw: expected one folder: a run, a sweep or a folder of runs. "
            f"Type {shell.command([])} redraw DIR."
        )
    folder = Path(arguments[0])
    names = os.listdir(folder)
    if SWEEP in names:
        sweep.report(table.Sweep(folder))
    elif CONFIG in names:
        print(f"report   {report.write(folder)}")
    elif index.NAME in names and not index.is_index(folder):
        raise UserError(f"{folder / index.NAME} is not an index of runs. Move or rename it first.")
    elif index.NAME not in names and not any(index.runs_in(str(folder))):
        raise UserError(f"redraw {folder}: no run has begun in this folder.")
    else:
        print(f"index    {index.write(folder)}")
