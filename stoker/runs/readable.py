"""Format results and times for people, like "loss 0.0707  acc 0.9861" and "4 min 10 s"."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.trainer.number_format import number


def numbers(results: Mapping[str, Any], split: str) -> str:
    """Format the numbers of a split in {"test/loss": ..., ...}, like "loss 0.0707  acc 0.9861"."""
    parts = []
    for name, value in results.items():
        place, _, metric = name.partition("/")
        if place == split and isinstance(value, float):
            parts.append(f"{metric} {number(value)}")
    return "  ".join(parts)


def aligned(rows: Sequence[Sequence[str]], right: slice) -> Iterator[str]:
    """Yield the rows as lines with aligned columns. The columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = list(map(str.ljust, row, widths))
        cells[right] = map(str.rjust, row[right], widths[right])
        yield "  ".join(cells).rstrip()


def seconds(value: float) -> str:
    """Return "3.2 s", "4 min 10 s" or "2 h 5 min"."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def duration(value: float) -> str:
    """Return "0.61 ms", "120 ms", "4.2 s" or "4 min 10 s"."""
    if value >= 1:
        return seconds(value)
    milliseconds = 1000 * value
    decimals = 2 if value < 0.01 else 0
    return f"{milliseconds:.{decimals}f} ms"
