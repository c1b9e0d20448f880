"""The curves of a run over its steps: loss, metrics, learning rates, and what the device did."""

import math
from typing import Any

from stoker.runs import plots
from stoker.runs.report.inputs import Best, Row, Run
from stoker.runs.report.words import shortened
from stoker.trainer.history import weight_of
from stoker.trainer.typed import is_number

MOST_METRICS = 6  # metrics drawn beside the loss
MOST_RATES = 8  # parameter groups drawn, as many as the style has colors
LOSS_FAR = 30  # ratio of losses above which the axis is logarithmic
SCHEDULES = "stoker.trainer.schedules."
MEASURED = {  # {name in a row: title}
    "train/grad_norm": "gradient norm",
    "device/memory_mib": "device memory held, MiB",
}

Lines = dict[str, list[tuple[float, float]]]


def frames(run: Run) -> list[dict[str, Any]]:
    """Return {"title", "keys", "best", "warmup", "svg"} of each frame that has a line.

    The keys are {name of a curve: its color}.
    """
    rows = run.rows
    best = run.best
    split = "val"
    if best is not None:
        split, _, _ = best.name.partition("/")
    if split == "train" or f"{split}/loss" not in names_in(rows, f"{split}/"):
        split = "val"
    names = metrics_of(rows, split)
    if best is not None and best.name in names:
        names.remove(best.name)
        names.insert(0, best.name)
    drawn = [metric_frame(run, f"{split}/loss", LOSS_FAR)]
    for name in names[:MOST_METRICS]:
        drawn.append(metric_frame(run, name))
    drawn.append(frame(run, "learning rate", rates(run)))
    for name, title in MEASURED.items():
        lines = {title: series(rows, name)}
        drawn.append(frame(run, title, lines))
    return [one for one in drawn if one is not None]


def metrics_of(rows: list[Row], split: str = "val") -> list[str]:
    """Return the metrics of a validation set that are not the loss."""
    names = names_in(rows, f"{split}/")
    if f"{split}/loss" in names:
        names.remove(f"{split}/loss")
    return names


def names_in(rows: list[Row], start: str) -> list[str]:
    """Return the names of numbers that begin so, in their order."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return [name for name in names if name.startswith(start)]


def metric_frame(run: Run, name: str, far: float = math.inf) -> dict[str, Any] | None:
    """Draw the training and validation curves of a metric, with a mark at the best step."""
    _, _, metric = name.partition("/")
    lines = {
        "train": pooled(run.rows, f"train/{metric}"),
        "val": series(run.rows, name),
    }
    return frame(run, shortened(metric), lines, run.best, far)


def frame(
    run: Run, title: str, lines: Lines, best: Best | None = None, far: float = math.inf
) -> dict[str, Any] | None:
    """Draw curves over the steps; None if none of them has two points."""
    lines = {name: points for name, points in lines.items() if points}
    if max(map(len, lines.values()), default=0) < 2:
        return None
    colours = {}
    for i, name in enumerate(lines):
        colours[name] = name if name in ("train", "val") else f"c{i}"
    points = [point for point in lines.get("val", []) if best and point[0] == best.step]
    point = points[0] if points else None
    warmup = warmup_of(run)
    last = run.rows[-1]
    svg = plots.curves(
        lines,
        f"{title} over the steps",
        colours,
        best=point,
        warmup=warmup,
        far=far,
        epochs=last["epoch"] / max(1, last["step"]),
    )
    has_keys = len(lines) > 1 or "val" in lines
    return {
        "title": title,
        "keys": colours if has_keys else {},
        "best": f"step {point[0]:,}" if point else None,
        "warmup": warmup,
        "svg": svg,
    }


def warmup_of(run: Run) -> int:
    """Return the steps of the warmup; 0 without one, or if it is unknown."""
    warmup = run.config.get("scheduler.warmup")
    total = run.total_steps
    is_ours = str(run.config.get("scheduler._target_")).startswith(SCHEDULES)
    if not is_ours or not is_number(warmup) or not total:
        return 0
    steps: float = warmup
    if warmup < 1:
        steps *= total
    return round(min(max(0, steps), total))


def rates(run: Run) -> Lines:
    """Return the learning rate of each parameter group, with the ends of the warmup.

    The rows may be too far apart to show the warmup, which is a straight line.
    """
    names = names_in(run.rows, "train/lr/")
    first = series(run.rows, "train/lr")
    if names:
        lines = {"first group": first}
        for name in names[: MOST_RATES - 1]:
            lines[name.removeprefix("train/lr/")] = series(run.rows, name)
        return lines
    warmup = warmup_of(run)
    rate = run.config.get("optimizer.lr")
    if first and warmup and is_number(rate) and not run.config.get("groups"):
        start = run.config.get("scheduler.start")
        if not is_number(start):
            start = 0
        begin = start + (1 - start) / (warmup + 1)
        points: dict[float, float] = {
            1: rate * begin,
            warmup + 1: rate,
        }
        points.update(first)
        last = run.rows[-1]["step"]
        first = [(step, points[step]) for step in sorted(points) if step <= last]
    return {"learning rate": first}


def series(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def pooled(rows: list[Row], name: str) -> list[tuple[float, float]]:
    """Return a metric's means over stretches that have the samples of the largest row.

    The row before an evaluation may cover only a batch or two, whose mean would jump.
    """
    rows = [row for row in rows if name in row]
    counts = [max(1, weight_of(row)) for row in rows]
    most = max(counts, default=1)
    points: list[tuple[float, float]] = []
    samples = math.inf  # samples in the last stretch
    for row, count in zip(reversed(rows), reversed(counts), strict=True):
        if samples >= most:
            points.append((row["step"], 0.0))
            samples = 0
        samples += count
        end, mean = points[-1]
        change = row[name] - mean
        points[-1] = (end, mean + change * count / samples)
    return points[::-1]
