"""Curves, histograms and scatter plots as SVG in the colors of the page, light or dark.

Curves keep their values in `data-points`, which templates/script.js shows and saves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from stoker.runs.page import render

Points = Sequence[tuple[float, float]]

MOST_POINTS = 400  # points in a drawn curve
MOST_MARKED = 30  # most points for which a curve has dots
MOST_DOTS = 800  # dots in a scatter plot
WIDTH = 360  # pixels, nearly the size on a phone
HEIGHT = 220
LETTER = 6.4  # width of a digit
SMALLEST = 1e-100  # smaller values are drawn as 0


@dataclass
class Axis:
    """A scale from values to pixels, with its ticks as (value, label)."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False
    start: float = 0
    end: float = 1

    def place(self, value: float) -> float:
        """Return the pixel of a value."""
        low = self.low
        high = self.high
        if self.is_log:
            low, high, value = map(math.log10, (low, high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def data(self) -> str:
        """The scale, for the script."""
        numbers = [self.low, self.high, self.start, self.end, int(self.is_log)]
        return ",".join(map(str, numbers))


@dataclass
class Mark:
    """A path in a plot. Its kind is a class of the page's style, its color a variable."""

    kind: str
    path: str
    colour: str = ""
    name: str = ""  # the curve's name
    values: str = ""  # the curve's values


@dataclass
class Plot:
    """A plot: its axes, and the marks that are drawn in them."""

    x: Axis
    y: Axis
    label: str  # description of the plot
    xlabel: str = ""
    ylabel: str = ""
    epochs: float = 0  # epochs per step
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        letters = max(len(text) for _, text in self.y.ticks)
        self.x.start = round(26 + LETTER * letters)
        self.x.end = WIDTH - 14
        self.y.start = HEIGHT - 34
        self.y.end = 8

    def places(self, points: Points) -> list[str]:
        """Return the points in pixels."""
        return [f"{self.x.place(x)} {self.y.place(y)}" for x, y in points]

    def rule(self, value: float) -> None:
        """Draw a vertical line."""
        place = self.x.place(value)
        self.marks.append(Mark("rule", f"M{place} {self.y.start}V{self.y.end}"))

    def box(self, kind: str, start: float, end: float, top: float) -> None:
        """Draw a box that stands on the x axis."""
        [from_, to] = self.places([(start, top), (end, top)])
        left, height = from_.split()
        right = to.split()[0]
        foot = self.y.start
        self.marks.append(Mark(kind, f"M{left} {foot}V{height}H{right}V{foot}z"))

    def line(self, name: str, points: Points, colour: str, counts: Sequence[int] = ()) -> None:
        """Draw a curve, whose points may stand for `counts` of samples; one without a name is not
        read.
        """
        values = [f"{x:.9g},{y:.6g}" for x, y in points]
        if counts:
            values = [f"{value},{count}" for value, count in zip(values, counts, strict=True)]
        path = "L".join(self.places(points))
        self.marks.append(Mark("curve", f"M{path}", colour, name, " ".join(values)))
        if len(points) <= MOST_MARKED:
            self.dots("marked", points, colour)

    def dots(self, kind: str, points: Points, colour: str) -> None:
        """Draw the points."""
        path = "".join(f"M{place}h0" for place in self.places(points))
        self.marks.append(Mark(f"dots {kind}", path, colour))

    def svg(self) -> Markup:
        """Return the plot as an <svg>."""
        text = render("plot.html", plot=self, width=WIDTH, height=HEIGHT)
        return Markup(text.replace("\n", ""))


def linear(values: Iterable[float], widens: bool = True) -> Axis:
    """Return an axis with about five round ticks; one that `widens` ends at ticks."""
    values = list(values)
    low = min(values)
    high = max(values)
    most = max(abs(low), abs(high))
    if most < SMALLEST:
        high = low + 1
    elif high - low <= 1e-9 * most:
        low -= abs(low) / 10
    step = round_step((high - low) / (4 if widens else 5))
    first = math.floor(round(low / step, 6))
    last = math.ceil(round(high / step, 6))
    ticks = [i * step for i in range(first, last + 1)]
    if widens:
        low = ticks[0]
        high = ticks[-1]
    ticks = [tick for tick in ticks if low <= tick <= high]
    return Axis(low, high, with_labels(ticks, step))


def round_step(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50, ... and of 0.1, 0.2, 0.5, ..."""
    power = 10.0 ** exponent(least)
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * 0.999)


def exponent(value: float) -> int:
    return math.floor(math.log10(value) + 1e-9)


def with_labels(ticks: Sequence[float], step: float) -> list[tuple[float, str]]:
    """Return (value, label) of ticks in one notation: 0.05, 0.10; 20,000; 1e-5, 2e-5."""
    most = max(map(abs, ticks))
    digits = max(0, -exponent(step))
    notation = f",.{digits}f"
    if step < 1e-4 or most >= 1e6:
        digits = exponent(most) - exponent(step)
        notation = f".{digits}e"
    return [(tick, tick_label(tick, notation)) for tick in ticks]


def tick_label(value: float, notation: str) -> str:
    mantissa, e, power = f"{value:{notation}}".partition("e")
    return f"{mantissa}e{int(power)}" if e and value else mantissa if value else "0"


def logarithmic(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis with ticks such as 0.01, 0.03, 0.1."""
    first = exponent(min(values))
    last = exponent(max(values)) + 1
    steps = (1, 3) if last - first < 4 else (1,)
    every = math.ceil((last - first) / 8)
    powers = [10.0**i for i in range(first, last + every, every)]
    ticks = [step * power for power in powers for step in steps]
    low = max(tick for tick in ticks if tick <= min(values) * 1.001)
    high = min(tick for tick in ticks if tick >= max(values) * 0.999)
    ticks = [tick for tick in ticks if low <= tick <= high]
    notation = ",.10g" if low >= 1e-4 and high < 1e6 else ".0e"
    return Axis(low, high, [(tick, tick_label(tick, notation)) for tick in ticks], is_log=True)


def scale(values: Sequence[float], far: float) -> Axis:
    """Return an axis for the values: logarithmic if their ratio is above `far`."""
    is_log = min(values) > SMALLEST and max(values) > far * min(values)
    return logarithmic(values) if is_log else linear(values)


def curves(
    lines: Mapping[str, Points],
    label: str,
    colours: Mapping[str, str] | None = None,
    best: tuple[float, float] | None = None,
    warmup: float = 0,
    far: float = math.inf,
    epochs: float = 0,
) -> Markup:
    """Draw named curves over the steps, with a mark at `best` and a band over the `warmup`.

    `colours` names a variable of the page's style for each, by default that of the same name.
    Values whose ratio is above `far` get a logarithmic axis. A step has so many `epochs`.
    """
    drawn = {name: thin(points) for name, points in lines.items() if points}
    steps = [x for points in drawn.values() for x, _ in points]
    values = [y for points in drawn.values() for _, y in points]
    x = linear([0, *steps], widens=False)
    plot = Plot(x, scale(values, far), label, "step", epochs=epochs)
    if warmup:
        plot.box("warmup", 0, min(warmup, x.high), plot.y.high)
    if best is not None:
        plot.rule(best[0])
    for name, points in drawn.items():
        plot.line(name, points, (colours or {}).get(name, name))
    if best is not None:
        plot.dots("best", [best], "val")
    return plot.svg()


def shares(
    name: str,
    points: Points,
    label: str,
    xlabel: str,
    ylabel: str,
    ideal: Points = (),
    counts: Sequence[int] = (),
) -> Markup:
    """Draw a curve in the unit square, such as precision over recall, and a faint `ideal` one."""
    plot = Plot(linear([0, 1]), linear([0, 1]), label, xlabel, ylabel)
    if ideal:
        plot.line("", ideal, "line")
    plot.line(name, points, "val", counts)
    return plot.svg()


def histogram(values: Sequence[float], xlabel: str, label: str) -> Markup:
    """Draw how often values come, with a line at 0."""
    x = linear([*values, 0])
    bins = min(40, max(8, round(len(values) ** 0.5)))
    width = (x.high - x.low) / bins
    counts = [0] * bins
    for value in values:
        counts[min(bins - 1, int((value - x.low) / width))] += 1
    plot = Plot(x, linear([0, *counts]), label, xlabel)
    for i, count in enumerate(counts):
        if count:
            start = x.low + i * width
            plot.box("histogram", start, start + width, count)
    plot.rule(0)
    return plot.svg()


def against(points: Points, label: str) -> Markup:
    """Draw (true, predicted) as dots, with the line on which they are the same."""
    points = some(points)
    values = [value for point in points for value in point]
    plot = Plot(linear(values), linear(values), label, "true", "predicted")
    diagonal = plot.places([(plot.x.low, plot.x.low), (plot.x.high, plot.x.high)])
    plot.marks.append(Mark("rule", f"M{'L'.join(diagonal)}"))
    plot.dots("some", points, "val")
    return plot.svg()


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
