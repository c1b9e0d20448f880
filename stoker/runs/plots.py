"""Curves, histograms and scatters as SVG that stands in a page: its colours are the page's, light or dark."""

import io
import re

from markupsafe import Markup

MOST_POINTS = 400  # of a curve that is drawn
MOST_DOTS = 800  # of a scatter
SIZE = (3.9, 2.5)  # inches: on a telephone nearly as large as it is
# What matplotlib is told, and what it stands for in the page's style.
COLOURS = {
    "text": "#010101", "soft": "#010102", "line": "#010103", "train": "#010104", "val": "#010105", "back": "#010106",
}  # fmt: skip
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 8.5,
    "text.color": COLOURS["soft"], "axes.labelcolor": COLOURS["soft"], "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"], "xtick.color": COLOURS["line"], "ytick.color": COLOURS["line"],
    "axes.edgecolor": COLOURS["line"], "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": COLOURS["line"], "grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.6,
    "axes.xmargin": 0.02,
}  # fmt: skip
NOTHING = dict.fromkeys(
    ("Date", "Creator", "Format", "Type")
)  # the same bytes whenever it is drawn


def curves(name, lines, best=None, label="", logarithmic=False):
    """A frame of {series: [(x, y)]}, x being epochs, with a mark at `best`; `label` says in words what it shows.

    `logarithmic`: where the values are far apart.
    """
    from matplotlib.ticker import LogLocator

    with style():
        figure, axes = frame("epoch")
        lines = {series: thin(points) for series, points in lines.items() if points}
        for series, points in lines.items():
            dots = (
                {"marker": "o", "markersize": 3} if len(points) <= 30 and series != "train" else {}
            )
            over = {"zorder": 2 + (series == "val"), "clip_on": False}
            axes.plot(*zip(*points, strict=True), color=COLOURS[series], **dots, **over)
        if best is not None:
            axes.axvline(best[0], color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (3, 3)))
            axes.plot(
                *best,
                "o",
                markersize=6,
                color=COLOURS["val"],
                markeredgecolor=COLOURS["back"],
                zorder=5,
                clip_on=False,
            )
        values = [y for points in lines.values() for _, y in points]
        if 0.5 < max(values) <= 1 < axes.get_ylim()[1]:
            axes.set_ylim(top=1)  # most of what comes near 1 is a share
        if logarithmic and min(values) > 0 and max(values) > 30 * min(values):
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
            axes.yaxis.set_major_formatter(tick)
        return svg(name, figure, label)


def histogram(name, values, xlabel, label=""):
    """How often values come, with a line at 0."""
    with style():
        figure, axes = frame(xlabel)
        axes.hist(
            values,
            bins=min(40, max(8, round(len(values) ** 0.5))),
            color=COLOURS["val"],
            alpha=0.75,
        )
        axes.axvline(0, color=COLOURS["text"], linewidth=0.9)
        axes.grid(axis="x", visible=False)
        return svg(name, figure, label)


def scatter(name, points, xlabel, ylabel, label=""):
    """(x, y) as dots, with the line on which they are the same."""
    with style():
        figure, axes = frame(xlabel, ylabel)
        points = points[:: -(-len(points) // MOST_DOTS)]
        low, high = (end(value for point in points for value in point) for end in (min, max))
        axes.margins(0.04)  # of both: the line is the diagonal
        axes.plot(
            (low, high), (low, high), color=COLOURS["soft"], linewidth=0.9, linestyle=(0, (3, 3))
        )
        dots = {"markersize": 3.2, "markeredgewidth": 0, "alpha": 0.5, "color": COLOURS["val"]}
        axes.plot(*zip(*points, strict=True), "o", **dots)
        return svg(name, figure, label)


def thin(points, most=MOST_POINTS):
    """At most so many of the points of a curve, the lowest and the highest of each stretch among them."""
    if len(points) <= most:
        return points
    size, kept = -(-2 * (len(points) - 2) // (most - 2)), [points[0]]
    for start in range(1, len(points) - 1, size):
        stretch = range(start, min(start + size, len(points) - 1))
        ends = {end(stretch, key=lambda i: points[i][1]) for end in (min, max)}
        kept += [points[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def style():
    from matplotlib import rc_context

    return rc_context(STYLE)


def frame(xlabel, ylabel=""):
    """A figure without pyplot, which would look for a screen, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=SIZE, layout="constrained"
    )  # which has room for the ticks' letters, however many
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.locator_params(nbins=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(tick)
    return figure, axes


def tick(value, _):
    """'0.003', '20,000': no power of ten beside the axis."""
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.3g}"


def svg(name, figure, label):
    """The figure as an <svg> whose ids begin with `name`, since a page has several."""
    figure.savefig(stream := io.StringIO(), format="svg", transparent=True, metadata=NOTHING)
    text = stream.getvalue()
    size = re.search(r'viewBox="[\d. ]+"', text)[0]
    inside = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    inside = re.sub(r"<style.*?</style>", "", inside, flags=re.DOTALL)
    inside = re.sub(r"font-family: [^;\"]*;? ?", "", inside)
    inside = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", inside).replace(
        "xlink:href", "href"
    )
    inside = re.sub(r"\n\s*", " ", inside)
    for variable, colour in COLOURS.items():
        inside = inside.replace(colour, f"var(--{variable})")
    return Markup('<svg class="plot" {} role="img" aria-label="{}">{}</svg>').format(
        Markup(size), label, Markup(inside.strip())
    )
