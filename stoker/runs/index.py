"""The index of a folder of runs: index.html, which lists the runs and sweeps below the folder.

A run in the project's runs folder updates the index of that folder; any run updates an existing
index one or two folders above it. `python -m stoker.runs.index DIR` writes the index of any folder.

The page is its own cache: it has a line of JSON for each run, and each line starts with the state
of the run's files. These files are untrusted, and are read again only if their state has changed.
"""

import contextlib
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stoker import project
from stoker.command import subcommand
from stoker.runs import directory, lock, ranking, status
from stoker.runs.directory import JOB, SWEEP
from stoker.runs.json_files import read_json, read_text
from stoker.runs.page import render
from stoker.runs.readable import natural
from stoker.runs.result import RunResult, valid_overrides
from stoker.trainer import files
from stoker.trainer.errors import UserError, as_typed, printable
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
MOST_BYTES = 2**25  # maximum size of a page, enough for about 25,000 runs
MOST_SETTINGS = 60
MOST_TEXT = 200  # characters in a text

STATE = (SWEEP, SWEEP_PAGE, directory.RESULT, directory.METRICS)  # files that an entry depends on

Entry = dict[str, Any]
Row = dict[str, float]


def update(run: str | Path, *, draws: bool = True) -> None:
    """Update every index that lists this run or sweep. Errors are ignored.

    With `draws=False`, only the list in an existing page is updated, which takes milliseconds.
    """
    run = Path(run).absolute()
    is_listed = any((run / name).exists() for name in (directory.CONFIG, SWEEP))
    if (run / JOB).exists() or (run.exists() and not is_listed):
        return  # the jobs of a sweep, and runs that have not started, are not listed
    usual = Path(project.current().runs).absolute()
    for folder in run.parents[:LEVELS]:
        begins = draws and is_listed and folder == usual and not os.path.lexists(folder / NAME)
        if begins or is_index(folder):
            with contextlib.suppress(Exception):  # an index must never make a run fail
                write(folder, draws=draws)


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


def write(folder: Path, *, draws: bool = True) -> Path:
    """Write the index of a folder and return its path. Raise OSError if that fails."""
    with files.open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
        with contextlib.suppress(OSError):  # the file system might not support locks
            lock.wait_for(file, PATIENCE)
        before, _, rest = read_text(folder / NAME, MOST_BYTES).partition(START)
        lines, _, after = rest.partition(END)
        if draws or not before:  # only the page's lines are reused
            before, _, after = render(NAME).partition(START + END)
        listed = []
        room = MOST_BYTES - len(before) - len(after)
        for line in updated(folder, lines):
            room -= len(line)
            if room > 0:  # a larger page could not be read back
                listed.append(line)
        files.write_text(folder / NAME, f"{before}{START}{''.join(listed)}{END}{after}")
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
    ended = SWEEP in names or directory.RESULT in names
    return [times, directory.REPORT in names, not ended and lock.is_held(path)]


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
    started = times.started or 0
    tests = list(run.result.tests().items())
    best = run.best
    is_reproduced = "task=reproduce" in (run.overrides or [])
    return {
        "status": run.state,
        "seconds": run.result.seconds or times.seconds,
        "since": times.resumed if run.state == "running" else None,
        "time": started if 0 < started < 1e11 else path.stat().st_mtime,
        "data": shown(summary.data_name(run)),
        "model": shown(summary.target_name(run, "model")),
        "settings": settings_of(run.config, run.overrides),
        "config": settings_of(run.config, None) if is_reproduced else {},  # all keys
        "report": directory.REPORT if directory.REPORT in names else None,
        "note": shown(run.result.error or run.result.stopped or ""),
        "test": [shown(tests[0][0]), tests[0][1]] if tests else None,
        "best": [shown(best.name), best.value, best.mode == "min"] if best else None,
        "curves": curves_of(run.rows, best.name if best else "val/loss"),
    }


def settings_of(config: dict[str, Any], typed: list[str] | None) -> dict[str, str]:
    """Return {key: value} for the typed settings, or for the whole config if `typed` is None."""
    pairs = {}
    if typed is None:
        pairs = {key: as_typed(value) for key, value in config.items()}
    for override in typed or []:
        key, equals, value = override.lstrip("+").partition("=")
        if equals:
            pairs[key] = value
    keys = [key for key in pairs if key not in ("run_dir", "hydra.sweep.dir")]
    return {shown(key): shown(pairs[key]) for key in keys[:MOST_SETTINGS]}


def shown(value: object) -> str:
    """Return a value from a file as one shortened line of text."""
    return printable(" ".join(str(value).split()))[:MOST_TEXT]


def curves_of(rows: list[Row], name: str) -> dict[str, list[Any]]:
    """Return {metric: [steps, values]} for the losses and for `name`.

    If spikes dwarf the other values, a third entry is the largest value to draw in a small curve.
    """
    from stoker.runs.plots import limit, thin
    from stoker.runs.report.curves import series

    curves: dict[str, list[Any]] = {}
    for key in dict.fromkeys(["train/loss", "val/loss", name]):
        points = thin(series(rows, key), MOST_POINTS)
        if not points:
            continue
        curve: list[Any] = [
            [step for step, _ in points],
            [four_digits(value) for _, value in points],
        ]
        most = limit([points])
        if most < math.inf:
            curve.append(four_digits(most))
        curves[shown(key)] = curve
    return curves


def four_digits(value: float) -> float:
    return float(f"{value:.4g}")


class SweepJob:
    """The properties of a sweep's job that the index needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.result = RunResult.read(folder)
        result = self.result or RunResult()
        record = read_json(folder / JOB) or {}
        typed = valid_overrides(record.get("overrides"))
        if typed is None:
            typed = result.overrides or []
        self.settings = ranking.settings_of(typed)
        self.best = result.best if result.is_finished else None
        self.tests = result.tests()
        self.seconds = result.seconds or status.Status.read(folder).seconds or 0.0
        self.is_done = result.is_finished and not result.stopped_by("pruned")


def entry_of_sweep(path: Path) -> Entry:
    """Return what the page shows for a sweep: how many jobs have ended, and the best row."""
    record = read_json(path / SWEEP) or {}
    planned = record.get("jobs")
    command = valid_overrides(record.get("typed"))
    folders = [job.parent for job in path.glob(f"*/{JOB}") if not job.parent.is_symlink()]
    folders.sort(key=lambda job: natural(job.name))
    jobs = [SweepJob(folder) for folder in folders]
    total = len(jobs)
    if isinstance(planned, int):
        total = max(total, planned)
    state, note = progress_of(jobs, total)
    return entry_of_best(path, jobs) | {
        "sweep": True,
        "status": state,
        "time": (path / SWEEP).stat().st_mtime,
        "seconds": sum(job.seconds for job in jobs) or None,
        "since": None,
        "settings": settings_of({}, command or []),
        "note": note,
        "report": SWEEP_PAGE if (path / SWEEP_PAGE).exists() else None,
    }


def progress_of(jobs: Sequence[SweepJob], total: int) -> tuple[str, str]:
    """Return the status of a sweep, and a note such as "3 of 12 jobs, 1 failed"."""
    ended = len([job for job in jobs if job.result is not None])
    states = [status.state_of(job.folder, job.result) for job in jobs]
    failed = states.count("failed")
    note = f"{ended} of {counted(total, 'job')}"
    if failed:
        note += f", {failed} failed"
    if ended < total:
        return ("running" if "running" in states else "stopped"), note
    return ("failed" if failed else "done"), note


def entry_of_best(path: Path, jobs: Sequence[SweepJob]) -> Entry:
    """Return the entry of a sweep's best job, with means over the jobs that differ only by seed."""
    keys = ranking.varied([job.settings for job in jobs])
    metric, high = ranking.monitored(jobs)
    done = [job for job in jobs if job.is_done]
    groups = ranking.ranked(done, keys, metric, high)
    first = groups[0] if groups else []
    values = {job: job.best.value for job in first if job.best and job.best.name == metric}
    best = list(values)
    folders = [job.folder for job in [*best, *jobs]]
    entry = entry_of_run(next(iter(folders), path), set())
    entry["jobs"] = [shown(job.folder.name) for job in best]
    if best:
        entry["best"] = [shown(metric), statistics.fmean(values.values()), not high]
        for test in list(best[0].tests)[:1]:
            tests = [job.tests[test] for job in best if test in job.tests]
            entry["test"] = [shown(test), statistics.fmean(tests)]
    for name, key in (("data", "dataset"), ("model", "model")):
        if key in keys:
            choices = [job.settings[key] for job in jobs if key in job.settings]
            entry[name] = shown(", ".join(dict.fromkeys(choices)))
    return entry


def main(arguments: list[str]) -> int:
    """Run `python -m stoker.runs.index DIR`, and return the exit code."""

    def draw(folder: Path) -> None:
        if os.path.lexists(folder / NAME) and not is_index(folder):
            raise UserError(f"{folder / NAME} is not an index of runs. Move the file away first.")
        print(f"index    {write(folder)}")

    usage = "python -m stoker.runs.index DIR, where DIR is a folder of runs."
    return subcommand.run(arguments, usage, draw)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
