"""What a final evaluation has seen, as images for the loggers: the confusion matrix, and the samples it is worst at."""

import base64
import io

from stoker.trainer.readable import number

MOST_NAMES, MOST_NUMBERS = (
    40,
    20,
)  # classes of a matrix that has their names, and the counts in its cells
COLUMNS = 4


def of(evaluation):
    """{name: uint8 array (H, W, 3)} of what is in evaluation.json."""
    split, images = evaluation.get("split"), {}
    classes = [short(name) for name in evaluation.get("classes") or ()]
    if evaluation.get("confusion"):
        images[f"{split}/confusion"] = confusion(evaluation["confusion"], classes)
    for which in ("worst", "uncertain"):
        if seen := [sample for sample in evaluation.get(which) or () if sample.get("png")]:
            images[f"{split}/{which}"] = samples(seen, classes)
    return images


def confusion(counts, classes):
    """A row for each true class, as shares of it: dark is all of it."""
    from matplotlib.figure import Figure

    size = len(counts)
    side = min(3 + 0.4 * size, 12)
    figure = Figure((side, side), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= MOST_NAMES:
        axes.set_xticks(range(size), classes, rotation=90)
        axes.set_yticks(range(size), classes)
    for i, row in enumerate(counts if size <= MOST_NUMBERS else ()):
        for k, count in enumerate(row):
            color = "white" if shares[i][k] > 0.5 else "black"
            axes.text(k, i, f"{count:,}" if count else "", ha="center", va="center", color=color)
    return drawn(figure)


def samples(seen, classes):
    """A grid of pictures, each under what it is, and what it was taken for."""
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    rows = -(-len(seen) // COLUMNS)
    figure = Figure((2 * COLUMNS, 2.4 * rows), layout="constrained")
    for place, sample in enumerate(seen, 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        axes.imshow(imread(io.BytesIO(base64.b64decode(sample["png"]))), cmap="gray")
        axes.axis("off")
        true, predicted = (name_of(sample[key], classes) for key in ("true", "predicted"))
        sure = "" if sample.get("probability") is None else f", {sample['probability']:.0%}"
        color = "black" if sample["true"] == sample["predicted"] else "firebrick"
        axes.set_title(f"{true}\ntaken for {predicted}{sure}", fontsize=9, color=color)
    return drawn(figure)


def name_of(answer, classes):
    """A class's name, or the numbers of a regression; null is one that is not finite."""
    if isinstance(answer, int):
        return classes[answer]
    return short(", ".join("nan" if value is None else number(value) for value in answer))


def short(name):
    """A class's name as matplotlib takes it: "$" would begin a formula."""
    name = str(name).replace("$", r"\$")
    return name if len(name) <= 16 else f"{name[:15]}…"


def drawn(figure):
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())[..., :3].copy()
