"""The index of a folder of runs: index.html, which lists the runs and sweeps below the folder.

A run in the project's runs folder updates the index of that folder; any run updates an existing
index one or two folders above it. `stoker redraw DIR` writes the index of any folder.

The page is its own cache: it has a line of JSON for each run, and each line starts with the state
of the run's files. These files are untrusted, and are read again only if their state has changed.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker import project
from stoker.runs import directory, lock
from stoker.runs.directory import JOB, SWEEP
from stoker.runs.json_files import read_text
from stoker.runs.page import render
from stoker.runs.result import Best
from stoker.runs.sweep_record import SweepRecord
from stoker.trainer import files
from stoker.trainer.errors import UserError, printable
from stoker.trainer.number_format import counted

NAME = "index.html"
LOCK = ".index.lock"
SWEEP_PAGE = "sweep.html"
LEVELS = 2  # levels of folders: runs/NAME and runs/GROUP/NAME
PATIENCE = 5  # seconds to wait for another process that is updating the page
START = '<script type="application/json" id="runs">\n'
END = "</script>\n"
MOST_POINTS = 30  # points in a curve
MOST_HEAD = 2**16  # maximum bytes in a page before its lines of JSON
MOST_BYTES = 2**25  # size of a page that is read back, enough for about 25,000 runs
MOST_SETTINGS = 60
MOST_TEXT = 200  # characters in a text

STATE = (SWEEP, SWEEP_PAGE, directory.RESULT, directory.METRICS)  # files that an entry depends on

Entry = dict[str, Any]
Row = dict[str, float]


def update(run: str | Path) -> None:
    """Update every index that lists this run or sweep. Errors are ignored."""
    run = Path(run).absolute()
    names = {name for name in (directory.CONFIG, SWEEP, SWEEP_PAGE) if (run / name).exists()}
    if (run / JOB).exists() or (run.exists() and not names):
        return  # the jobs of a sweep, and runs that have not started, are not listed
    usual = Path(project.current().runs).absolute()
    for folder in run.parents[:LEVELS]:
        # Do not create an index for a sweep that has no page yet: it may turn out to be invalid,
        # and must then leave nothing behind.
        begins = names - {SWEEP} and folder == usual and not os.path.lexists(folder / NAME)
        if begins or is_index(folder):
            with contextlib.suppress(Exception):  # an index must never make a run fail
                write(folder)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run directory, like `lock.held`. At the end, update the indexes that list the run."""
    try:
        with lock.held(folder):
            yield
    finally:
        update(folder)


def is_index(folder: Path) -> bool:
    """Return whether a folder has an index.html that is an index of runs."""
    try:
        with files.open_plain(folder / NAME) as file:
            return START.encode() in file.read(MOST_HEAD)
    except OSError:
        return False


def write(folder: Path) -> Path:
    """Write the index of a folder and return its path. Raise OSError if that fails."""
    with files.open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
        with contextlib.suppress(OSError):  # the file system might not support locks
            lock.wait_for(file, PATIENCE)
        _, _, rest = read_text(folder / NAME, MOST_BYTES).partition(START)
        lines, _, _ = rest.partition(END)
        before, _, after = render(NAME).partition(START + END)
        listed = "".join(updated(folder, lines))
        files.write_text(folder / NAME, f"{before}{START}{listed}{END}{after}")
    return folder / NAME


def updated(folder: Path, lines: str) -> Iterator[str]:
    """Yield a line for each run, reused from `lines` if the run's files have not changed."""
    known = {}
    for line in lines.splitlines(keepends=True):
        if "<" not in line:
            known[line.partition("\t")[0]] = line
    for path, names in runs_in(str(folder)):
        name = Path(path).relative_to(folder).as_posix()
        try:
            name.encode()
            start = f"[{escaped([name, *state_of(path, names)])},"
            yield known.get(start) or f"{start}\t{escaped(entry_of(Path(path), names))}]\n"
        except (OSError, UnicodeError):  # the run was just removed, or its name is not Unicode
            continue


def escaped(value: Any) -> str:
    """Return the value as JSON that is safe inside HTML."""
    return json.dumps(value, separators=(",", ":")).replace("<", r"\u003c")


def runs_in(folder: str, level: int = 0) -> Iterator[tuple[str, set[str]]]:
    """Yield the path of each run and sweep below the folder, with the names of its files.

    Links are not followed.
    """
    try:
        names = set(os.listdir(folder))
    except OSError:  # a file, or a folder that cannot be read
        return
    if level > 0 and names & {SWEEP, directory.CONFIG, directory.RESULT}:
        yield folder, names
    elif level < LEVELS:
        for name in sorted(names, reverse=True):  # by default, names start with the date
            path = os.path.join(folder, name)
            if not name.startswith(".") and not os.path.islink(path):
                yield from runs_in(path, level + 1)


def state_of(path: str, names: set[str]) -> list[Any]:
    """Return the state of a run's or sweep's files. If the entry changes, so does the state."""
    kept = [name for name in STATE if name in names]
    times = [os.stat(os.path.join(path, name)).st_mtime_ns for name in kept]
    is_running = directory.RESULT not in names and lock.is_held(path)
    return [times, directory.REPORT in names, is_running]


def entry_of(path: Path, names: set[str]) -> Entry:
    """Return what the page shows for a run or sweep."""
    return entry_of_sweep(path) if SWEEP in names else entry_of_run(path, names)


def entry_of_run(path: Path, names: set[str]) -> Entry:
    """Return what the page shows for a run; templates/index.js turns it into columns."""
    from stoker.runs.report import inputs, summary

    try:
        run = inputs.read_run(path)
    except UserError:  # its config is damaged
        run = inputs.Run(path)
    times = run.status
    best = run.best
    return {
        "status": run.state,
        "seconds": run.result.seconds or times.seconds,
        "since": times.resumed if run.state == "running" else None,
        "time": time_of(times.started, path),
        "data": shown(summary.data_name(run)),
        "model": shown(summary.target_name(run, "model")),
        "settings": settings_of(run.overrides),
        "report": directory.REPORT if directory.REPORT in names else None,
        "note": shown(run.result.error or run.result.stopped or ""),
        "curves": curves_of(run.rows, best.name if best else "val/loss"),
        **numbers_of(best, run.result.tests()),
    }


def settings_of(overrides: list[str] | None) -> dict[str, str]:
    """Return {key: value} for the typed settings."""
    pairs = {}
    for override in overrides or []:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and key not in ("run_dir", "hydra.sweep.dir"):
            pairs[shown(key)] = shown(value)
    return dict(itertools.islice(pairs.items(), MOST_SETTINGS))


def shown(value: object) -> str:
    """Return a value from a file as one shortened line of text."""
    return printable(" ".join(str(value).split()))[:MOST_TEXT]


def curves_of(rows: list[Row], name: str) -> dict[str, list[Any]]:
    """Return {metric: [steps, values]} for the losses and for `name`."""
    from stoker.runs.plots import thin

    curves: dict[str, list[Any]] = {}
    for key in dict.fromkeys(["train/loss", "val/loss", name]):
        points = thin([(row["step"], row[key]) for row in rows if key in row], MOST_POINTS)
        if points:
            steps = [step for step, _ in points]
            curves[shown(key)] = [steps, [float(f"{value:.4g}") for _, value in points]]
    return curves


def entry_of_sweep(path: Path) -> Entry:
    """Return what the page shows for a sweep: how many jobs have ended, and the best row."""
    sweep = SweepRecord.read(path)
    note = f"{sweep.ended} of {counted(sweep.total, 'job')}"
    if sweep.failed:
        note += f", {sweep.failed} failed"
    status = "failed" if sweep.failed else "done"
    if lock.is_held(path):
        status = "running"
    elif sweep.ended < sweep.total:
        status = "stopped"
    folders = {job.name: job for job in path.iterdir() if not job.is_symlink()}
    best = [name for name in sweep.best_jobs if name in folders]
    entry = entry_of_run(folders[best[0]] if best else path, set())
    return entry | {
        "sweep": True,
        "status": status,
        "time": time_of(sweep.started, path),
        "seconds": sweep.seconds,
        "since": None,
        "settings": settings_of(sweep.typed),
        "note": note,
        "report": SWEEP_PAGE if (path / SWEEP_PAGE).exists() else None,
        "jobs": [shown(name) for name in best],
        **numbers_of(sweep.best, sweep.test),
    }


def time_of(started: float | None, path: Path) -> float:
    """Return when a run or sweep started; if `started` is not valid, when its folder changed."""
    return started if started and 0 < started < 1e11 else path.stat().st_mtime


def numbers_of(best: Best | None, tests: dict[str, float]) -> Entry:
    """Return the best value and the first test result."""
    test = next(iter(tests.items()), None)
    return {
        "test": [shown(test[0]), test[1]] if test else None,
        "best": [shown(best.name), best.value, best.mode == "min"] if best else None,
    }
