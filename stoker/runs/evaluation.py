"""The record of evaluation.json: how the best weights do on each class, and on the hardest
samples.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class Sample:
    """A sample of the evaluation: class indices of a classification, or the numbers of a
    regression.
    """

    index: int  # its place in the split
    true: Any
    predicted: Any
    probability: float | None = None  # of the predicted class
    loss: float | None = None  # minus the logarithm of the true class's probability, or the MSE
    entropy: float | None = None  # in nats
    file: str | None = None
    line: int | None = None
    png: str | None = None
    columns: dict[str, Any] | None = None


@dataclass
class Evaluation:
    """What evaluation.json says.

    `points` is of a regression; `classes` to `confusion` are of a classification.
    """

    split: str
    kind: str  # "classification" or "regression"
    samples: int
    target: str | None = None
    standardised: bool | None = None
    classes: list[str] | None = None
    chance: float | None = None  # the share of the most frequent class
    confusion: list[list[int]] | None = None  # row: true class, column: predicted class
    points: list[Any] | None = None  # [true numbers, predicted numbers]
    worst: list[Sample] | None = None
    uncertain: list[Sample] | None = None

    @property
    def targets(self) -> int:
        """How many numbers a regression predicts."""
        return min((len(true) for true, _ in self.points or []), default=1)
