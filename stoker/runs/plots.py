"""Figures: the titles and the numbers that templates/report.js draws as plots."""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from stoker.trainer.errors import printable

Points = Sequence[tuple[float, float]]
Figure = dict[str, Any]

MOST_POINTS = 400  # maximum number of points in a drawn curve
COLOURS = 10  # the page has the colors c0 to c9, and those of "train" and "val"


def figure(title: str, x: str, lines: Mapping[str, Points], **more: Any) -> Figure:
    """Return a figure with named curves.

    `more` can have the entries

    - "y": the name of the y axis; "note": a text below the title
    - "end": the last step on the x axis; "epochs": the epochs per step
    - "warmup": the number of warmup steps; "best": the marked point of a curve
    - "log": whether the y axis is logarithmic if the values are positive and far apart
    - "unit": whether both axes run from 0 to 1; "ideal": whether the diagonal is drawn
    - "dots": points of a scatter plot; "bars": [edges, counts] of a histogram
    """
    drawn = []
    for i, (name, points) in enumerate(lines.items()):
        colour = name if name in ("train", "val") else f"c{i % COLOURS}"
        values = [(x, float(f"{y:.6g}")) for x, y in points]
        drawn.append({"name": printable(name), "colour": colour, "points": values})
    return {"title": printable(title), "x": x, "lines": drawn, **more}


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points of a curve, with the minimum and maximum of each interval."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / (most - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))}
    return sorted(kept)
