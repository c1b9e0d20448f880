"""The run directory: its name, the files in it, and how it is made."""

import atexit
import contextlib
import datetime
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from stoker.trainer.errors import UserError

CONFIG = "config.yaml"
RESULT = "result.json"
METRICS = "metrics.jsonl"
EVALUATION = "evaluation.json"
TYPED = "# typed: "  # begins a config.yaml; the rest of the line is what was typed, as a JSON list
# The files that say how a run ended: they go when it continues.
ENDING = (RESULT, EVALUATION, "report.html")
# The files that a run writes anew: a killed run may leave a part of one, and an older run stand in the way.
WRITTEN = (METRICS, *ENDING, "model.safetensors", "model.md")


def claim(model: str, dataset: str) -> str:
    """Make runs/<date>-<model>-<dataset>, with a number behind it if that is taken."""
    name = f"runs/{datetime.datetime.now():%Y-%m-%d_%H-%M-%S}-{model}-{dataset}"
    if make(Path(name)):
        return str(Path(name))
    paths = (Path(f"{name}-{i}") for i in itertools.count(2))
    return str(next(path for path in paths if make(path)))


def make(folder: Path, key: str = "run_dir") -> bool:
    """Make the folder, and return whether it is new; UserError if nothing can be written into it.

    Folders that are still empty when the process ends are removed: a mistake that is found before the training
    leaves nothing behind.
    """
    missing: list[Path] = []
    try:
        missing = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        missing = []
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        for part in folder.parents:
            if os.path.isfile(part):
                reason = f"{part} is a file"
        raise UserError(
            f"{key}={folder}: it cannot be made ({reason}). Type another {key}."
        ) from None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{key}={folder}: this is a file or cannot be written. Type another {key}.")
    atexit.register(remove_empty, missing)
    return bool(missing)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that nothing was written into; name the inner ones first."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()
