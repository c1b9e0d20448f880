"""The logged rows that `fit` returns."""

from typing import Any

Row = dict[str, Any]

# The names of a window's numbers. The rates of further groups are train/lr/1 or train/lr/NAME.
NUMBERS = (
    "train/loss",
    "train/lr",
    "train/samples",
    "train/weight",
    "train/seconds",
    "train/skipped_steps",
    "train/grad_norm",
    "device/memory_mib",
)


def weight_of(row: Row) -> float:
    """Return the weight of this row's training loss in a mean over several rows."""
    samples: float = row.get("train/samples", 1)
    return float(row.get("train/weight", samples))


class History(list[Row]):
    """The rows of a fit: {"step": ..., "epoch": ..., ...} for each step with logged numbers.

    The names are the same as in `on_log`, such as "train/loss" and "val/acc". The history of a
    resumed fit starts at the step where it resumes. Lists of numbers are passed only to callbacks.
    """

    def add(self, row: Row) -> None:
        """Append a row, or merge it into the last row if both are from the same step."""
        if self and self[-1]["step"] == row["step"]:
            self[-1].update(row)
        else:
            self.append(dict(row))

    def last(self) -> Row:
        """Return {name: last logged value}."""
        values: Row = {}
        for row in self:
            values.update(row)
        return values

    def __repr__(self) -> str:
        return f"History of {len(self)} rows, last values: {self.last()}"
