"""What `fit` returns: the rows that were logged, as a table and as a plot."""

import html
import math
from typing import Any

from stoker.trainer.errors import UserError
from stoker.trainer.readable import number

Row = dict[str, Any]

COLORS = {"train/loss": "#1f77b4", "val/loss": "#d62728"}


def weight_of(row: Row) -> float:
    """Return what the training loss of a row counts in a mean over rows."""
    samples: float = row.get("train/samples", 1)
    weight: float = row.get("train/weight", samples)
    return weight


class History(list[Row]):
    """The rows of a fit, one for each step that logged something: {"step": ..., "epoch": ..., ...}.

    Names are those that callbacks get in `on_log`, such as "train/loss" and "val/acc". The history
    of a resumed fit begins where that fit did. Lists of numbers go to the callbacks alone.
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
            import pandas
        except ImportError:
            raise UserError("to_pandas needs pandas.\nType pip install pandas.") from None
        return pandas.DataFrame(list(self))

    def __repr__(self) -> str:
        values = []
        for name, value in self.last().items():
            if isinstance(value, float):
                values.append(f"{name} {number(value)}")
        rows = "1 row" if len(self) == 1 else f"{len(self)} rows"
        return f"History of {rows}, the last values: {', '.join(values)}"

    def _repr_html_(self) -> str:
        """Return a plot of the losses and the last values, for a notebook."""
        cells = []
        for name, value in self.last().items():
            text = number(value) if isinstance(value, float) else html.escape(str(value))
            cells.append(f"<tr><td>{html.escape(name)}</td><td>{text}</td></tr>")
        return f"{self._plot()}<table>{''.join(cells)}</table>"

    def _plot(self) -> str:
        """Return an <svg> of the losses over the steps and its legend, "" without two rows.

        Points are in steps and losses: the view box scales them.
        """
        heights: list[float] = []
        lines = ""
        legend = []
        for name, color in COLORS.items():
            rows = [row for row in self if math.isfinite(row.get(name, math.nan))]
            if rows:
                path = " ".join(f"{row['step']},{-row[name]}" for row in rows)
                style = f'fill="none" stroke="{color}" vector-effect="non-scaling-stroke"'
                lines += f'<polyline points="{path}" {style}/>'
                legend.append(f'<span style="color:{color}">{name}</span>')
                heights += [-row[name] for row in rows]
        if len(self) < 2 or not heights:
            return ""
        first = self[0]["step"]
        last = self[-1]["step"]
        top = min(heights)
        bottom = max(heights)
        box = f"{first} {top} {last - first} {bottom - top or 1}"
        legend.append(f"steps {first:,} to {last:,}")
        legend.append(f"{number(-bottom)} to {number(-top)}")
        start = f'<svg width="480" height="200" viewBox="{box}" preserveAspectRatio="none">'
        return f"{start}{lines}</svg><p>{', '.join(legend)}</p>"
