"""The run directory: its name, its files, and how it is created."""

import atexit
import contextlib
import datetime
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from stoker import project
from stoker.trainer.errors import UserError

CONFIG = "config.yaml"
RESULT = "result.json"
STATUS = "status.json"  # start, end and machine of the run
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"  # texts that a language model generates at each evaluation
WEIGHTS = "model.safetensors"  # the tested weights, for sharing
EVALUATION = "evaluation.json"
REPORT = "report.html"
SWEEP = "sweep.json"  # command line and summary of a sweep, in its directory
JOB = "job.json"  # the typed settings of a sweep's job
PACKAGES = "provenance/packages.txt"
CHANGES = "provenance/changes.diff"
# Files that describe how a run ended; they are removed when it resumes.
ENDING = (RESULT, EVALUATION, REPORT)
# Files that a run writes; a killed run can leave one of them incomplete.
WRITTEN = (METRICS, SAMPLES, STATUS, *ENDING, WEIGHTS, "model.md", CHANGES)

new: set[Path] = set()  # folders created by this process


def claim(model: str, dataset: str) -> str:
    """Create runs/<date>-<model>-<dataset> and return its path.

    If the folder exists, append a number. The project file can name a folder other than `runs`.
    """
    runs = project.current().runs
    name = f"{runs}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    path = name
    number = 1
    while not make(Path(path)):
        number += 1
        path = f"{name}-{number}"
    return path


def make(folder: Path, key: str = "run_dir") -> bool:
    """Create the folder if it is missing, and return whether it was created.

    A new folder that is still empty when the process ends is removed, so that a mistake found
    before training leaves nothing behind. Raises UserError if the folder is not writable.
    """
    missing = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    reason: object = "it is a file, or not writable"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        missing = []
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UserError(
            f"{key}={folder}: cannot write to this folder ({reason}). Choose a different {key}."
        )
    atexit.register(remove_empty, missing)
    if missing:
        new.add(folder)
    return bool(missing)


def remove_untrained(folder: Path) -> None:
    """Remove a run directory that this process created. Call this after an early failure."""
    if folder in new:
        shutil.rmtree(folder, ignore_errors=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove each folder that is empty. Pass inner folders before outer ones."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
