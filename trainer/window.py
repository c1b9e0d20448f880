"""The window of steps since the last logged row: mean loss, gradients, and time."""

import time
from collections.abc import Sequence

import torch

from stoker.trainer import launch, parallel
from stoker.trainer.metrics import Mean

# The names of a window's numbers. Rates of more groups are train/lr/1 or train/lr/NAME.
NUMBERS = (
    "train/loss",
    "train/lr",
    "train/samples",
    "train/weight",
    "train/seconds",
    "train/skipped_steps",
    "train/grad_norm",
)


class Window:
    """Collects the numbers of steps until they are logged.

    Attributes:
        loss: Mean loss over the window, each step by the weight of its batch.
        grad_norm: Mean norm of the gradient over the steps of the window, if gradients are clipped.
            It is 0 for a skipped step.
        skipped: Share of the steps that the fp16 scaler skipped; without a value unless it is used.
        start: Clock at the beginning, in seconds. What is no part of the training is added to it.
    """

    def __init__(self) -> None:
        self.loss = Mean()
        self.grad_norm = Mean()
        self.skipped = Mean()
        self.start: float = 0.0

    def clear(self) -> None:
        """Forget the steps."""
        self.loss.reset()
        self.grad_norm.reset()
        self.skipped.reset()

    def restart(self) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def add_norm(self, norm: torch.Tensor) -> None:
        """Note the norm of a step's gradient, which is that of all processes."""
        norm = parallel.whole(norm)
        if launch.is_first():
            self.grad_norm.update(norm)

    def add_skipped(self, is_skipped: torch.Tensor) -> None:
        """Note whether the fp16 scaler skipped a step, which all processes do alike."""
        if launch.is_first():
            self.skipped.update(is_skipped.float())

    def row(self, rates: Sequence[float], labels: Sequence[str] = ()) -> dict[str, float]:
        """Return the numbers of the window, over all processes, and forget its steps.

        `rates` are those of the parameter groups, with their labels. If they differ, those of other
        labels than the first one follow it.

        This reads the loss from the device, and so waits for it: only then is the clock right.
        Steps whose targets were all ignored have no loss.
        """
        loss = self.loss.over_ranks()
        grad_norm = self.grad_norm.over_ranks()
        skipped = self.skipped.over_ranks()
        weight = float(loss.weight)
        row = {"train/loss": loss.compute().item()} if weight else {}
        row["train/lr"] = float(rates[0])
        row["train/samples"] = loss.samples
        if weight != loss.samples:
            row["train/weight"] = weight  # of the loss, for means over rows
        row["train/seconds"] = time.perf_counter() - self.start
        if any(rate != rates[0] for rate in rates):
            for label, rate in zip(labels[1:], rates[1:], strict=True):
                if label != labels[0]:
                    row[f"train/lr/{label}"] = float(rate)
        done = 1.0  # share of the steps that were not skipped
        if skipped.samples:
            share = skipped.compute().item()
            row["train/skipped_steps"] = round(share * skipped.samples)
            done -= share
        if grad_norm.samples and done:
            row["train/grad_norm"] = grad_norm.compute().item() / done
        self.clear()
        return row
