"""The curves of a run over its steps: loss, metrics, learning rates, and what the device did."""

import math
from typing import Any

from stoker.runs import plots
from stoker.runs.json_files import is_number
from stoker.runs.report.inputs import Best, Row, Run
from stoker.runs.report.words import shortened
from stoker.trainer.history import weight_of

MOST_METRICS = 6  # drawn, beside the loss
MOST_RATES = 8  # parameter groups: as many as the style has colours
LOSS_FAR = 30  # ratio of losses that calls for a logarithmic axis
SCHEDULES = "stoker.trainer.schedules."
MEASURED = {  # {name in a row: title}
    "train/grad_norm": "gradient norm",
    "device/memory_mib": "device memory, MiB",
    "device/utilization": "device utilization, %",
}

Lines = dict[str, list[tuple[float, float]]]


def frames(run: Run) -> list[dict[str, Any]]:
    """Return {"title", "keys", "best", "warmup", "svg"} of each frame that has a line.

    The keys are {name of a curve: its colour}.
    """
    rows = run.rows
    best = run.best
    split = "val" if best is None else best.name.partition("/")[0]
    if split == "train" or not any(f"{split}/loss" in row for row in rows):
        split = "val"
    names = metrics_of(rows, split)
    if best is not None and best.name in names:
        names.remove(best.name)
        names.insert(0, best.name)
    drawn = [metric_frame(run, f"{split}/loss", LOSS_FAR)]
    drawn += [metric_frame(run, name) for name in names[:MOST_METRICS]]
    drawn.append(frame(run, "learning rate", rates(run)))
    for name, title in MEASURED.items():
        drawn.append(frame(run, title, {title: series(rows, name)}))
    return [one for one in drawn if one is not None]


def metrics_of(rows: list[Row], split: str = "val") -> list[str]:
    """Return the metrics of a validation set that are not the loss."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if is_metric(name, split)]


def is_metric(name: str, split: str) -> bool:
    return name.startswith(f"{split}/") and name != f"{split}/loss"


def metric_frame(run: Run, name: str, far: float = math.inf) -> dict[str, Any] | None:
    """Draw the training and validation curves of a metric, with a mark at the best step."""
    _, _, metric = name.partition("/")
    lines = {"train": pooled(run.rows, f"train/{metric}"), "val": series(run.rows, name)}
    return frame(run, shortened(metric), lines, run.best, far)


def frame(
    run: Run, title: str, lines: Lines, best: Best | None = None, far: float = math.inf
) -> dict[str, Any] | None:
    """Draw curves over the steps; None if none of them has two points."""
    lines = {name: points for name, points in lines.items() if points}
    if max(map(len, lines.values()), default=0) < 2:
        return None
    colours = {name: f"c{i}" for i, name in enumerate(lines)}
    if lines.keys() <= {"train", "val"}:
        colours = {name: name for name in lines}
    point = None
    for step, value in lines.get("val", []):
        if best is not None and step == best.step and point is None:
            point = (step, value)
    last = run.rows[-1]
    svg = plots.curves(
        lines,
        f"{title} over the steps",
        colours,
        point,
        warmup_of(run),
        far,
        last["epoch"] / last["step"] if last["step"] else 0,
    )
    return {
        "title": title,
        "keys": colours if len(lines) > 1 or "val" in lines else {},
        "best": None if point is None else f"step {point[0]:,}",
        "warmup": warmup_of(run),
        "svg": svg,
    }


def warmup_of(run: Run) -> int:
    """Return the steps of the warmup; 0 without one, or if it is unknown."""
    warmup = run.config.get("scheduler.warmup")
    total = run.total_steps
    is_ours = str(run.config.get("scheduler._target_")).startswith(SCHEDULES)
    if not is_ours or not is_number(warmup) or warmup < 0 or not total:
        return 0
    steps: float = warmup if warmup >= 1 else warmup * total
    return round(min(steps, total))


def rates(run: Run) -> Lines:
    """Return the learning rate of each parameter group, with the ends of the warmup.

    The rows may be too far apart to show the warmup, which is a straight line.
    """
    groups = dict.fromkeys(name for row in run.rows for name in row if name.startswith("train/lr"))
    lines = {name.removeprefix("train/lr/"): series(run.rows, name) for name in groups}
    first = lines.pop("train/lr", [])
    warmup = warmup_of(run)
    rate = run.config.get("optimizer.lr")
    if first and warmup and is_number(rate) and not run.config.get("groups") and not lines:
        start = run.config.get("scheduler.start")
        start = start if is_number(start) else 0
        begin = start + (1 - start) / (warmup + 1)
        last = run.rows[-1]["step"]
        points = {1: rate * begin, warmup + 1: rate, **dict(first)}
        first = sorted((step, value) for step, value in points.items() if step <= last)
    name = "learning rate" if not lines else "first group"
    named = {name: first, **lines}
    return dict(list(named.items())[:MOST_RATES])


def series(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def pooled(rows: list[Row], name: str) -> list[tuple[float, float]]:
    """Return a metric's means over stretches that have the samples of the largest row.

    The row before an evaluation may cover only a batch or two, whose mean would jump.
    """
    rows = [row for row in rows if name in row]
    most = max((samples_in(row) for row in rows), default=1)
    points: list[tuple[float, float]] = []
    samples = math.inf  # of the last stretch
    for row in reversed(rows):
        if samples >= most:
            points.append((row["step"], 0.0))
            samples = 0
        samples += samples_in(row)
        end, mean = points[-1]
        points[-1] = (end, mean + (row[name] - mean) * samples_in(row) / samples)
    return points[::-1]


def samples_in(row: Row) -> float:
    return max(1, weight_of(row))
