"""The curves of a run: loss, metric and learning rate over the epochs."""

import math
from typing import Any

from stoker.runs.report.inputs import Best, Row
from stoker.runs.report.words import epoch, shortened
from stoker.trainer.history import weight_of

Points = list[tuple[float, float]]


def frames(rows: list[Row], best: Best | None) -> list[dict[str, Any]]:
    """Return {"title", "keys", "best", "svg"} of each frame with at least two points on a line."""
    split = "val" if best is None else best.name.partition("/")[0]
    if split == "train" or not any(f"{split}/loss" in row for row in rows):
        split = "val"
    name = metric_of(rows, split)
    if best is not None and is_metric(best.name, split) and any(best.name in row for row in rows):
        name = best.name
    drawn = [frame("loss", rows, f"{split}/loss", best)]
    if name is not None:
        drawn.append(frame("metric", rows, name, best))
    drawn.append(rate_frame(rows))
    return [one for one in drawn if one is not None]


def metric_of(rows: list[Row], split: str = "val") -> str | None:
    """Return the first metric of a validation set that is not the loss."""
    for row in rows:
        for name in row:
            if is_metric(name, split):
                return name
    return None


def is_metric(name: str, split: str) -> bool:
    return name.startswith(f"{split}/") and name != f"{split}/loss"


def frame(place: str, rows: list[Row], name: str, best: Best | None) -> dict[str, Any] | None:
    """Draw the training and validation curves of a metric, with a mark at the best epoch."""
    from stoker.runs import plots

    _, _, metric = name.partition("/")
    title = shortened(metric)
    lines = {"train": pooled(rows, f"train/{metric}"), "val": series(rows, name)}
    if max(map(len, lines.values())) < 2:
        return None
    point = None
    for x, y in lines["val"]:
        if best is not None and x == best.epoch and point is None:
            point = (x, y)
    svg = plots.curves(place, lines, point, f"{title} over the epochs", place == "loss")
    return {
        "title": title,
        "keys": [key for key, points in lines.items() if points],
        "best": epoch(point[0]) if point is not None else None,
        "svg": svg,
    }


def rate_frame(rows: list[Row]) -> dict[str, Any] | None:
    """Draw the learning rate."""
    from stoker.runs import plots

    points = series(rows, "train/lr")
    if len(points) < 2:
        return None
    svg = plots.curves("rate", {"val": points}, None, "learning rate over the epochs")
    return {"title": "learning rate", "keys": [], "best": None, "svg": svg}


def series(rows: list[Row], name: str) -> Points:
    return [(row["epoch"], row[name]) for row in rows if name in row]


def pooled(rows: list[Row], name: str) -> Points:
    """Return a metric's means over stretches that have the samples of the largest row.

    The row before an evaluation may cover only a batch or two, whose mean would jump.
    """
    rows = [row for row in rows if name in row]
    most = max((samples_in(row) for row in rows), default=1)
    points: list[tuple[float, float]] = []
    samples = math.inf  # of the last stretch
    for row in reversed(rows):
        if samples >= most:
            points.append((row["epoch"], 0.0))
            samples = 0
        samples += samples_in(row)
        end, mean = points[-1]
        points[-1] = (end, mean + (row[name] - mean) * samples_in(row) / samples)
    return points[::-1]


def samples_in(row: Row) -> float:
    return max(1, weight_of(row))
