"""The logged rows that `fit` returns."""

from stoker.trainer.callback import Row

# The numbers that are logged for a window of steps. If parameter groups have different learning
# rates, there are also entries such as train/lr/1 or train/lr/NAME.
NUMBERS = (
    "train/loss",
    "train/lr",
    "train/samples",
    "train/weight",
    "train/seconds",
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
    resumed fit starts at the step where it resumes. Logged lists of numbers are not kept here; only
    callbacks receive them.
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
