"""The curves of a run over its steps: loss, metrics, learning rate, gradient norm and memory."""

import itertools

from stoker.data.typed import is_number
from stoker.runs import plots
from stoker.runs.report.inputs import Run
from stoker.runs.report.words import shortened
from stoker.trainer.history import NUMBERS

MOST_PLOTS = 14
MOST_CURVES = 6  # in a plot
LOGARITHMIC = ("loss", "grad_norm")  # these spike, or fall over decades
SCHEDULES = "stoker.trainer.schedules."
TITLES = {  # plot titles; other NUMBERS are not drawn
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "memory_mib": "device memory held, MiB",
}

Lines = dict[str, list[tuple[float, float]]]


def frames(run: Run) -> list[plots.Figure]:
    """Return a plot for each metric, with a curve for each split: "val/acc" is in the plot "acc".

    The loss comes first, then the metrics of the validation set.
    """
    metrics: dict[str, Lines] = {}
    for row in run.rows:
        for name, value in row.items():
            split, slash, metric = name.partition("/")
            if slash and (metric in TITLES or name not in NUMBERS):
                lines = metrics.setdefault(metric, {})
                lines.setdefault(split, []).append((row["step"], value))
    order = sorted(metrics, key=lambda metric: (metric != "loss", "val" not in metrics[metric]))
    drawn = [metric for metric in order if max(map(len, metrics[metric].values())) > 1]
    return [frame(run, metric, metrics[metric]) for metric in drawn[:MOST_PLOTS]]


def frame(run: Run, metric: str, lines: Lines) -> plots.Figure:
    """Draw the curves of a metric over the steps, and mark the best step."""
    best = None
    if run.best is not None:
        points = lines.get(run.best.name.partition("/")[0], [])
        best = next((point for point in points if point[0] == run.best.step), None)
    last = run.rows[-1]
    drawn = {}
    for split in itertools.islice(lines, MOST_CURVES):
        drawn[shortened(split)] = plots.thin(lines[split])
    return plots.figure(
        TITLES.get(metric, shortened(metric)),
        "step",
        drawn,
        end=run.step,
        epochs=last["epoch"] / max(1, last["step"]),
        warmup=warmup_of(run),
        best=best,
        log=metric in LOGARITHMIC,
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
