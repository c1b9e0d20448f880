"""What `fit` returns: the rows that were logged."""

from typing import Any

Row = dict[str, Any]


def weight_of(row: Row) -> float:
    """Return what the training loss of a row counts in a mean over rows."""
    samples: float = row.get("train/samples", 1)
    return float(row.get("train/weight", samples))


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

    def __repr__(self) -> str:
        return f"History of {len(self)} rows, the last values: {self.last()}"
