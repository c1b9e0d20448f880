"""The report's view of the evaluation of the best weights: plots, and the hardest samples."""

import math
import operator
from typing import Any

from stoker.runs.evaluation import Evaluation, Sample
from stoker.runs.plots import Figure, figure
from stoker.runs.report.words import one_line, shortened
from stoker.trainer.errors import printable
from stoker.trainer.number_format import number

MOST_TARGETS = 4  # maximum number of regression targets drawn
MOST_DOTS = 800  # maximum dots in a scatter plot
BARS = 24  # of a histogram
MOST_NUMBERS = 8  # maximum target values shown per sample
MOST_PICTURES = 200_000  # maximum characters of all pictures together
MOST_PNG = 40_000  # maximum characters of a picture
MOST_TOKENS = 200  # maximum tokens shown per sequence
FEWEST = 5  # minimum number of samples in a bin of the calibration plot
HIGH_LOSS = 8.0  # loss at which a token gets the strongest color: a probability of 1 in 3,000
# Maximum number of samples in each list, by the unit of the evaluation.
MOST_SHOWN = {"samples": 16, "pixels": 12, "tokens": 5}


def hardest(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the worst samples and a random selection of samples, as two groups.

    Each group is {"title", "samples", "table"}.
    """
    worst = "largest error" if evaluation.kind == "regression" else "highest loss"
    lists = {
        f"Worst: {worst}": evaluation.worst,
        "Random samples": evaluation.random,
    }
    most = MOST_SHOWN[evaluation.unit]
    groups = []
    room = MOST_PICTURES
    for title, samples in lists.items():
        if not samples:
            continue
        described = [shown(sample, evaluation) for sample in samples[:most]]
        names = list(described[0]["cells"])
        rows = []
        for facts in described:
            rows.append([facts["cells"].get(name, "") for name in names])
            room -= sum(map(len, facts["pictures"]))
            if room < 0:
                facts["pictures"] = []
        groups.append({"title": title, "samples": described, "table": (names, rows)})
    return groups


def shown(sample: Sample, evaluation: Evaluation) -> dict[str, Any]:
    """Return a sample as the template needs it. "cells" is the sample's row in a table."""
    place = one_line(sample.file)
    if not place:
        place = f"index {sample.index}" if sample.line is None else f"line {sample.line}"
    cells = {"": place, "true": sample.true, "predicted": sample.predicted}
    if evaluation.kind == "regression":
        cells["error"] = list(map(operator.sub, sample.predicted, sample.true))
        for name in ("true", "predicted", "error"):
            cells[name] = "; ".join(map(number, cells[name][:MOST_NUMBERS]))
    elif evaluation.unit == "samples":
        for name in ("true", "predicted"):
            cells[name] = evaluation.classes[cells[name]]
    if sample.probability is not None:
        cells["P(predicted)"] = f"{sample.probability:.1%}"
    for name, value in sample.columns.items():
        if isinstance(value, float):
            value = f"{value:.12g}"
        cells.setdefault(shortened(name), shortened(value))
    pictures = [text for text in (sample.png, *sample.masks) if text and len(text) <= MOST_PNG]
    return {
        "cells": cells,
        "is_right": sample.true == sample.predicted,
        "loss": "" if sample.loss is None else number(sample.loss),
        "pictures": pictures,
        "tokens": tokens_of(sample),
    }


def tokens_of(sample: Sample) -> list[tuple[str, int]]:
    """Return (token, color intensity in percent) for the tokens of a sample."""
    tokens = []
    for token, loss in zip(sample.tokens, sample.losses, strict=True):
        text = "↵" if token == "\n" else shortened(printable(token), 20)
        share = min(max(loss or 0, 0) / HIGH_LOSS, 1)
        tokens.append((text, round(100 * share)))
    return tokens[:MOST_TOKENS]


def probabilities(evaluation: Evaluation) -> list[Figure]:
    """Return the calibration plot and, for two classes, the ROC and precision-recall curves."""
    import numpy

    drawn = []
    points = calibration(evaluation.confidence) if evaluation.confidence else []
    if len(points) > 1:
        note = f"gray: perfect; bins of at least {FEWEST} samples"
        square = {"y": "fraction correct", "unit": True, "ideal": True}
        lines = {"correct": points}
        drawn.append(figure("calibration", "predicted probability", lines, note=note, **square))
    if evaluation.second is not None and any(evaluation.second[1]):
        roc, precision = thresholds(evaluation.second)
        false_positives, recall = roc.T
        area = numpy.diff(false_positives) @ (recall[1:] + recall[:-1]) / 2
        note = f"for class {evaluation.classes[1]}, AUC {area:.3f}; gray: guessing"
        square = {"y": "recall", "unit": True, "ideal": True}
        lines = {"recall": roc.tolist()}
        drawn.append(figure("ROC", "false positive rate", lines, note=note, **square))
        lines = {"precision": precision.tolist()}
        drawn.append(figure("precision and recall", "recall", lines, y="precision", unit=True))
    return drawn


def calibration(counts: list[list[int]]) -> Any:
    """Return (mean probability, fraction correct) for ten bins of the probability.

    Bins with fewer than FEWEST samples are omitted, since their fractions would be noise.
    """
    import numpy

    samples, right = numpy.array(counts, dtype=float).reshape(2, 10, -1)
    middles = (numpy.arange(samples.size) + 0.5) / samples.size
    probabilities = (samples * middles.reshape(samples.shape)).sum(1)
    totals = samples.sum(1)
    points = numpy.stack([probabilities, right.sum(1)], 1)
    is_large = totals >= FEWEST
    return (points[is_large] / totals[is_large, None]).tolist()


def thresholds(counts: list[list[int]]) -> tuple[Any, Any]:
    """Return (false positive rate, recall) and (recall, precision) points for all thresholds."""
    import numpy

    bins = numpy.array(counts, dtype=float)
    occupied = bins[:, bins[0] > 0]
    taken, right = numpy.fliplr(occupied).cumsum(1)
    wrong = taken - right
    recall = right / right[-1]
    roc = numpy.stack([wrong / max(1, wrong[-1]), recall], 1)
    return numpy.vstack([[0, 0], roc]), numpy.stack([recall, right / taken], 1)


def regression(evaluation: Evaluation) -> list[Figure]:
    """Return a scatter plot and an error histogram for each of the first MOST_TARGETS targets."""
    import numpy

    figures = []
    targets = evaluation.targets if evaluation.points else 0
    for i in range(min(targets, MOST_TARGETS)):
        points = [(true[i], predicted[i]) for true, predicted in evaluation.points]
        counts, edges = numpy.histogram([predicted - true for true, predicted in points], BARS)
        dots = points[:: math.ceil(len(points) / MOST_DOTS)]
        bars = [edges.tolist(), counts.tolist()]
        of = f" (target {i + 1})" if targets > 1 else ""
        title = f"predicted against true{of}"
        figures.append(figure(title, "true", {}, y="predicted", dots=dots, ideal=True))
        figures.append(figure(f"errors{of}", "predicted minus true", {}, bars=bars))
    return figures
