"""The evaluation of the best weights: confused classes, errors, and the hardest samples."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from stoker.runs.evaluation import Evaluation, Sample, class_colour
from stoker.runs.page import Table
from stoker.runs.report.inputs import is_small_png
from stoker.runs.report.words import one_line, percent, shortened
from stoker.trainer.errors import printable
from stoker.trainer.readable import number

MOST_CLASSES = 40  # in a drawn matrix
MOST_PRINTED = 20  # classes in a matrix that fits on paper
MOST_PAIRS = 20  # pairs of confused classes
MOST_TARGETS = 4  # drawn targets of a regression
MOST_COLUMNS = 12  # shown for a sample
MOST_PICTURES = 200_000  # letters of all pictures together
MOST_SHOWN = {"pixels": 12, "tokens": 5}  # samples of a list


@dataclass
class Class:
    """A row of the confusion matrix; recall, precision and intersection over union are '' for a
    division by zero.
    """

    name: str
    precision: str
    recall: str
    iou: str
    colour: str  # in pictures of masks, for CSS
    count: int
    counts: list[int]

    @property
    def short(self) -> str:
        """The two ends of a long name, where such names differ."""
        name = self.name
        return name if len(name) <= 24 else f"{name[:9]}…{name[-14:]}"

    def strength(self, i: int, is_right: bool) -> int:
        """Return the strength of a cell's colour, in percent; even a few mistakes are visible."""
        share = self.counts[i] / max(1, self.count)
        return round(100 * (share if is_right else share ** (1 / 3)))


@dataclass
class Confusion:
    """The confusion matrix, and tables of the most confused pairs and the classes by recall."""

    classes: list[Class]
    unit: str  # what is counted
    pairs: Table
    lowest: Table
    others: Table

    @property
    def is_drawn(self) -> bool:
        return len(self.classes) <= MOST_CLASSES

    @property
    def has_lists(self) -> bool:
        """Whether the matrix is too large for paper."""
        return len(self.classes) > MOST_PRINTED

    @property
    def is_upright(self) -> bool:
        """Whether the names above the columns need to be turned."""
        letters = [len(row.short) for row in self.classes]
        return sum(letters) > 60 and max(letters) > 4


def confusion(evaluation: Evaluation) -> Confusion | None:
    """Return the confusion matrix and its lists; None if there is none."""
    counts = evaluation.confusion
    if counts is None:
        return None
    predicted = [sum(column) for column in zip(*counts, strict=True)]
    classes = []
    for i, name in enumerate(evaluation.classes or []):
        total = sum(counts[i])
        precision = share(counts[i][i], predicted[i])
        recall = share(counts[i][i], total)
        iou = share(counts[i][i], total + predicted[i] - counts[i][i])
        colour = "#{:02x}{:02x}{:02x}".format(*class_colour(i))
        classes.append(Class(name, precision, recall, iou, colour, total, counts[i]))
    ranked = sorted(classes, key=lambda row: float(row.recall or 2))  # those without samples last
    return Confusion(
        classes,
        evaluation.unit,
        confused(classes, evaluation.unit),
        by_recall(ranked[:MOST_CLASSES]),
        by_recall(ranked[MOST_CLASSES:]),
    )


def share(part: int, total: int) -> str:
    return f"{part / total:.3f}" if total else ""


def confused(classes: list[Class], unit: str) -> Table:
    """Return the table of the classes most often confused."""
    pairs = []
    for i, true in enumerate(classes):
        pairs += [(-count, i, j) for j, count in enumerate(true.counts) if count and i != j]
    rows = []
    for count, i, j in sorted(pairs)[:MOST_PAIRS]:
        true = classes[i]
        rows.append([true.name, classes[j].name, f"{-count:,} of {true.count:,}"])
    return Table(["true", "predicted", unit], rows)


def by_recall(classes: list[Class]) -> Table:
    rows = [[row.name, row.precision, row.recall, f"{row.count:,}"] for row in classes]
    return Table(["class", "precision", "recall", "n"], rows)


@dataclass
class Shown:
    """A sample as it is shown."""

    name: str
    has_name: bool  # a file or a line, not only its place in the split
    true: str
    predicted: str
    is_right: bool
    probability: str  # '' for a regression
    png: str
    columns: dict[str, str]
    masks: list[str] = field(default_factory=list)  # the true and the predicted one
    # And how improbable each was, in percent.
    tokens: list[tuple[str, int]] = field(default_factory=list)
    loss: str = ""


def shown(sample: Sample, evaluation: Evaluation) -> Shown:
    """Return the sample in words."""
    true = ""
    predicted = ""
    if evaluation.kind == "regression":
        true = "; ".join(map(number, sample.true))
        predicted = "; ".join(map(number, sample.predicted))
    elif evaluation.unit == "samples":
        true = (evaluation.classes or [])[sample.true]
        predicted = (evaluation.classes or [])[sample.predicted]
    name = one_line(sample.file)
    if not name and sample.line is not None:
        name = f"line {sample.line}"
    columns = list((sample.columns or {}).items())[:MOST_COLUMNS]
    tokens = []
    for token, loss in zip(sample.tokens or [], sample.losses or [], strict=True):
        text = "↵" if token == "\n" else printable(token)
        tokens.append((text, round(100 * -math.expm1(-max(loss, 0)))))
    return Shown(
        name=name or f"sample {sample.index:,}",
        has_name=bool(name),
        true=true,
        predicted=predicted,
        is_right=sample.true == sample.predicted,
        probability="" if sample.probability is None else percent(sample.probability),
        png=sample.png if sample.png and is_small_png(sample.png) else "",
        columns={shortened(key): value_of(value) for key, value in columns},
        masks=sample.masks or [],
        tokens=tokens,
        loss="" if sample.loss is None else number(sample.loss),
    )


def value_of(value: Any) -> str:
    """Return the value in a table's column as text."""
    return f"{value:.12g}" if isinstance(value, float) else shortened(value)


def hardest(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the samples with the highest loss, with the highest entropy, and some at random."""
    worst = "Worst: the highest loss"
    if evaluation.kind == "regression":
        worst = "Worst: the farthest off"
    lists = {
        worst: evaluation.worst,
        "Most uncertain: the highest entropy": evaluation.uncertain,
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
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    names = list(columns)[:MOST_COLUMNS]
    has_probability = any(sample.probability for sample in samples)
    rows = []
    for sample in samples:
        row = [sample.name, sample.true, sample.predicted]
        if has_probability:
            row.append(sample.probability)
        rows.append([*row, *(sample.columns.get(name, "") for name in names)])
    probability = ["probability"] if has_probability else []
    return Table(["", "true", "predicted", *probability, *names], rows)


def probabilities(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return {"title", "note", "svg"} of the calibration, and for two classes of the curves over
    all thresholds.
    """
    from stoker.runs import plots

    diagonal = [(0.0, 0.0), (1.0, 1.0)]
    drawn = []
    if evaluation.confidence is not None:
        lines = {"ideal": diagonal, "model": calibration(evaluation.confidence)}
        svg = plots.shares(lines, "calibration", "probability", "share that is right")
        drawn.append({"title": "calibration", "note": "by probability of the answer", "svg": svg})
    if evaluation.second is not None and any(evaluation.second[1]):
        roc, precision = thresholds(evaluation.second)
        area = sum((x - left) * (y + low) / 2 for (left, low), (x, y) in pairwise(roc))
        note = f"of {(evaluation.classes or [])[1]}, area {area:.3f}"
        svg = plots.shares({"ideal": diagonal, "model": roc}, "ROC", "false positives", "recall")
        drawn.append({"title": "ROC", "note": note, "svg": svg})
        svg = plots.shares({"model": precision}, "precision and recall", "recall", "precision")
        drawn.append({"title": "precision and recall", "note": "", "svg": svg})
    return drawn


def calibration(counts: list[list[int]]) -> list[tuple[float, float]]:
    """Return (mean probability, share that is right) of tenths of the probability."""
    width = len(counts[0])
    points = []
    for tenth in range(10):
        bins = range(width * tenth // 10, width * (tenth + 1) // 10)
        samples = sum(counts[0][i] for i in bins)
        if samples:
            right = sum(counts[1][i] for i in bins)
            mean = sum(counts[0][i] * (i + 0.5) / width for i in bins) / samples
            points.append((mean, right / samples))
    return points


def thresholds(counts: list[list[int]]) -> tuple[list[tuple[float, float]], ...]:
    """Return the points (false positive rate, recall) and (recall, precision) of all thresholds."""
    positives = sum(counts[1])
    negatives = sum(counts[0]) - positives
    right = 0
    taken = 0
    roc = [(0.0, 0.0)]
    precision = []
    for samples, hits in zip(reversed(counts[0]), reversed(counts[1]), strict=True):
        if samples:
            right += hits
            taken += samples
            roc.append(((taken - right) / max(1, negatives), right / positives))
            precision.append((right / positives, right / taken))
    return roc, precision


def regression(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return {"title", "note", "svg"} of two plots for each of the first targets."""
    from stoker.runs import plots

    figures = []
    points = evaluation.points or []
    targets = evaluation.targets if points else 0
    for i in range(min(targets, MOST_TARGETS)):
        pairs = [(true[i], predicted[i]) for true, predicted in points]
        errors = [predicted - true for true, predicted in pairs]
        of = f" of target {i + 1}" if targets > 1 else ""
        off = f"{number(math.fsum(map(abs, errors)) / len(errors))} on average"
        title = f"predicted against true{of}"
        svg = plots.against(pairs, title)
        figures.append({"title": title, "note": "", "svg": svg})
        title = f"errors{of}"
        svg = plots.histogram(errors, "predicted minus true", f"histogram of {title}")
        figures.append({"title": title, "note": off if targets > 1 else "", "svg": svg})
    return figures
