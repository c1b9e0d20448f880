"""The window of steps since the last logged row: mean loss, gradient norm and time."""

import time
from collections.abc import Sequence

import torch

from stoker.trainer import launch, parallel
from stoker.trainer.metrics import Mean


class Window:
    """Collects the loss, gradient norm and time of the steps until the next logged row.

    Attributes:
        loss: Mean loss over the window. Each step is weighted by the weight of its batch.
        grad_norm: Mean gradient norm over the window, if gradients are clipped. Steps that the
            fp16 scaler skipped have weight 0.
        start: Time at which the window started, in seconds. Evaluation time is added to it.
    """

    def __init__(self) -> None:
        self.loss = Mean()
        self.grad_norm = Mean()
        self.start: float = 0.0

    def clear(self) -> None:
        """Forget all steps."""
        self.loss.reset()
        self.grad_norm.reset()

    def start_clock(self) -> None:
        """Start measuring the time of the steps."""
        self.start = time.perf_counter()

    def add_norm(self, norm: torch.Tensor, *, may_be_skipped: bool = False) -> None:
        """Add the gradient norm of a step on rank 0 only, because it is the same on all ranks.

        If the step `may_be_skipped` because of a gradient that is not finite, ignore such a norm.
        """
        norm = parallel.unsharded(norm)
        if launch.is_first():
            self.grad_norm.update(norm, weight=norm.isfinite() if may_be_skipped else None)

    def row(self, rates: Sequence[float], labels: Sequence[str] = ()) -> dict[str, float]:
        """Return the numbers of the window across all processes, and clear the window.

        `rates` and `labels` are the learning rates and the names of the parameter groups. If the
        rates differ, the row also has an entry for each label after the first.

        Reading the loss waits for the device, so the measured time is correct. If all targets were
        ignored, the row has no loss.
        """
        loss = self.loss.over_ranks()
        grad_norm = self.grad_norm.over_ranks()
        weight = float(loss.weight)
        row = {"train/loss": loss.compute().item()} if weight else {}
        row["train/lr"] = float(rates[0])
        row["train/samples"] = loss.samples
        if weight != loss.samples:
            row["train/weight"] = weight  # weights this row's loss when rows are averaged
        row["train/seconds"] = time.perf_counter() - self.start
        if any(rate != rates[0] for rate in rates):
            for label, rate in zip(labels[1:], rates[1:], strict=True):
                if label != labels[0]:
                    row[f"train/lr/{label}"] = float(rate)
        if float(grad_norm.weight):
            row["train/grad_norm"] = grad_norm.compute().item()
        self.clear()
        return row
