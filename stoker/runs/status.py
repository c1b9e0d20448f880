"""status.json: when a run began and ended, where it trains, and its planned length."""

import contextlib
import dataclasses
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.command import arguments
from stoker.runs import json_files, lock
from stoker.runs.directory import RESULT, STATUS
from stoker.runs.provenance import versions
from stoker.runs.result import Best, RunResult, best_of

if TYPE_CHECKING:
    from stoker.trainer.callbacks import Checkpoint
    from stoker.trainer.trainer import Trainer

ENDINGS = ("asked", "early_stopping")  # stop reasons that leave nothing to resume


@dataclasses.dataclass
class Status:
    """The contents of status.json. `started`, `resumed` and `ended` are Unix times."""

    started: float | None = None
    resumed: float | None = None  # when this process began training, at `step`
    ended: float | None = None
    seconds: float | None = None  # from the start of the process or the sweep's job to the end
    overrides: list[str] | None = None  # the settings typed on the command line
    step: int | None = None
    total_steps: int | None = None
    best: Best | None = None  # the best evaluation so far
    machine: str | None = None
    doctor: list[str] | None = None  # the doctor's warnings
    device: str | None = None
    precision: str | None = None
    samples: dict[str, int] | None = None  # by split
    versions: dict[str, str] | None = None

    @classmethod
    def read(cls, folder: Path) -> "Status":
        """Read the untrusted status of a run directory. If it is malformed, every field is None."""
        return json_files.read_record(folder / STATUS, cls)


def begin(folder: Path, trainer: "Trainer", samples: dict[str, int]) -> None:
    """Record that training has started or resumed. `samples` has their number in each split."""
    if trainer.step == trainer.total_steps and (folder / RESULT).exists():
        return  # the run is only being tested again
    from stoker.trainer import summary

    before = Status.read(folder) if trainer.step else Status()
    now = round(time.time(), 1)
    status = Status(
        started=before.started or now,
        resumed=now,
        overrides=arguments.typed(),
        step=trainer.step,
        total_steps=trainer.total_steps,
        best=before.best,
        machine=machine(trainer.device),
        device=str(trainer.device),
        precision=summary.precision(trainer),
        samples=samples,
        versions=versions(),
    )
    write(folder, status)


def write(folder: Path, status: Status) -> None:
    json_files.write_json(folder / STATUS, dataclasses.asdict(status))


def keep_best(folder: Path, saver: "Checkpoint") -> None:
    """Record the best evaluation so far, which is the one whose weights `saver` keeps."""
    write(folder, dataclasses.replace(Status.read(folder), best=best_of(saver)))


def end(folder: Path, seconds: float, doctor: list[str] | None = None) -> None:
    """Record that training has ended, with the time that it took and the doctor's warnings."""
    status = Status.read(folder)
    if status.started is not None and status.ended is None:
        status.ended = round(time.time(), 1)
        status.seconds = round(seconds, 3)
        status.doctor = doctor
        write(folder, status)


def state_of(folder: Path, result: RunResult) -> str:
    """Return the state of a run: "running", "stopped", "failed" or "done"."""
    if not result.has_ended:
        return "running" if lock.is_held(folder) else "stopped"
    if result.has_failed:
        return "failed"
    is_short = result.stopped is not None and result.stopped.kind not in ENDINGS
    return "stopped" if is_short else "done"


def machine(device: Any) -> str:
    """Return the name of the GPU or the processor."""
    import torch

    if device.type != "cpu":
        backend = torch.get_device_module(device)
        return str(getattr(backend, "get_device_name", str)(device))
    with contextlib.suppress(OSError):  # Linux only
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        names = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
        if names:
            return names[1]
    return platform.processor() or platform.machine()
