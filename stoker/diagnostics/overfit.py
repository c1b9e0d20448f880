"""Check that a model can learn at all by letting it memorize a few batches."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from stoker.diagnostics.doctor import Doctor
from stoker.trainer import batches, schedules, summary, terminal
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import length_of, seekable
from stoker.trainer.number_format import number
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

MOST = 1000  # steps
EVERY = 25  # steps between two evaluations
GOOD = 0.99  # accuracy or r2 to reach; without either, the loss must fall by this fraction


class Watch(Callback):
    """Print the opening lines, evaluate on the batches every EVERY steps, and stop once they are
    memorized.
    """

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self.loss = math.nan  # the training loss of the last step, if evaluations have no loss
        self.first: dict[str, float] = {}  # results before the first step
        self.results: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        device, model, _ = summary.plan(trainer)
        optimizer = type(trainer.optimizer).__name__
        terminal.show(
            f"{device}\n{model}\noverfit  batches: {len(self.given)}, without augmentation, "
            f"at most {trainer.total_steps:,} steps, {optimizer} "
            f"lr {trainer.optimizer.param_groups[0].get('initial_lr', 0):g}"
        )
        self.first = trainer.evaluate(self.given, "batch")
        if "batch/loss" not in self.first:  # judge by the training loss
            trainer.log_every = 1

    def on_log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.loss = row.get("train/loss", self.loss)
        self.first.setdefault("batch/loss", self.loss)

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.is_due(EVERY):
            return
        self.results = {"batch/loss": self.loss, **trainer.evaluate(self.given, "batch")}
        if self.is_learnt() or not math.isfinite(self.results["batch/loss"]):
            trainer.stop("decided")

    def is_learnt(self) -> bool:
        """Judge by the accuracy or r2; without either, judge by how far the loss has fallen."""
        score = self.results.get("batch/acc", self.results.get("batch/r2"))
        if score is not None and math.isfinite(score):
            return score >= GOOD
        return self.results["batch/loss"] <= (1 - GOOD) * self.first["batch/loss"]


def learn(
    trainer: Trainer, train_loader: Iterable[Any], count: int, steps: int | None = None
) -> str:
    """Train on only the first `count` batches at a constant rate; return the verdict.

    Training takes at most `steps` steps, or MOST by default. The loader must not augment the data.
    If the model does not learn, a TrainingError names the likely causes.
    """
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    length = length_of(loader)
    if length is not None and count > length:
        raise UserError(
            f"overfit={count}: this is more than the number of batches in an epoch ({length}). "
            "Type overfit=1."
        )
    loader.seek(0, 0)
    given = [
        batches.walk(lambda _, leaf: leaf.clone(), batch)
        for batch in itertools.islice(loader, count)
    ]
    samples = sum(map(trainer.samples, given))
    if all_equal(given):
        raise UserError(
            f"overfit={count}: the targets of the first {samples} samples are all the same, "
            "so there is nothing to learn. Set a different overfit or batch_size."
        )
    watch = Watch(given)
    trainer.callbacks = [watch]
    if not captures(trainer) and not trainer.replica_indices:
        trainer.callbacks.insert(0, Doctor(EVERY))
    trainer.make_scheduler = schedules.constant
    trainer.epochs = None
    trainer.max_steps = steps or MOST
    trainer.fit(given)
    changes = []
    for name in ("loss", "acc", "r2"):
        if f"batch/{name}" in watch.results:
            first = number(watch.first[f"batch/{name}"])
            changes.append(f"{name} {first} -> {number(watch.results[f'batch/{name}'])}")
    facts = f"after {trainer.step} steps on {samples} samples: {', '.join(changes)}"
    if watch.is_learnt():
        return f"the model has learned {facts}"
    frozen = sum(p.numel() for p in trainer.module.parameters() if not p.requires_grad)
    raise TrainingError(
        f"overfit={count}: the model has not learned {facts}.\n"
        "Check optimizer.lr (try ten times the value, and a tenth of it), the loss, and whether "
        f"the targets are right; {frozen:,} parameters are frozen."
    )


def all_equal(given: list[Any]) -> bool:
    """Return whether these are (inputs, targets) batches whose targets are all equal."""
    for batch in given:
        is_pair = isinstance(batch, list | tuple) and len(batch) == 2
        if not is_pair or not torch.is_tensor(batch[1]):
            return False
    targets = torch.cat([batch[1] for batch in given])
    return len(targets) > 1 and bool((targets == targets[0]).all())
