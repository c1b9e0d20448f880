"""The index of a folder of runs: index.html, which lists the runs and sweeps in it, and below.

A run updates the index of the project's runs folder if it is in there, and an index that is already
one or two folders above it. `python -m stoker.runs.index DIR` draws one for any folder.

The page is its own cache: it has a line of JSON for each run, and the line starts with what tells
whether the run's files have changed. Only then they are read again. The files are untrusted.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker import project
from stoker.command import dotted, subcommand
from stoker.runs import directory, lock, saved_config, status
from stoker.runs.json_files import read_json
from stoker.runs.page import render, source
from stoker.runs.readable import natural
from stoker.runs.result import RunResult, are_overrides
from stoker.runs.rows import Row, metrics_in
from stoker.trainer import files
from stoker.trainer.errors import UserError, as_typed, printable

NAME = "index.html"
LOCK = ".index.lock"
SWEEP = "sweep.json"
SWEEP_PAGE = "sweep.html"
JOB = "job.json"
LEVELS = 2  # levels: runs/NAME and runs/GROUP/NAME
PATIENCE = 5  # seconds to wait for another process that is updating the page
# seconds a run may spend adding missing runs to the page; the next one continues
SECONDS = 0.5
START = '<script type="application/json" id="runs">\n'
END = "</script>\n"
MOST_POINTS = 30  # points in a curve
MOST_HEAD = 2**16  # bytes of a page up to its lines
MOST_BYTES = 2**25  # size of a metrics.jsonl or of a page, which then has 25,000 runs
MOST_SETTINGS = 60
MOST_CONFIG = 300  # settings of a reproduced run, which are compared but not listed
MOST_TEXT = 200  # characters in a text
PLACES = ("dataset.path", "dataset.root")  # keys that locate the user's own data

STATE = (SWEEP, SWEEP_PAGE, directory.RESULT, directory.METRICS)  # files on which an entry depends
ENCODER = json.JSONEncoder(separators=(",", ":"))

Entry = dict[str, Any]


def update(run: str | Path, *, draws: bool = True) -> None:
    """Update each index that lists this run or sweep; do nothing where that is not possible.

    Without `draws` only a page that is already there changes, which takes milliseconds.
    """
    run = Path(run).absolute()
    if (run / JOB).exists() or not any((run / name).exists() for name in (directory.CONFIG, SWEEP)):
        return  # a sweep is listed, but not its jobs, and not a run that has yet to begin
    usual = Path(project.current().runs_folder).absolute()
    for folder in run.parents[:LEVELS]:
        begins = draws and folder == usual and not os.path.lexists(folder / NAME)
        if begins or is_index(folder):
            with contextlib.suppress(Exception):  # an index must never fail a training
                write(folder, SECONDS, draws=draws)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a run directory as `lock.held` does, and then update the indexes that list the run."""
    try:
        with lock.held(folder):
            yield
    finally:
        update(folder)


def is_index(folder: Path) -> bool:
    """Whether a folder has an index, and not an index.html of another kind."""
    try:
        with files.open_plain(folder / NAME) as file:
            return START.encode() in file.read(MOST_HEAD)
    except OSError:
        return False


def text_of(folder: Path) -> str:
    """Return the text of a folder's index.html; "" if it has none, or one that is too large."""
    try:
        return files.read(folder / NAME, MOST_BYTES).decode()
    except (OSError, ValueError):
        return ""


def write(folder: Path, seconds: float = float("inf"), *, draws: bool = True) -> Path:
    """Write the index of a folder and return its path; OSError if it cannot be written.

    Runs that are not in the page yet are read for `seconds`.
    """
    with files.open_plain(folder / LOCK, os.O_RDWR | os.O_CREAT) as file:
        with contextlib.suppress(OSError):  # a file system without locks
            lock.wait_for(file, PATIENCE)
        before, _, rest = text_of(folder).partition(START)
        lines, _, after = rest.partition(END)
        if draws:  # only the page's lines are reused
            html = render(NAME, version=version())
            before, _, after = html.partition(START + END)
        elif version() not in before:
            return folder / NAME
        listed = []
        room = MOST_BYTES - len(before) - len(after)
        for line in updated(folder, lines, time.monotonic() + seconds):
            room -= len(line)
            if room > 0:  # a larger page would not be read again
                listed.append(line)
        files.write_text(folder / NAME, f"{before}{START}{''.join(listed)}{END}{after}")
    return folder / NAME


def version() -> str:
    """Return a name for the page without its lines, which changes with any of its sources."""
    text = source("base.html", NAME, "style.css", "index.css", "script.js", "chart.js", "index.js")
    return hashlib.sha256(text.encode()).hexdigest()


def updated(folder: Path, lines: str, until: float) -> Iterator[str]:
    """Yield the line of each run: one of `lines`, if the files of the run have not changed."""
    known = {}
    for line in lines.splitlines(keepends=True):
        if "<" not in line:
            known[line.partition("\t")[0]] = line
    for name, names in runs_in(str(folder)):
        path = os.path.join(folder, name)
        try:
            name.encode()
            start = f"[{escaped([name, *state_of(path, names)])},"
            line = known.get(start, "")
            if not line and time.monotonic() < until:
                line = f"{start}\t{escaped(entry_of(Path(path), names))}]\n"
        except (OSError, UnicodeError):  # just removed, or its name is not Unicode
            continue
        yield line


def escaped(value: Any) -> str:
    """Return the value as JSON that can stand in HTML."""
    return ENCODER.encode(value).replace("<", r"\u003c")


def runs_in(folder: str, levels: int = LEVELS, start: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield the path of each run and sweep from the folder, and the names in it; no link is
    followed.
    """
    with os.scandir(folder) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in reversed(folders):  # by default, names start with the date
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            names = set(os.listdir(path))
            if names & {SWEEP, directory.CONFIG, directory.RESULT}:
                yield start + name, names
            elif levels > 1 and not name.startswith("."):
                yield from runs_in(path, levels - 1, f"{start}{name}/")


def state_of(path: str, names: set[str]) -> list[Any]:
    """Return what changes when the entry of a run or sweep does."""
    kept = [name for name in STATE if name in names]
    times = [os.stat(os.path.join(path, name)).st_mtime_ns for name in kept]
    ended = SWEEP in names or directory.RESULT in names
    return [times, directory.REPORT in names, not ended and lock.is_held(path)]


def entry_of(path: Path, names: set[str]) -> Entry:
    """Return what the page shows of a run or sweep."""
    return entry_of_sweep(path) if SWEEP in names else entry_of_run(path, names)


def entry_of_run(path: Path, names: set[str]) -> Entry:
    """Return what the page shows about a run; templates/index.js turns it into columns."""
    result = RunResult.read(path)
    config = config_of(path)
    times = status.Status.read(path)
    started = times.started
    state = status.state_of(path, result)
    entry: Entry = {
        "status": state,
        "seconds": None if state == "running" else seconds_of(path, times),
        "time": started if started and 0 < started < 1e11 else path.stat().st_mtime,
        "data": data_of(config),
        "model": name_of(config, "model"),
        "settings": settings_of(path, config),
        "report": directory.REPORT if directory.REPORT in names else None,
    }
    if entry["settings"].get("task") == "reproduce":  # nothing else was typed
        entry["config"] = shown_pairs(texts_of(config), MOST_CONFIG)
    monitored = None
    if result is not None:
        if result.seconds is not None:
            entry["seconds"] = result.seconds
        entry["note"] = shown(result.error or result.stopped or "")
        tests = list(result.tests().items())
        entry["test"] = tests[0] if tests else None
        if result.best is not None:
            monitored = result.best.name
            entry["best"] = [shown(monitored), result.best.value, result.best.mode == "min"]
    elif directory.METRICS in names:
        from stoker.runs.report import inputs

        best = inputs.best_so_far(config, inputs.read_rows(path / directory.METRICS))
        if best is not None:
            monitored = best.name
            entry["best"] = [shown(monitored), best.value, not best.is_high]
    entry["curves"] = curves_of(path / directory.METRICS, monitored)
    return entry


def seconds_of(path: Path, times: status.Status) -> float | None:
    """Return how long a run trained since it was last started, if its files tell."""
    metrics = path / directory.METRICS
    ended = times.ended
    if ended is None and metrics.exists():  # a process that was killed
        ended = metrics.stat().st_mtime
    seconds = (ended or 0) - (times.resumed or 0)
    return seconds if times.resumed and 0 <= seconds < 1e9 else None


def config_of(path: Path) -> dict[str, Any]:
    """Return the flat config of a run; {} if it cannot be read."""
    try:
        return dotted.flat(saved_config.load_config("run", path))
    except UserError:
        return {}


def name_of(config: dict[str, Any], group: str) -> str:
    """Return the name of the class or function that a group of the config builds."""
    return shown(config.get(f"{group}._target_") or "").rpartition(".")[2]


def data_of(config: dict[str, Any]) -> str:
    """Return the name of a run's data: that of its file or folder for your own."""
    for key in PLACES:
        place = config.get(key)
        if isinstance(place, str) and "${" not in place:
            return shown(Path(place).name)
    return name_of(config, "dataset")


def settings_of(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return {key: value}: what was typed for a run, or all settings of a script."""
    typed = saved_config.overrides_in(path)
    return shown_pairs(texts_of(config) if typed is None else pairs(typed))


def texts_of(config: dict[str, Any]) -> dict[str, str]:
    """Return all settings as they would be typed."""
    return {key: as_typed(value) for key, value in config.items()}


def shown_pairs(values: dict[str, str], most: int = MOST_SETTINGS) -> dict[str, str]:
    """Return settings for the page: some of them, shortened, without the folder."""
    keys = [key for key in values if key != "run_dir"]
    return {shown(key): shown(values[key]) for key in keys[:most]}


def pairs(typed: list[str]) -> dict[str, str]:
    """Return typed settings as {key: value}."""
    split = (override.lstrip("+").partition("=") for override in typed)
    return {key: value for key, equals, value in split if equals}


def shown(value: object) -> str:
    """Return a value from a file as text of one line, shortened."""
    return printable(" ".join(str(value).split()))[:MOST_TEXT]


def curves_of(path: Path, name: str | None) -> dict[str, list[list[float]]]:
    """Return {metric: [steps, values]} for the losses and for `name`, or else another metric."""
    try:
        lines = files.read(path, MOST_BYTES).splitlines()
    except OSError:
        return {}
    evaluations = [line for line in lines if b'"val/' in line]
    others = [line for line in lines if b'"val/' not in line]
    rows = [*parsed(thinned(others)), *parsed(thinned(evaluations))]
    names = dict.fromkeys(["train/loss", "val/loss"])
    if name is not None:
        names[name] = None
    else:
        metrics = [key for row in rows for key in row if key.startswith("val/")]
        names.update(dict.fromkeys(metrics[:2]))
    curves = {}
    for key in names:
        points = [row for row in rows if isinstance(row.get(key), float)]
        if points:
            values = [float(f"{row[key]:.4g}") for row in points]
            curves[key] = [[row["step"] for row in points], values]
    return curves


def thinned(lines: list[bytes]) -> list[bytes]:
    """Return at most MOST_POINTS of the lines, the first and the last among them."""
    if len(lines) <= MOST_POINTS:
        return lines
    return [lines[i * (len(lines) - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def parsed(lines: list[bytes]) -> Iterator[Row]:
    """Yield the rows in these lines that have a step."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                metrics = metrics_in(row)
                if "step" in metrics:
                    yield metrics


def entry_of_sweep(path: Path) -> Entry:
    """Return what the page shows of a sweep: how many jobs have ended, and the best one."""
    record = read_json(path / SWEEP) or {}
    jobs = [job.parent for job in path.glob(f"*/{JOB}") if not job.parent.is_symlink()]
    jobs.sort(key=lambda job: natural(job.name))
    results = {job: RunResult.read(job) for job in jobs}
    ended = [result for result in results.values() if result is not None]
    failed = sum(not result.is_finished for result in ended)
    total = max(len(jobs), record["jobs"] if is_count(record.get("jobs")) else 0)
    best = best_of(results)
    example = best or next(iter(jobs), None)
    entry: Entry = {"data": "", "model": "", "curves": {}}
    if example is not None:
        entry = entry_of_run(example, set(os.listdir(example)))
    if best is not None:
        entry["job"] = shown(best.name)
    typed: Any = record.get("typed")
    state = "failed" if failed else "done"
    if len(ended) < total:
        state = "stopped"
    if any(result is None and lock.is_held(job) for job, result in results.items()):
        state = "running"
    return entry | {
        "sweep": True,
        "status": state,
        "time": (path / SWEEP).stat().st_mtime,
        "seconds": sum(result.seconds or 0 for result in ended),
        "settings": shown_pairs(pairs(typed) if are_overrides(typed) else {}),
        "note": f"{len(ended)} of {total} jobs" + (f", {failed} failed" if failed else ""),
        "report": SWEEP_PAGE if (path / SWEEP_PAGE).exists() else None,
    }


def best_of(results: dict[Path, RunResult | None]) -> Path | None:
    """Return the folder of the best job, by the metric of the first one that has a best."""
    bests = {job: result.best for job, result in results.items() if result and result.best}
    first = next(iter(bests.values()), None)
    if first is None:
        return None
    sign = 1 if first.mode == "max" else -1
    values = {job: sign * best.value for job, best in bests.items() if best.name == first.name}
    return max(values, key=lambda job: values[job])


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def main(arguments: list[str]) -> int:
    """Run `python -m stoker.runs.index DIR`, and return the exit code."""

    def draw(folder: Path) -> None:
        if os.path.lexists(folder / NAME) and not is_index(folder):
            raise UserError(f"{folder / NAME} is not an index of runs. Move the file away first.")
        print(f"index    {write(folder)}")

    usage = "python -m stoker.runs.index DIR, a folder of runs."
    return subcommand.run(arguments, usage, draw)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
