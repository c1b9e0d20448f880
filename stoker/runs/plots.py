"""Curves, histograms and scatter plots as SVG in the colors of the page, light or dark.

Curves keep their values in `data-points`, which templates/script.js shows and saves.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from markupsafe import Markup

from stoker.runs.page import render

Points = Sequence[tuple[float, float]]

MOST_POINTS = 400  # maximum points in a drawn curve
MOST_MARKED = 30  # curves with at most this many points have dots
MOST_DOTS = 800  # maximum dots in a scatter plot
# The ends of the axes, in pixels of a 360 x 220 plot, which is about its size on a phone.
LEFT = 70
RIGHT = 346
FOOT = 186
TOP = 8
SMALLEST = 1e-100  # smaller values are drawn as 0


@dataclass
class Axis:
    """An axis that maps values to positions from 0 to 1. Its ticks are (value, label) pairs."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low, self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass
class Plot:
    """A plot: its axes, and the marks drawn on it.

    The kind of a mark is a CSS class of the page, and its color is a CSS variable.
    """

    x: Axis
    y: Axis
    label: str  # description of the plot
    xlabel: str = ""
    ylabel: str = ""
    epochs: float = 0  # epochs per step
    marks: list[dict[str, str]] = field(default_factory=list)

    def across(self, x: float) -> float:
        """Return the x coordinate of a value in pixels."""
        return round(LEFT + (RIGHT - LEFT) * self.x.fraction(x), 1)

    def up(self, y: float) -> float:
        """Return the y coordinate of a value in pixels."""
        return round(FOOT + (TOP - FOOT) * self.y.fraction(y), 1)

    def mark(self, kind: str, path: str, **attributes: str) -> None:
        """Draw a path with an optional `colour`. The page shows `name` and `points` if given."""
        self.marks.append({"kind": kind, "path": path, **attributes})

    def places(self, points: Points) -> list[str]:
        """Return the points as pixel coordinates."""
        return [f"{self.across(x)} {self.up(y)}" for x, y in points]

    def rule(self, value: float) -> None:
        """Draw a vertical line."""
        self.mark("rule", f"M{self.across(value)} {FOOT}V{TOP}")

    def box(self, kind: str, start: float, end: float, top: float) -> None:
        """Draw a box that stands on the x axis."""
        left = self.across(start)
        right = self.across(end)
        self.mark(kind, f"M{left} {FOOT}V{self.up(top)}H{right}V{FOOT}z")

    def line(self, name: str, points: Points, colour: str) -> None:
        """Draw a curve. If `name` is not empty, the page shows the values."""
        values = [f"{x:.9g},{y:.6g}" for x, y in points]
        path = "L".join(self.places(points))
        self.mark("curve", f"M{path}", colour=colour, name=name, points=" ".join(values))
        if name and len(points) <= MOST_MARKED:
            self.dots("marked", points, colour)

    def dots(self, kind: str, points: Points, colour: str) -> None:
        """Draw the points."""
        path = "".join(f"M{place}h0" for place in self.places(points))
        self.mark(f"dots {kind}", path, colour=colour)

    def svg(self) -> Markup:
        """Return the plot as an <svg> element."""
        ends = {"left": LEFT, "right": RIGHT, "foot": FOOT, "top": TOP}
        text = render("plot.html", plot=self, **ends)
        return Markup(text.replace("\n", ""))


def linear(values: Sequence[float], parts: int = 4) -> Axis:
    """Return a linear axis with round ticks, which divide it into about `parts` parts."""
    low = min(values)
    high = max(values)
    most = max(abs(low), abs(high), SMALLEST)
    if high - low <= 1e-9 * most:
        high = low + (most / 10 if most > SMALLEST else 1)
    least = (high - low) / parts
    power = 10.0 ** exponent(least)
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= least * 0.999)
    first = math.floor(round(low / step, 6))
    last = math.ceil(round(high / step, 6))
    ticks = [i * step for i in range(first, last + 1)]
    most = max(map(abs, ticks))
    notation = f",.{max(0, -exponent(step))}f"
    if step < 1e-4 or most >= 1e6:
        notation = f".{exponent(most) - exponent(step)}e"
    return labeled(ticks, notation)


def exponent(value: float) -> int:
    return math.floor(math.log10(value) + 1e-9)


def labeled(ticks: list[float], notation: str, is_log: bool = False) -> Axis:
    """Return an axis with these ticks, labeled like 0.05, 20,000 or 1e-5."""
    labels = []
    for tick in ticks:
        label = f"{tick:{notation}}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        labels.append((tick, label if tick else "0"))
    return Axis(ticks[0], ticks[-1], labels, is_log)


def scale(values: Sequence[float], far: float) -> Axis:
    """Return an axis, logarithmic if the largest value is over `far` times the smallest."""
    if min(values) < SMALLEST or max(values) <= far * min(values):
        return linear(values)
    first = exponent(min(values))
    last = exponent(max(values)) + 1
    ticks = [10.0**i for i in range(first, last + 1)]
    notation = ",.10g" if first >= -4 and last < 6 else ".0e"
    return labeled(ticks, notation, is_log=True)


def curves(
    lines: Mapping[str, Points],
    label: str,
    colours: Mapping[str, str],
    end: float = 0,
    best: tuple[float, float] | None = None,
    warmup: float = 0,
    far: float = math.inf,
    epochs: float = 0,
) -> Markup:
    """Draw named curves over the steps, with a mark at `best` and a band over the `warmup`.

    The x axis runs from 0 to `end`, or to the last step of the longest curve if that is later.

    `colours` maps each curve to a CSS variable of the page. The axis is logarithmic if the largest
    value is over `far` times the smallest. `epochs` is the number of epochs per step.
    """
    drawn = {name: thin(points) for name, points in lines.items()}
    together = list(itertools.chain(*drawn.values()))
    steps = [0, end, *[step for step, _ in together]]
    values = [value for _, value in together]
    x = linear(steps, 5)
    last = float(max(steps)) or x.high
    x = replace(x, high=last, ticks=[tick for tick in x.ticks if tick[0] <= last])
    plot = Plot(x, scale(values, far), label, "step", epochs=epochs)
    if warmup:
        plot.box("warmup", 0, min(warmup, plot.x.high), plot.y.high)
    for name, points in drawn.items():
        plot.line(name, points, colours[name])
    if best is not None:
        plot.rule(best[0])
        plot.dots("best", [best], "val")
    return plot.svg()


def fractions(
    name: str,
    points: Points,
    xlabel: str,
    ylabel: str,
    ideal: Points = (),
) -> Markup:
    """Draw a curve in the unit square, such as precision over recall, and a faint `ideal` curve."""
    axis = linear([0, 1])
    plot = Plot(axis, axis, f"{ylabel} by {xlabel}", xlabel, ylabel)
    if ideal:
        plot.line("", ideal, "c7")
    plot.line(name, points, "val")
    return plot.svg()


def histogram(values: Sequence[float], xlabel: str, label: str) -> Markup:
    """Draw the distribution of the values, with a line at 0."""
    import numpy

    x = linear([*values, 0])
    counts, edges = numpy.histogram(values, 24, (x.low, x.high))
    plot = Plot(x, linear([0, *counts.tolist()]), label, xlabel)
    for i in counts.nonzero()[0]:
        plot.box("histogram", edges[i], edges[i + 1], counts[i])
    plot.rule(0)
    return plot.svg()


def against(points: Points, label: str) -> Markup:
    """Draw (true, predicted) pairs as dots, and the line on which both are equal."""
    points = points[:: math.ceil(len(points) / MOST_DOTS)]
    axis = linear(list(itertools.chain(*points)))
    plot = Plot(axis, axis, label, "true", "predicted")
    diagonal = plot.places([(axis.low, axis.low), (axis.high, axis.high)])
    plot.mark("rule", f"M{'L'.join(diagonal)}")
    plot.dots("some", points, "val")
    return plot.svg()


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points of a curve, with the minimum and maximum of each interval."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / (most - 2))
    kept = {points[0], points[-1]}
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        kept |= {min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))}
    return sorted(kept)
