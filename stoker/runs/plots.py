"""Curves, histograms and scatter plots as SVG in the colours of the page, light or dark."""

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from stoker.trainer.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

MOST_POINTS = 400  # in a drawn curve
MOST_DOTS = 800  # in a scatter plot
MOST_TICKS = 8  # labels at an axis
MOST_LETTERS = 16  # in a label
FAR = 30  # ratio of values that calls for a logarithmic axis
SIZE = (3.9, 2.5)  # inches: nearly the size it has on a phone
DASHES = (0, (3, 3))
# The colours in matplotlib's SVG, each of which stands for a variable of the page's style.
COLOURS = {
    "text": "#010101",
    "soft": "#010102",
    "line": "#010103",
    "train": "#010104",
    "val": "#010105",
    "back": "#010106",
    "bad": "#010107",
}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 8.5,
    "text.color": COLOURS["soft"],
    "axes.labelcolor": COLOURS["soft"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"],
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "axes.edgecolor": COLOURS["line"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "axes.xmargin": 0.02,
}


def curves(
    name: str,
    lines: Mapping[str, Points],
    best: tuple[float, float] | None = None,
    label: str = "",
    logarithmic: bool = False,
) -> Markup:
    """Draw "train" and "val" over the epochs, with a mark at `best`; `label` describes the plot.

    `logarithmic` allows a logarithmic axis, for values that are far apart.
    """
    with drawing() as (figure, axes):
        axes.set_xlabel("epoch")
        values = []
        for series, points in lines.items():
            if not points:
                continue
            drawn = thin(points)
            values += [y for _, y in drawn]
            marker = "o" if series != "train" and len(drawn) <= 30 else ""
            axes.plot(
                *zip(*drawn, strict=True),
                color=COLOURS[series],
                marker=marker,
                markersize=3,
                zorder=3 if series == "val" else 2,
                clip_on=False,
            )
        epochs = [x for points in lines.values() for x, _ in points]
        if max(epochs, default=0) >= 2:
            axes.locator_params(axis="x", integer=True)  # 1, 2, 3 rather than 1.5
        if best is not None:
            axes.axvline(best[0], color=COLOURS["soft"], linewidth=0.9, linestyle=DASHES)
            mark(axes, *best)
        if 0.5 < max(values) <= 1 < axes.get_ylim()[1]:
            axes.set_ylim(top=1)  # values near 1 are usually shares
        if logarithmic and are_far_apart(values):
            scale_by_powers(axes, "y")
        return svg(name, figure, label)


def histogram(name: str, values: Sequence[float], xlabel: str, label: str) -> Markup:
    """Draw how often values come, with a line at 0."""
    with drawing() as (figure, axes):
        axes.set_xlabel(xlabel)
        bins = min(40, max(8, round(len(values) ** 0.5)))
        axes.hist(values, bins=bins, color=COLOURS["val"], alpha=0.75)
        axes.axvline(0, color=COLOURS["text"], linewidth=0.9)
        axes.grid(axis="x", visible=False)
        return svg(name, figure, label)


def against(name: str, points: Points, label: str) -> Markup:
    """Draw (true, predicted) as dots, with the line on which they are the same."""
    with drawing() as (figure, axes):
        axes.set(xlabel="true", ylabel="predicted")
        points = some(points)
        values = [value for point in points for value in point]
        ends = (min(values), max(values))
        axes.margins(0.04)  # the same for both: the line is the diagonal
        axes.plot(ends, ends, color=COLOURS["soft"], linewidth=0.9, linestyle=DASHES)
        dots(axes, points, color=COLOURS["val"], alpha=0.5)
        return svg(name, figure, label)


def results(
    name: str, settings: Sequence[str], values: Sequence[float | None], best: int, label: str
) -> Markup:
    """Draw the results of jobs over the typed values of a setting, with a mark at the job `best`.

    Jobs without a result are crosses at the foot. Numbers are placed on a linear or logarithmic
    axis, other values in the order in which they come.
    """
    with drawing() as (figure, axes):
        places = place_settings(axes, settings)
        done = [(x, y) for x, y in zip(places, values, strict=True) if y is not None]
        lost = [(x, 0.03) for x, y in zip(places, values, strict=True) if y is None]
        axes.margins(0.08)
        dots(axes, some(done), color=COLOURS["val"], alpha=0.6, gid="done")
        foot = axes.get_xaxis_transform()  # from 0, the foot, to 1
        dots(axes, some(lost), "x", color=COLOURS["bad"], transform=foot, gid="lost")
        value = values[best] if done else None
        if value is not None:
            mark(axes, places[best], value)
        if are_far_apart([y for _, y in done]):
            scale_by_powers(axes, "y")
        return svg(name, figure, label)


def place_settings(axes: "Axes", settings: Sequence[str]) -> list[float]:
    """Return the place of each setting on the x axis, and set its scale and ticks."""
    texts = list(dict.fromkeys(settings))
    numbers = [as_number(text) for text in texts]
    known = [number for number in numbers if number is not None]
    if len(known) == len(texts):
        if are_far_apart(known, 10):
            scale_by_powers(axes, "x", (1,) if are_far_apart(known, 1000) else (1, 3))
        places = dict(zip(texts, known, strict=True))
    else:
        places = {text: float(i) for i, text in enumerate(texts)}
        named = texts[:: -(-len(texts) // MOST_TICKS)]
        labels = [shortened(text) for text in named]
        is_long = sum(map(len, labels)) > 40
        ticks = [places[text] for text in named]
        axes.set_xticks(ticks, labels, rotation=30 * is_long, ha="right" if is_long else "center")
    return [places[text] for text in settings]


def shortened(text: str) -> str:
    """Return the end of a long text, where class names differ."""
    text = printable(text)
    return text if len(text) <= MOST_LETTERS else f"…{text[1 - MOST_LETTERS :]}"


def as_number(text: str) -> float | None:
    """Return the number that was typed; None for other texts and for huge numbers."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < 1e100 else None


def dots(axes: "Axes", points: Points, marker: str = "o", **style: Any) -> None:
    if points:
        width = 0 if marker == "o" else 1.2
        style |= {"markersize": 3.6, "markeredgewidth": width, "linestyle": ""}
        axes.plot(*zip(*points, strict=True), marker=marker, **style)


def mark(axes: "Axes", x: float, y: float) -> None:
    """Draw a large dot."""
    axes.plot(
        x,
        y,
        marker="o",
        markersize=6,
        color=COLOURS["val"],
        markeredgecolor=COLOURS["back"],
        zorder=5,
        clip_on=False,
        gid="best",
    )


def are_far_apart(values: Sequence[float], far: float = FAR) -> bool:
    return bool(values) and min(values) > 0 and max(values) > far * min(values)


def scale_by_powers(axes: "Axes", which: str, ticks: Sequence[float] = (1, 3)) -> None:
    """Make the axis "x" or "y" logarithmic, with ticks such as 0.01, 0.03, 0.1."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_minor_locator(NullLocator())
    axis.set_major_locator(LogLocator(subs=ticks, numticks=8))
    axis.set_major_formatter(tick)


def some(points: Points) -> Points:
    """Return at most MOST_DOTS of the points, evenly."""
    return points[:: -(-len(points) // MOST_DOTS) or 1]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points of a curve, with the lowest and the highest of each stretch."""
    if len(points) <= most:
        return points
    size = -(-2 * (len(points) - 2) // (most - 2))
    kept = [points[0]]
    for start in range(1, len(points) - 1, size):
        stretch = range(start, min(start + size, len(points) - 1))
        lowest = min(stretch, key=lambda i: points[i][1])
        highest = max(stretch, key=lambda i: points[i][1])
        kept += [points[i] for i in sorted({lowest, highest})]
    return [*kept, points[-1]]


@contextmanager
def drawing() -> "Iterator[tuple[Figure, Axes]]":
    """Yield a figure and its axes in the page's style, without pyplot, which needs a display."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE), warnings.catch_warnings():
        # About letters that matplotlib's font lacks; the browser has its own fonts.
        warnings.simplefilter("ignore")
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.locator_params(nbins=5)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(tick)
        yield figure, axes


def tick(value: float, _: object) -> str:
    """'0.003', '20,000': no power of ten beside the axis."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"


def svg(name: str, figure: "Figure", label: str) -> Markup:
    """Return the figure as an <svg>, with ids that begin with `name`, since a page has several."""
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # the same bytes at any time
    figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    head, _, body = stream.getvalue().partition("<svg")[2].partition(">")
    size = re.search(r'viewBox="[\d. ]+"', head)
    body = body.rpartition("</svg>")[0].replace("xlink:href", "href")
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"\s*\n\s*", " ", body)
    for variable, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{variable})")
    return Markup('<svg class="plot" {} role="img" aria-label="{}">{}</svg>').format(
        Markup(size[0] if size else ""), printable(label), Markup(body.strip())
    )
