"""The shares of the time and of the memory of a run."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stoker.runs.report.words import percent

MEMORY = ("parameters", "gradients", "optimizer", "buffers", "data")
COLOURS = {  # the numbers of the style's colours
    "data": 0,
    "transfer": 6,
    "forward": 1,
    "backward": 4,
    "optimizer": 3,
    "step": 1,
    "evaluation": 2,
    "checkpoint": 5,
    "logging": 6,
    "other": 7,
    "parameters": 1,
    "gradients": 4,
    "buffers": 5,
}


def shares(
    values: Mapping[str, float | None] | None, names: Iterable[str], words: Callable[[float], str]
) -> list[dict[str, Any]]:
    """Return the parts of a bar, for the values of these names that are above 0."""
    known = {name: (values or {}).get(name) or 0 for name in names}
    known = {name: value for name, value in known.items() if value > 0}
    total = math.fsum(known.values())
    return [
        {
            "name": name,
            "width": f"{100 * value / total:.4f}",
            "percent": percent(value / total),
            "value": words(value),
            "colour": COLOURS[name],
        }
        for name, value in known.items()
    ]
