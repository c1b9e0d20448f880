"""The run directory: its name, its files, and how it is created."""

import atexit
import contextlib
import datetime
import itertools
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
SAMPLES = "samples.jsonl"  # a language model's texts at each evaluation
WEIGHTS = "model.safetensors"  # the tested weights, for sharing
EVALUATION = "evaluation.json"
REPORT = "report.html"
PACKAGES = "provenance/packages.txt"
CHANGES = "provenance/changes.diff"
TYPED = "# typed: "  # the first line of a config.yaml: this, then a JSON list of the typed settings
# Files that describe how a run ended; they are removed when it resumes.
ENDING = (RESULT, EVALUATION, REPORT)
# Files that a run writes; a killed run may leave one of them incomplete.
WRITTEN = (METRICS, SAMPLES, STATUS, *ENDING, WEIGHTS, "model.md", CHANGES)

new: set[Path] = set()  # folders created by this process


def claim(model: str, dataset: str) -> str:
    """Create runs/<date>-<model>-<dataset>, with a number appended if it exists.

    The project file may name a folder other than `runs`.
    """
    runs = project.current().runs
    name = f"{runs}/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    return str(make_new(Path(name)))


def make_new(folder: Path, key: str = "run_dir") -> Path:
    """Create the folder, with a number appended to its name if it exists, and return its path."""
    numbered = (folder.with_name(f"{folder.name}-{i}") for i in itertools.count(2))
    return next(path for path in itertools.chain([folder], numbered) if make(path, key))


def make(folder: Path, key: str = "run_dir") -> bool:
    """Create the folder, and return whether it is new; UserError if it is not writable.

    Folders that are still empty when the process ends are removed, so that a mistake found before
    training leaves nothing behind.
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
    """Remove a run directory that this process made, after an error before the first step."""
    if folder in new:
        shutil.rmtree(folder, ignore_errors=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that are empty; pass the inner ones first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
