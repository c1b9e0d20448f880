"""Untrusted JSON and text files: read with a limit on their size, written whole or not at all."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, TypeVar, cast

from stoker.trainer import files
from stoker.trainer.typed import typed

T = TypeVar("T")
MOST_BYTES = 2**24  # a result.json takes 2 KB, a confusion matrix of 1,000 classes 8 MB


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the text of a file; "" if it is missing, too large, or not UTF-8."""
    try:
        return files.read(path, most).decode()
    except (OSError, ValueError):
        return ""


def read_json(path: str | Path, most: int = MOST_BYTES) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it is missing or holds something else."""
    try:
        return parsed(files.read(path, most))
    except OSError:
        return None


def parsed(text: bytes) -> dict[str, Any] | None:
    """Return the object that a text is in JSON; None if it is something else."""
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) else None


def read_record(path: str | Path, record: type[T]) -> T:
    """Return the object in a JSON file as this dataclass, with its defaults if it is malformed."""
    with contextlib.suppress(TypeError):
        return cast(T, typed(read_json(path) or {}, record))
    return record()


def write_json(path: Path, contents: Any, indent: int | None = 2) -> None:
    """Write a JSON file, and the folder it is in; in one line without `indent`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(finite(contents), indent=indent) + "\n")


def finite(value: Any) -> Any:
    """Return the value with null for nan and infinity, which JSON lacks, and lists for tensors."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
