"""metrics.jsonl: the rows of numbers that a run logs, one JSON object per line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.runs.json_files import parsed
from stoker.trainer.files import open_plain

Row = dict[str, Any]


def lines_of(path: str | Path) -> Iterator[tuple[Row, bytes]]:
    """Yield each row with its line, up to the first line that is not a row."""
    with open_plain(path) as file:
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        row = parsed(line) if line.endswith(b"\n") else {}
        if not isinstance(row.get("step"), int):
            return
        yield row, line


def read_rows(path: str | Path) -> list[Row]:
    """Return all rows, or [] if the file is missing, or is a link or a pipe."""
    try:
        return [row for row, _ in lines_of(path)]
    except OSError:
        return []


def last_values(rows: list[Row]) -> Row:
    """Return the last value of each metric."""
    last: Row = {}
    for row in rows:
        last.update(metrics_in(row))
    return last


def training_speed(rows: list[Row]) -> int | None:
    """Return the training speed over these rows in samples per second, or None if unknown."""
    samples = 0
    seconds = 0
    for row in map(metrics_in, rows):
        samples += row.get("train/samples") or 0
        seconds += row.get("train/seconds") or 0
    return round(samples / seconds) if seconds else None


def metrics_in(entries: Row) -> Row:
    """Return the entries of an untrusted row or result that are metrics.

    A metric is a number, or null if the number was not finite. Evaluation metrics can be lists.
    """
    return {name: value for name, value in entries.items() if is_metric(name, value)}


def is_metric(name: str, value: Any) -> bool:
    if "/" not in name and name not in ("step", "epoch"):
        return False
    if isinstance(value, list):
        return not name.startswith("train/")
    if value is None:
        return True
    return isinstance(value, (int, float)) and abs(value) < 2**63
