"""Read untrusted JSON and text files up to a size limit, and write JSON files atomically."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any, TypeVar, cast

from stoker.data.typed import typed
from stoker.trainer import files

T = TypeVar("T")
MOST_BYTES = 2**24  # result.json takes 2 KB; a confusion matrix of 1,000 classes takes 8 MB


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the text of a file, or "" if the file is missing, too large, or not UTF-8."""
    try:
        return files.read(path, most).decode()
    except (OSError, ValueError):
        return ""


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if the file is missing or contains no object."""
    return parsed(read_text(path))


def parsed(text: str | bytes) -> dict[str, Any]:
    """Return the object in a JSON text, or {} if the text is not a JSON object."""
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return contents if isinstance(contents, dict) else {}


def read_record(path: str | Path, record: type[T]) -> T:
    """Read a JSON file into this dataclass; return the defaults if the file is malformed."""
    with contextlib.suppress(TypeError):
        return cast(T, typed(read_json(path), record))
    return record()


def write_json(path: Path, contents: Any, indent: int | None = 2) -> None:
    """Write a JSON file, creating its folder. Without `indent`, write one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(path, json.dumps(finite(contents), indent=indent) + "\n")


def finite(value: Any) -> Any:
    """Replace nan and infinity, which JSON lacks, with None, and tensors with lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
