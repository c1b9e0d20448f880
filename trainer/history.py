"""What `fit` returns: the rows that were logged, as a table and as a plot."""

import html
import importlib
import math
from collections.abc import Sequence
from typing import Any

from stoker.trainer.errors import UserError
from stoker.trainer.readable import number

Row = dict[str, Any]
Points = list[tuple[float, float]]

WIDTH = 480
HEIGHT = 200
COLORS = {"train/loss": "#1f77b4", "val/loss": "#d62728"}


class History(list[Row]):
    """The rows of a fit, one for each step that logged something: {"step": ..., "epoch": ..., ...}.

    Names are those that callbacks get in `on_log`, such as "train/loss" and "val/acc". The history
    of a resumed fit begins where that fit did.
    """

    def add(self, row: Row) -> None:
        """Append a row, or join it to the last one if both are of the same step."""
        if self and self[-1]["step"] == row["step"]:
            self[-1].update(row)
        else:
            self.append(dict(row))

    def last(self) -> Row:
        """Return the last value of each number."""
        values: Row = {}
        for row in self:
            values.update(row)
        return values

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a line per row and a column per name.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise UserError("to_pandas needs pandas.\nType pip install pandas.") from None
        return pandas.DataFrame(list(self))

    def __repr__(self) -> str:
        values = []
        for name, value in self.last().items():
            if isinstance(value, float):
                values.append(f"{name} {number(value)}")
        return f"History of {len(self)} rows, the last values: {', '.join(values)}"

    def _repr_html_(self) -> str:
        """Return a plot of the losses and the last values, for a notebook."""
        cells = []
        for name, value in self.last().items():
            if isinstance(value, (int, float)):
                cells.append(f"<tr><td>{html.escape(name)}</td><td>{number(value)}</td></tr>")
        return f"{self._plot()}<table>{''.join(cells)}</table>"

    def _plot(self) -> str:
        """Return an <svg> of the losses over the steps, "" if no line has two points."""
        lines: dict[str, Points] = {}
        for name in COLORS:
            points = [(row["step"], row[name]) for row in self if name in row]
            lines[name] = [(x, y) for x, y in points if math.isfinite(y)]
        if max(map(len, lines.values())) < 2:
            return ""
        every = [point for points in lines.values() for point in points]
        place = Scale([x for x, _ in every], [y for _, y in every])
        drawn = []
        for i, (name, points) in enumerate(lines.items()):
            if points:
                path = " ".join(place(x, y) for x, y in points)
                style = f'fill="none" stroke="{COLORS[name]}"'
                drawn.append(f'<polyline points="{path}" {style}/>')
                drawn.append(f'<text x="300" y="{15 + 15 * i}" fill="{COLORS[name]}">{name}</text>')
        drawn.append(f'<text x="4" y="{HEIGHT - 4}">{place.caption()}</text>')
        size = f'width="{WIDTH}" height="{HEIGHT}"'
        return f'<svg {size} font-size="12" fill="gray">{"".join(drawn)}</svg>'


class Scale:
    """Places points in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.left = min(xs)
        self.right = max(xs)
        self.low = min(ys)
        self.high = max(ys)

    def __call__(self, x: float, y: float) -> str:
        across = (x - self.left) / (self.right - self.left or 1)
        up = (y - self.low) / (self.high - self.low or 1)
        return f"{10 + across * (WIDTH - 20):.1f},{(HEIGHT - 30) * (1 - up) + 10:.1f}"

    def caption(self) -> str:
        return f"steps {self.left:,} to {self.right:,}, {number(self.low)} to {number(self.high)}"
