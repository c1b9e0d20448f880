"""The curves of a run over its steps: loss, metrics, learning rate, gradient norm and memory."""

import itertools

from stoker.runs import plots
from stoker.runs.report.inputs import Row, Run
from stoker.runs.report.words import shortened
from stoker.trainer.history import NUMBERS
from stoker.trainer.typed import is_number

MOST_METRICS = 6  # maximum number of metrics drawn besides the loss, and of other numbers
LOGARITHMIC = ("loss", "gradient norm")  # these spike, or fall over decades
SCHEDULES = "stoker.trainer.schedules."
MEASURED = {  # {name in a row: title}
    "train/lr": "learning rate",
    "train/grad_norm": "gradient norm",
    "device/memory_mib": "device memory held, MiB",
}

Lines = dict[str, list[tuple[float, float]]]


def frames(run: Run) -> list[plots.Figure]:
    """Return the plots that have a curve."""
    rows = run.rows
    names = list(dict.fromkeys(itertools.chain(*rows)))  # in the order they were logged
    split = "val"
    if run.best is not None and not run.best.name.startswith("train/"):
        split, _, _ = run.best.name.partition("/")
    loss = f"{split}/loss"
    metrics = [name for name in names if name.startswith(f"{split}/") and name != loss]
    drawn = []
    for name in [loss, *metrics[:MOST_METRICS]]:
        _, _, metric = name.partition("/")
        lines = {"train": series(rows, f"train/{metric}"), "val": series(rows, name)}
        drawn.append(frame(run, shortened(metric), lines))
    rest = others(names, [loss, *metrics])[:MOST_METRICS]
    titles = MEASURED | {name: shortened(name) for name in rest}
    for name, title in titles.items():
        drawn.append(frame(run, title, {title: series(rows, name)}))
    return [one for one in drawn if one is not None]


def others(names: list[str], validated: list[str]) -> list[str]:
    """Return the remaining names: logged numbers, extra validation sets and parameter groups."""
    drawn = {*NUMBERS, *validated}
    drawn |= {f"train/{name.partition('/')[2]}" for name in drawn}
    rest = [name for name in names if "/" in name and name not in drawn]
    return sorted(rest, key=lambda name: name.startswith("train/"))


def frame(run: Run, title: str, lines: Lines) -> plots.Figure | None:
    """Draw curves over the steps, and mark the best step of the validation curve.

    Returns None if no curve has two points.
    """
    lines = {name: points for name, points in lines.items() if points}
    if max(map(len, lines.values()), default=0) < 2:
        return None
    step = run.best.step if run.best else None
    last = run.rows[-1]
    return plots.figure(
        title,
        "step",
        {name: plots.thin(points) for name, points in lines.items()},
        end=last["step"],
        epochs=0 if run.is_one_epoch else last["epoch"] / max(1, last["step"]),
        warmup=warmup_of(run),
        best=next((point for point in lines.get("val", []) if point[0] == step), None),
        log=title in LOGARITHMIC,
    )


def warmup_of(run: Run) -> int:
    """Return the number of warmup steps, or 0 if there is no warmup or its length is unknown."""
    warmup = run.config.get("scheduler.warmup")
    total = run.total_steps
    is_ours = str(run.config.get("scheduler._target_")).startswith(SCHEDULES)
    if not is_ours or not is_number(warmup) or not total:
        return 0
    if warmup < 1:
        warmup *= total
    return round(min(max(0, warmup), total))


def series(rows: list[Row], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]
