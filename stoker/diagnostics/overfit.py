"""Check that a model can learn at all: let it memorize a few batches, or say what to check."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from stoker.diagnostics.doctor import Doctor
from stoker.trainer import batch as batches
from stoker.trainer import schedules, summary, terminal
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import length_of, seekable
from stoker.trainer.readable import number
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

MOST = 1000  # steps
EVERY = 25  # steps between two evaluations
GOOD = 0.99  # accuracy or r2 to reach; without these, the share by which the loss has to fall


class Watch(Callback):
    """Print the opening lines, evaluate on the batches every EVERY steps, and stop once they are
    memorized.
    """

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self.loss = math.nan  # of the last step, if evaluations have no loss
        self.first: dict[str, float] = {}  # results before the first step
        self.before: dict[str, float] = {}  # results of the previous evaluation
        self.results: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        print_opening(trainer, len(self.given))
        self.first = trainer.evaluate(self.given, "batch")
        if "batch/loss" not in self.first:  # judge by the training loss
            trainer.log_every = 1

    def on_log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.loss = row.get("train/loss", self.loss)
        self.first.setdefault("batch/loss", self.loss)

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.is_time(EVERY):
            return
        self.before = self.results
        self.results = {"batch/loss": self.loss, **trainer.evaluate(self.given, "batch")}
        if not self.is_finite():
            trainer.stop("the loss is not finite")
        elif self.is_learnt():
            trainer.stop("learnt")

    def is_finite(self) -> bool:
        return math.isfinite(self.results["batch/loss"])

    def is_learnt(self) -> bool:
        """Judge by the accuracy or r2, and without either by how far the loss has fallen."""
        score = self.results.get("batch/acc", self.results.get("batch/r2"))
        if score is not None and math.isfinite(score):
            return score >= GOOD
        return self.results["batch/loss"] <= (1 - GOOD) * self.first["batch/loss"]


def learn(
    trainer: Trainer, train_loader: Iterable[Any], count: int, steps: int | None = None
) -> str:
    """Train on the first `count` batches alone at the full rate; return the verdict.

    It takes at most `steps` steps, by default MOST. The loader must not augment. TrainingError with
    the likely causes if the model does not learn.
    """
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    length = length_of(loader)
    if length is not None and count > length:
        raise UserError(f"overfit={count}: an epoch has {length} batches. Type overfit=1.")
    loader.seek(0, 0)
    given = [
        batches.walk(lambda _, leaf: leaf.clone(), batch)
        for batch in itertools.islice(loader, count)
    ]
    samples = sum(map(trainer.samples, given))
    targets = targets_of(given)
    if targets is not None and len(targets) > 1 and (targets == targets[0]).all():
        raise UserError(
            f"overfit={count}: the targets of the first {samples} samples are all the same, "
            "so there is nothing to learn. Choose a different overfit or batch_size."
        )
    doctor = Doctor(EVERY)
    watch = Watch(given)
    trainer.callbacks = [watch]
    if not captures(trainer) and not trainer.replicas:
        trainer.callbacks.insert(0, doctor)
    trainer.make_scheduler = schedules.constant
    trainer.epochs = None
    trainer.max_steps = steps or MOST
    trainer.fit(given)
    size = f"{count} batch{'' if count == 1 else 'es'} of {samples} samples"
    change = f"loss {number(watch.first['batch/loss'])} -> {number(watch.results['batch/loss'])}"
    facts = f"after {trainer.step} steps on {size}: {change}{scores(watch.results, targets)}"
    if watch.is_learnt():
        return f"it learns, {facts}"
    advice = "; ".join(suspects(trainer, watch, doctor.said))
    raise TrainingError(f"overfit={count}: the model does not learn, {facts}.\nCheck {advice}.")


def print_opening(trainer: Trainer, count: int) -> None:
    device, model, _ = summary.plan(trainer)
    terminal.show(f"{device}\n{model}")
    batch = f"the first {count} batches" if count > 1 else "the first batch"
    rate = trainer.optimizer.param_groups[0].get("initial_lr", 0)
    optimizer = f"{type(trainer.optimizer).__name__} lr {rate:g}"
    most = f"at most {trainer.total_steps:,} steps"
    terminal.show(f"overfit  {batch}, without augmentation, for {most}, {optimizer}")


def targets_of(given: list[Any]) -> torch.Tensor | None:
    """Return the targets of (inputs, targets) batches on the CPU; None for other batches."""
    if not all(isinstance(batch, list | tuple) and len(batch) == 2 for batch in given):
        return None
    targets = [batch[1] for batch in given]
    return torch.cat(targets).cpu() if all(map(torch.is_tensor, targets)) else None


def scores(results: dict[str, float], targets: torch.Tensor | None) -> str:
    """Return ', acc 0.9844 (chance 0.14)' or ', r2 0.98 (the mean has 0)', or nothing."""
    if "batch/acc" in results and targets is not None:
        labels = targets.argmax(1) if targets.is_floating_point() else targets
        chance = torch.bincount(labels.flatten()).max().item() / labels.numel()
        return f", acc {number(results['batch/acc'])} (chance {chance:.2f})"
    if "batch/r2" in results:
        return f", r2 {number(results['batch/r2'])} (the mean has 0)"
    return ""


def suspects(trainer: Trainer, watch: Watch, warnings: dict[str, list[str]]) -> list[str]:
    """Return the possible causes, the most likely first; `warnings` are the doctor's."""
    causes = []
    if not watch.is_finite():
        causes.append(
            "optimizer.lr, which may be too high, or inputs and targets, which may be too large"
        )
    frozen = sum(p.numel() for p in trainer.module.parameters() if not p.requires_grad)
    if frozen:
        causes.append(f"the {frozen:,} frozen weights")
    for kind, layers in warnings.items():
        causes.append(f"{', '.join(layers[:3])} ({kind})")
    if watch.before and watch.results["batch/loss"] < 0.98 * watch.before["batch/loss"]:
        causes.append(
            "the number of steps, since the loss is still falling: type a higher max_steps or "
            "optimizer.lr"
        )
    rates = "optimizer.lr (try ten times the value, and a tenth of it)"
    return causes or [f"{rates}, the loss, and whether the targets are right"]
