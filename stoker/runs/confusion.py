"""The classes of an evaluation: how often each is right, and which are confused."""

from dataclasses import dataclass

from stoker.runs.evaluation import Evaluation, class_colour

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


def classes_of(evaluation: Evaluation) -> list[Class]:
    """Return the rows of the confusion matrix; none if it is unknown."""
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
                name="(space)" if name == " " else name,
                precision=fraction(right, predicted),
                recall=fraction(right, total),
                iou=fraction(right, total + predicted - right),
                colour="#{:02x}{:02x}{:02x}".format(*class_colour(i)),
                count=int(total),
                counts=evaluation.confusion[i],
            )
        )
    return classes


def fraction(count: int, total: int) -> str:
    return f"{count / total:.3f}" if total else ""


def most_confused(classes: list[Class]) -> list[list[str]]:
    """Return [true, predicted, count] of the classes most often confused."""
    import numpy

    wrong = numpy.array([row.counts for row in classes])
    numpy.fill_diagonal(wrong, 0)
    rows = []
    for cell in numpy.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]:
        i, j = divmod(int(cell), len(classes))
        if wrong[i, j]:
            true = classes[i]
            rows.append([true.name, classes[j].name, f"{wrong[i, j]:,} of {true.count:,}"])
    return rows
