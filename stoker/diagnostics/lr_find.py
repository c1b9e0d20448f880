"""The learning-rate finder: raises the rate at every step, and suggests a rate to train with."""

import functools
import math
from pathlib import Path
from typing import Any

from stoker.trainer import schedules, stopping
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import UserError
from stoker.trainer.files import write_text
from stoker.trainer.number_format import counted
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

STEPS = 100  # steps in a curve, unless the loss diverges
FEWEST = 10  # steps in a curve
DIVERGED = 4.0  # training stops at this many times the lowest smoothed loss
SMOOTHING = 0.9


class Watch(Callback):
    """Record the rate and the smoothed loss of each step, and stop a fit that diverges."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.mean = 0.0

    def on_log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        loss = row["train/loss"]
        if math.isfinite(loss):
            self.mean = SMOOTHING * self.mean + (1 - SMOOTHING) * loss
            self.rates.append(trainer.lr)
            # corrects for a mean that starts at zero
            self.losses.append(self.mean / (1 - SMOOTHING ** len(self.rates)))
        if not math.isfinite(loss) or self.losses[-1] > DIVERGED * min(self.losses):
            trainer.stop("diverged")


def lr_find(
    trainer: Trainer,
    train_loader: Any,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = STEPS,
) -> tuple[list[float], list[float]]:
    """Train for up to `steps` steps while the learning rate increases from `lowest` to `highest`.

    Training stops early if the smoothed loss exceeds four times its lowest value (Smith 2017, arXiv
    1506.01186, section 3.3). Return the rates and the smoothed losses. Do not use the trainer
    afterward. Raises UserError if there are too few steps for a curve.
    """
    initial = float(trainer.optimizer.param_groups[0]["lr"])
    if initial == 0:
        raise UserError(
            "optimizer.lr=0: the finder cannot scale a rate of 0. Set a different rate."
        )

    def factor(step: int) -> float:
        return lowest / initial * (highest / lowest) ** (step / (steps - 1))

    watch = Watch()
    trainer.callbacks = [watch]
    trainer.make_scheduler = functools.partial(
        schedules.Schedule, factor=factor, description="lr_find"
    )
    trainer.epochs = None
    trainer.max_steps = steps
    trainer.log_every = 1
    if captures(trainer):  # capturing a graph for so few steps is not worth it
        trainer.special_step = None
    trainer.fit(train_loader)
    if stopping.received is not None:
        raise stopping.Interrupted
    if len(watch.rates) < FEWEST:
        raise UserError(
            f"The search ended after only {counted(len(watch.rates), 'step')}: "
            "the loader ran out of batches, or the loss became NaN or infinite."
        )
    return watch.rates, watch.losses


def suggestion(rates: list[float], losses: list[float]) -> float:
    """Return a tenth of the rate with the lowest loss.

    For linear, mlp and cnn on the digits with AdamW and SGD, this was within a factor of five of
    the best of seven rates. The steepest point and fastai's "valley" were off by a factor of up to
    a hundred.
    """
    return rates[losses.index(min(losses))] / 10


def write(rates: list[float], losses: list[float], path: Path) -> None:
    """Write the curve as a CSV file; create its folder if needed."""
    rows = [f"{rate:.6g},{loss:.6g}" for rate, loss in zip(rates, losses, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(["lr,loss", *rows, ""]))
