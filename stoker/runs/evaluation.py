"""The contents of evaluation.json: the results of the best weights by class, and hard samples."""

import colorsys
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class Sample:
    """A sample of the evaluation.

    `true` and `predicted` are class indices for classification, and numbers for regression. If
    there is a class per token or pixel, the sample has `tokens` or `masks` instead.
    """

    index: int  # position in the split
    true: Any = None
    predicted: Any = None
    probability: float | None = None  # probability of the predicted class
    loss: float | None = None  # negative log-probability of the true class, or the MSE
    file: str | None = None
    line: int | None = None
    png: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    masks: list[str] = field(default_factory=list)  # PNGs of the true and predicted classes
    tokens: list[str] = field(default_factory=list)  # the first target tokens
    losses: list[float | None] = field(default_factory=list)  # the loss of each of these tokens


@dataclass
class Evaluation:
    """The contents of evaluation.json.

    Only regression has `points`. Only classification has `classes`, `chance` and `confusion`, which
    counts samples, tokens or pixels; `unit` says which.
    """

    split: Literal["train", "val", "test"]
    kind: Literal["classification", "regression"]
    samples: int
    unit: Literal["samples", "tokens", "pixels"] = "samples"
    target: str | None = None
    classes: list[str] = field(default_factory=list)
    chance: float | None = None  # accuracy of always predicting the most frequent class
    confusion: list[list[int]] | None = None  # rows: true class; columns: predicted class
    # Two histograms over the probability of the predicted class, from 0 to 1: all samples, and the
    # correct ones.
    confidence: list[list[int]] | None = None
    # For binary classification, two histograms over the probability of the second class: all
    # samples, and the samples that belong to the second class.
    second: list[list[int]] | None = None
    points: list[Any] = field(default_factory=list)  # [true numbers, predicted numbers]
    worst: list[Sample] = field(default_factory=list)
    random: list[Sample] = field(default_factory=list)

    @property
    def targets(self) -> int:
        """The number of targets of a regression."""
        return min((len(true) for true, _ in self.points), default=1)


def class_colour(label: int) -> tuple[int, int, int]:
    """Return the RGB color of a class in pictures of masks. Colors of consecutive classes differ.

    The first class is gray, because it is often the background.
    """
    if label == 0:
        return 96, 96, 96
    colour = colorsys.hsv_to_rgb(label * 0.381966 % 1, 0.65, 0.95)  # a golden-ratio step apart
    red, green, blue = (round(255 * level) for level in colour)
    return red, green, blue
