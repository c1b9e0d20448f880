"""The evaluation of the best weights: probabilities, errors, and the hardest samples."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stoker.runs.evaluation import Evaluation, Sample
from stoker.runs.page import Table
from stoker.runs.report.inputs import is_small_png
from stoker.runs.report.words import one_line, percent, shortened
from stoker.trainer.errors import printable
from stoker.trainer.readable import number

MOST_TARGETS = 4  # drawn targets of a regression
MOST_COLUMNS = 12  # classes shown for a sample
MOST_PICTURES = 200_000  # characters in all pictures together
MOST_SHOWN = {"pixels": 12, "tokens": 5}  # samples in a list


@dataclass
class Shown:
    """A sample as it is shown."""

    name: str
    has_name: bool  # a file or a line, if known, instead of the index in the split
    is_right: bool
    tokens: list[tuple[str, int]]
    true: str = ""
    predicted: str = ""
    probability: str = ""  # of a class
    loss: str = ""
    png: str = ""
    masks: list[str] = field(default_factory=list)  # the true and the predicted mask
    columns: dict[str, str] = field(default_factory=dict)


def shown(sample: Sample, evaluation: Evaluation) -> Shown:
    """Return the sample in words."""
    name = one_line(sample.file)
    if not name and sample.line is not None:
        name = f"line {sample.line}"
    text = Shown(
        name=name or f"sample {sample.index:,}",
        has_name=bool(name),
        is_right=sample.true == sample.predicted,
        tokens=tokens_of(sample),
    )
    if evaluation.kind == "regression":
        text.true = "; ".join(map(number, sample.true))
        text.predicted = "; ".join(map(number, sample.predicted))
    elif evaluation.unit == "samples":
        classes = evaluation.classes or []
        text.true = classes[sample.true]
        text.predicted = classes[sample.predicted]
    if sample.probability is not None:
        text.probability = percent(sample.probability)
    if sample.loss is not None:
        text.loss = number(sample.loss)
    if sample.png and is_small_png(sample.png):
        text.png = sample.png
    if sample.masks:
        text.masks = sample.masks
    columns = sample.columns or {}
    for key in list(columns)[:MOST_COLUMNS]:
        text.columns[shortened(key)] = value_of(columns[key])
    return text


def tokens_of(sample: Sample) -> list[tuple[str, int]]:
    """Return the tokens of a sample, and how improbable each was, in percent."""
    tokens = []
    for token, loss in zip(sample.tokens or [], sample.losses or [], strict=True):
        text = "↵" if token == "\n" else printable(token)
        probability = math.exp(-max(loss, 0))
        percents = 100 - 100 * probability
        tokens.append((text, round(percents)))
    return tokens


def value_of(value: Any) -> str:
    """Return the value in a table's column as text."""
    if isinstance(value, float):
        return f"{value:.12g}"
    return shortened(value)


def hardest(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the samples with the highest loss, with the highest entropy, and some at random."""
    worst = "Worst: highest loss"
    if evaluation.kind == "regression":
        worst = "Worst: largest error"
    lists = {
        worst: evaluation.worst,
        "Most uncertain: highest entropy": evaluation.uncertain,
        "At random": evaluation.random,
    }
    most = MOST_SHOWN.get(evaluation.unit)
    groups = []
    letters = 0
    for title, entries in lists.items():
        samples = [shown(sample, evaluation) for sample in (entries or [])[:most]]
        for sample in samples:
            letters += len(sample.png) + sum(map(len, sample.masks))
            if letters > MOST_PICTURES:
                sample.png = ""
                sample.masks = []
        if samples:
            groups.append({"title": title, "samples": samples, "table": table_of(samples)})
    return groups


def table_of(samples: list[Shown]) -> Table:
    """Return the table of samples that are not pictures."""
    columns: dict[str, str] = {}
    for sample in samples:
        columns |= sample.columns
    names = list(columns)[:MOST_COLUMNS]
    header = ["", "true", "predicted"]
    has_probability = any(sample.probability for sample in samples)
    if has_probability:
        header.append("probability")
    rows = []
    for sample in samples:
        row = [sample.name, sample.true, sample.predicted]
        if has_probability:
            row.append(sample.probability)
        row += [sample.columns.get(name, "") for name in names]
        rows.append(row)
    return Table([*header, *names], rows)


def figure(title: str, svg: Any, note: str = "") -> dict[str, Any]:
    return {"title": title, "note": note, "svg": svg}


def probabilities(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the `figure` of the calibration, and for two classes those of all thresholds."""
    from stoker.runs import plots

    diagonal = [(0.0, 0.0), (1.0, 1.0)]
    drawn = []
    if evaluation.confidence is not None:
        title = "calibration"
        points, counts = calibration(evaluation.confidence)
        svg = plots.shares(
            "correct",
            points,
            title,
            xlabel="probability of the answer",
            ylabel="share that is correct",
            ideal=diagonal,
            counts=counts,
        )
        drawn.append(figure(title, svg))
    if evaluation.second is not None and any(evaluation.second[1]):
        roc, precision = thresholds(evaluation.second)
        area = 0.0
        for (left, low), (x, y) in pairwise(roc):
            area += (x - left) * (low + y) / 2
        classes = evaluation.classes or []
        note = f"of {classes[1]}, area {area:.3f}"
        svg = plots.shares("recall", roc, "ROC", "false positives", "recall", ideal=diagonal)
        drawn.append(figure("ROC", svg, note))
        title = "precision and recall"
        svg = plots.shares("precision", precision, title, "recall", "precision")
        drawn.append(figure(title, svg))
    return drawn


def calibration(counts: list[list[int]]) -> tuple[list[tuple[float, float]], list[int]]:
    """Return (mean probability, share that is correct) of tenths of the probability, and how many
    samples each has.
    """
    width = len(counts[0])
    tenths = [[0, 0, 0.0] for _ in range(10)]  # samples, right ones, sum of the probabilities
    for i, (samples, right) in enumerate(zip(*counts, strict=True)):
        tenth = tenths[10 * i // width]
        tenth[0] += samples
        tenth[1] += right
        tenth[2] += samples * (i + 0.5) / width
    known = [tenth for tenth in tenths if tenth[0]]
    points = [(total / samples, right / samples) for samples, right, total in known]
    return points, [int(samples) for samples, _, _ in known]


def thresholds(counts: list[list[int]]) -> tuple[list[tuple[float, float]], ...]:
    """Return the points (false positive rate, recall) and (recall, precision) of all thresholds."""
    positives = sum(counts[1])
    negatives = sum(counts[0]) - positives
    right = 0
    taken = 0
    roc = [(0.0, 0.0)]
    precision = []
    for samples, hits in list(zip(*counts, strict=True))[::-1]:
        if samples:
            right += hits
            taken += samples
            wrong = taken - right
            recall = right / positives
            roc.append((wrong / max(1, negatives), recall))
            precision.append((recall, right / taken))
    return roc, precision


def regression(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the `figure` of two plots for each of the first targets."""
    from stoker.runs import plots

    figures = []
    points = evaluation.points or []
    targets = evaluation.targets if points else 0
    for i in range(min(targets, MOST_TARGETS)):
        pairs = []
        errors = []
        for true, predicted in points:
            pairs.append((true[i], predicted[i]))
            errors.append(predicted[i] - true[i])
        of = ""
        note = ""
        if targets > 1:
            of = f" of target {i + 1}"
            mean = math.fsum(map(abs, errors)) / len(errors)
            note = f"{number(mean)} on average"
        title = f"predicted against true{of}"
        figures.append(figure(title, plots.against(pairs, title)))
        title = f"errors{of}"
        label = f"histogram of {title}"
        svg = plots.histogram(errors, "predicted minus true", label)
        figures.append(figure(title, svg, note))
    return figures
