"""The learning-rate finder: raises the rate step by step, and suggests one."""

import copy
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.trainer import checkpoint, copies, fitting, misuse, schedules, seeding
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.files import write_text
from stoker.trainer.loading import seekable
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

FEWEST = 10  # steps in a curve
DIVERGED = 4.0  # times the lowest smoothed loss
SMOOTHING = 0.9


@dataclass
class Curve:
    """The rates that were tried, the smoothed loss at each, and the suggested rate."""

    rates: list[float]
    losses: list[float]
    suggestion: float


def lr_find(
    trainer: Trainer,
    train_loader: Iterable[Any],
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
) -> Curve:
    """Train for up to `steps` steps while the rate grows from `lowest` to `highest`.

    It ends early if the smoothed loss exceeds four times its lowest value (Smith 2017, arXiv
    1506.01186, section 3.3), and restores the trainer's state. UserError if there is no curve.
    """
    check_number("steps", steps, whole=True, least=FEWEST)
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    before = copy.deepcopy({name: part.state_dict() for name, part in trainer.stateful().items()})
    special_step = trainer.special_step
    if captures(trainer):  # a captured step would keep its first learning rate
        trainer.special_step = None
    trainer.scheduler = schedules.build(trainer.make_scheduler, trainer.optimizer, steps)
    initial = [group["initial_lr"] for group in trainer.optimizer.param_groups]
    shares = [one / initial[0] if initial[0] else 1.0 for one in initial]
    rates: list[float] = []
    losses: list[float] = []
    mean = 0.0
    batch = None
    trainer.model.train()
    with fitting.isolated(trainer):
        try:
            for batch in itertools.islice(endless(loader), steps):
                rate = lowest * (highest / lowest) ** (len(rates) / (steps - 1))
                for group, share in zip(trainer.optimizer.param_groups, shares, strict=True):
                    group["lr"] = rate * share
                seed = seeding.mix_seed(trainer.seed, "step", len(rates))
                seeding.seed_generators(trainer.device, seed, trainer.replica_indices)
                batch = copies.move(batch, trainer.device)
                loss = trainer.train_step(batch).item()
                if not math.isfinite(loss):
                    break
                mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
                rates.append(rate)
                # corrects for a mean that starts at zero
                losses.append(mean / (1 - SMOOTHING ** len(rates)))
                if losses[-1] > DIVERGED * min(losses):
                    break
        except (RuntimeError, ValueError, MemoryError) as error:
            misuse.raise_if_explained(trainer, error, batch, trainer.micro_batch)
            raise
        finally:
            trainer.scheduler = None
            trainer.special_step = special_step
            for name, part in trainer.stateful().items():
                checkpoint.restore(part, before[name])
    if len(rates) < FEWEST:
        reason = "the loader ran out of batches, or the loss was no longer finite"
        raise UserError(f"No curve after {len(rates)} steps: {reason}.")
    # A tenth of the rate with the lowest loss: within a factor of five of the best of seven rates
    # for linear, mlp and cnn on the digits with AdamW and SGD, where the steepest point and
    # fastai's "valley" were off by up to a hundred.
    return Curve(rates, losses, rates[losses.index(min(losses))] / 10)


def endless(loader: Any) -> Iterable[Any]:
    """Yield the batches of one epoch after another, until one is empty."""
    for epoch in itertools.count():
        loader.seek(epoch, 0)
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            return


def write(curve: Curve, path: Path) -> None:
    """Write the curve as a CSV file, and create its folder."""
    rows = [f"{rate:.6g},{loss:.6g}" for rate, loss in zip(curve.rates, curve.losses, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(["lr,loss", *rows, ""]))
