"""Scores for each class of an evaluation, and the pairs of classes that are often confused."""

import math
from dataclasses import dataclass

from stoker.runs.evaluation import Evaluation, class_colour

VISIBLE = {" ": "(space)", "\n": "↵"}  # how to show these classes
MOST_PAIRS = 20  # maximum pairs of confused classes to list


@dataclass
class Class:
    """A class, with its row of the confusion matrix and its scores, which are '' if undefined."""

    name: str
    precision: str
    recall: str
    iou: str
    colour: str  # CSS color of the class in pictures of masks
    count: int
    counts: list[int]  # by predicted class
    shades: list[int]  # color intensities in percent: the square roots of the shares


def classes_of(evaluation: Evaluation) -> list[Class]:
    """Return the classes of a confusion matrix, or [] if there is no matrix."""
    import numpy

    if evaluation.confusion is None:
        return []
    matrix = numpy.array(evaluation.confusion)
    classes = []
    for i, name in enumerate(evaluation.classes):
        right = matrix[i, i]
        total = matrix[i].sum()
        predicted = matrix[:, i].sum()
        classes.append(
            Class(
                name=VISIBLE.get(name, name),
                precision=fraction(right, predicted),
                recall=fraction(right, total),
                iou=fraction(right, total + predicted - right),
                colour="#{:02x}{:02x}{:02x}".format(*class_colour(i)),
                count=int(total),
                counts=evaluation.confusion[i],
                shades=[round(100 * math.sqrt(n / max(1, total))) for n in matrix[i].tolist()],
            )
        )
    return classes


def fraction(count: int, total: int) -> str:
    return f"{count / total:.3f}" if total else ""


def most_confused(classes: list[Class]) -> list[list[str]]:
    """Return [true, predicted, count] for the pairs of classes most often confused."""
    import numpy

    wrong = numpy.array([row.counts for row in classes])
    numpy.fill_diagonal(wrong, 0)
    rows = []
    for cell in numpy.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]:
        i, j = divmod(int(cell), len(classes))
        true = classes[i]
        count = wrong[i, j]
        if count:
            rows.append([true.name, classes[j].name, f"{count:,} of {true.count:,}"])
    return rows
