"""Images of a final evaluation for the loggers: the confusion matrix, and the hardest samples."""

import base64
import io
from typing import TYPE_CHECKING, Any

from stoker.trainer.readable import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMES = 40  # classes of a matrix that shows their names
MOST_NUMBERS = 20  # classes of a matrix that shows the counts in its cells
COLUMNS = 4
LONGEST_NAME = 16  # letters

Evaluation = dict[str, Any]  # what is in evaluation.json


def of(evaluation: Evaluation) -> dict[str, Any]:
    """Return {name: image} of an evaluation.json, each a uint8 array (height, width, 3)."""
    split = evaluation.get("split")
    names = evaluation.get("classes") or []
    classes = [short(name) for name in names]
    images = {}
    counts = evaluation.get("confusion")
    if counts:
        images[f"{split}/confusion"] = confusion(counts, classes)
    for kind in ("worst", "uncertain"):
        hardest = evaluation.get(kind) or []
        shown = [sample for sample in hardest if sample.get("png") and "true" in sample]
        if shown:
            images[f"{split}/{kind}"] = samples(shown, classes)
    return images


def confusion(counts: list[list[int]], classes: list[str]) -> Any:
    """Draw a row for each true class, as shares of it: dark is all of it."""
    import numpy
    from matplotlib.figure import Figure

    size = len(counts)
    side = min(3 + 0.4 * size, 12)
    figure = Figure((side, side), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    cells = numpy.array(counts)
    shares = cells / cells.sum(1, keepdims=True).clip(1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= MOST_NAMES:
        axes.set_xticks(range(size), classes, rotation=90)
        axes.set_yticks(range(size), classes)
    if size <= MOST_NUMBERS:
        for true, predicted in numpy.argwhere(cells):
            color = "white" if shares[true, predicted] > 0.5 else "black"
            text = f"{cells[true, predicted]:,}"
            axes.text(predicted, true, text, ha="center", va="center", color=color)
    return drawn(figure)


def samples(shown: list[dict[str, Any]], classes: list[str]) -> Any:
    """Draw a grid of pictures, each below its class and the predicted one."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    rows = -(-len(shown) // COLUMNS)
    figure = Figure((2 * COLUMNS, 2.4 * rows), layout="constrained")
    for place, sample in enumerate(shown, 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        png = base64.b64decode(sample["png"])
        axes.imshow(imread(io.BytesIO(png)), cmap="gray")
        axes.axis("off")
        is_right = sample["true"] == sample["predicted"]
        color = "black" if is_right else "firebrick"
        axes.set_title(title(sample, classes), fontsize=9, color=color)
    return drawn(figure)


def title(sample: dict[str, Any], classes: list[str]) -> str:
    """Return the class of a sample and the predicted one, in two lines."""
    true = name_of(sample["true"], classes)
    predicted = name_of(sample["predicted"], classes)
    text = f"{true}\ntaken for {predicted}"
    probability = sample.get("probability")
    if probability is not None:
        text += f", {probability:.0%}"
    return text


def name_of(answer: int | list[float | None], classes: list[str]) -> str:
    """Return a class's name, or the numbers of a regression; None is one that is not finite."""
    if isinstance(answer, int):
        return classes[answer]
    values = ["nan" if value is None else number(value) for value in answer]
    return short(", ".join(values))


def short(name: str) -> str:
    """Return a class's name as matplotlib takes it: "$" would begin a formula."""
    name = str(name).replace("$", r"\$")
    if len(name) <= LONGEST_NAME:
        return name
    start = name[: LONGEST_NAME - 1]
    return f"{start}…"


def drawn(figure: "Figure") -> Any:
    """Return the figure as a uint8 array (height, width, 3)."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = numpy.asarray(canvas.buffer_rgba())
    return pixels[..., :3].copy()
