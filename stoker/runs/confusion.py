"""The classes of an evaluation: how often each is right, and which are confused."""

from dataclasses import dataclass

from stoker.runs.evaluation import Evaluation, class_colour
from stoker.runs.page import Table

MOST_CLASSES = 40  # in a drawn matrix
MOST_PRINTED = 20  # classes in a matrix that fits on paper
MOST_PAIRS = 20  # pairs of confused classes


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
        """Return the strength of a cell's color, in percent; even a few mistakes are visible."""
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
        name = "(space)" if name == " " else name
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
