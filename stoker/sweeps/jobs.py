"""The jobs of a sweep as typed records, read from their folders.

A job is a folder with a job.json (its typed settings) or a result.json. These files are untrusted,
so malformed contents are treated as missing.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stoker.command import arguments, exit_codes, invocation
from stoker.command.shell import setting
from stoker.runs.directory import JOB, RESULT
from stoker.runs.json_files import read_record, write_json
from stoker.runs.lock import is_held
from stoker.runs.result import Best, RunResult
from stoker.runs.sweep_record import SweepRecord
from stoker.trainer.errors import UserError

DEFAULT = "(default)"  # shown for a setting that was not typed
STATUSES = ("done", "pruned", "running", "unfinished", "failed")


@dataclass
class JobRecord:
    """The contents of job.json: the typed settings of a job."""

    overrides: list[str] | None = None


@dataclass
class Job:
    """A job, as read from its folder.

    `best` and `test` come from its result. `note` says why the job failed or was pruned. The sweep
    exits with the highest `code` of its jobs.
    """

    name: str
    overrides: list[str]
    status: str = "done"
    best: Best | None = None
    test: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    note: str = ""
    code: int = 0

    def __post_init__(self) -> None:
        self.settings = settings_of(self.overrides)

    @property
    def numbers(self) -> dict[str, float]:
        """The best value of the monitored metric and the test results, by name."""
        best = {self.best.name: self.best.value} if self.best else {}
        return best | self.test

    @property
    def reason(self) -> str:
        """The first line of the note."""
        return self.note.partition("\n")[0]


def settings_of(
    overrides: list[str], ignored: str = r"(sweep|hydra|run_dir)([./]|$)"
) -> dict[str, str]:
    """Return {key: value as typed} without the keys that configure the sweep itself."""
    values = {}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not re.match(ignored, key):
            values[key] = value
    return values


def read_jobs(folder: Path) -> list[Job]:
    """Read the jobs of a sweep, sorted by name; 2 comes before 10."""
    folders = {path.parent for name in (JOB, RESULT) for path in folder.glob(f"*/{name}")}
    in_order = sorted(folders, key=lambda path: (len(path.name), path.name))
    return [read_job(path) for path in in_order]


def read_job(folder: Path) -> Job:
    # Check this before reading the result: a job that has ended by now has written its result.
    is_running = is_held(folder)
    result = RunResult.read(folder)
    job = Job(folder.name, overrides_in(folder) or result.overrides or [])
    if result.is_finished:
        job.best = result.best
        job.seconds = result.seconds
        job.test = result.tests()
        if result.stopped_by("pruned"):
            job.status = "pruned"
            job.note = str(result.stopped)
    elif result.error is not None and not is_running:
        job.status = "failed"
        job.note = result.error
        job.code = result.code if result.code in exit_codes.FAILED else exit_codes.TRAINING_ERROR
    else:
        job.status = "running" if is_running else "unfinished"
        job.code = exit_codes.IN_USE if is_running else exit_codes.TRAINING_ERROR
    return job


def overrides_in(folder: Path) -> list[str] | None:
    """Return the typed settings of a job from its job.json; None if they are missing."""
    return read_record(folder / JOB, JobRecord).overrides


def typed_for(job: Job, keys: Iterable[str], shown: Callable[[str], str] = str) -> list[str]:
    """Return a job's settings for these keys as they were typed. `shown` formats the values."""
    typed = []
    for key in keys:
        if key in job.settings:
            # `~key` removes a setting and needs no value
            typed.append(key if key.startswith("~") else f"{key}={shown(job.settings[key])}")
    return typed


def command_line() -> list[str]:
    """Return the command line of this process as it was typed, without the program."""
    added = arguments.search_path()
    return [arguments.with_one_plus(one) for one in sys.argv[1:] if one not in added]


def command_to_continue(folder: Path) -> str:
    """Return the command line that continues the sweep."""
    place = setting("hydra.sweep.dir", folder)
    typed = SweepRecord.read(folder).typed or []
    typed = [override for override in typed if not override.startswith("hydra.sweep.dir=")]
    return shlex.join([*invocation.program(), *typed, place])


def check_command(folder: Path, varied: list[str]) -> None:
    """Raise UserError if the sweep in the folder was started with other settings.

    Settings of the sweep as a whole, such as sweep.trials, may differ. The settings that a grid
    varies must be typed in the same order, because their order decides the jobs' numbers.
    """
    ignored = r"-|(hydra|sweep/pruner|resume|overwrite)([./]|$)|sweep\.(?!space)"
    before = settings_of(SweepRecord.read(folder).typed or command_line(), ignored)
    now = settings_of(command_line(), ignored)
    differences = []
    for key in now | before:
        value = now.get(key, DEFAULT)
        was = before.get(key, DEFAULT)
        if value != was:
            differences.append(f"{key}={was}, not {value}")
    order_before = [key for key in before if key in varied]
    order_now = [key for key in now if key in varied]
    if order_before != order_now:
        differences.append(f"{' before '.join(order_before)}, not {' before '.join(order_now)}")
    if differences:
        raise UserError(
            f"hydra.sweep.dir={folder}: this sweep was started with {differences[0]}.\n"
            "Choose a different hydra.sweep.dir, or continue the existing sweep with:\n"
            f"{command_to_continue(folder)}"
        )


def begin(folder: str) -> None:
    """Write the job.json of this process's job, and remove the result of an earlier failure."""
    path = Path(folder)
    if RunResult.read(path).has_failed:
        (path / RESULT).unlink()
    write_json(path / JOB, {"overrides": arguments.typed()})
