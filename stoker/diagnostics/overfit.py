"""Check that a model can learn at all by letting it memorize a few batches."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

from stoker.diagnostics.doctor import Doctor
from stoker.trainer import batches, schedules, summary, terminal
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import seekable
from stoker.trainer.number_format import number
from stoker.trainer.steps import captures
from stoker.trainer.trainer import Trainer

MOST = 1000  # steps
EVERY = 25  # steps between evaluations
GOOD = 0.99  # accuracy or r2 to reach; without either, the loss must fall by this fraction


class Watch(Callback):
    """Print the opening lines, evaluate on the batches every EVERY steps, and stop once they are
    memorized.
    """

    def __init__(self, given: list[Any]) -> None:
        self.given = given
        self.first: dict[str, float] = {}  # results before the first step
        self.results: dict[str, float] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        for line in summary.plan(trainer):
            terminal.show(line)
        self.first = trainer.evaluate(self.given, "batch")
        if "batch/loss" not in self.first:
            raise UserError(
                "overfit: evaluations of this Trainer return no loss, so Stoker cannot tell "
                "whether the model learns. Remove overfit, and type max_steps=100 for a short run."
            )

    def on_step_end(self, trainer: Trainer) -> None:
        if not trainer.is_due(EVERY):
            return
        self.results = trainer.evaluate(self.given, "batch")
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
    """Train on only the first `count` batches (or all, if there are fewer) at a constant rate.

    Return the verdict. Training takes at most `steps` steps, or MOST by default. The loader must
    not augment the data. If the model does not learn, a TrainingError names the likely causes.
    """
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    loader.seek(0, 0)
    given = [
        batches.walk(lambda _, leaf: leaf.clone(), batch)
        for batch in itertools.islice(loader, count)
    ]
    watch = Watch(given)
    trainer.callbacks = [watch]
    if not captures(trainer) and not trainer.replica_indices:
        trainer.callbacks.insert(0, Doctor(EVERY))
    trainer.make_scheduler = schedules.constant
    trainer.epochs = None
    trainer.max_steps = steps or MOST
    trainer.fit(given)
    changes = []
    for name, value in watch.results.items():
        if name in ("batch/loss", "batch/acc", "batch/r2"):
            change = f"{number(watch.first[name])} -> {number(value)}"
            changes.append(f"{name.removeprefix('batch/')} {change}")
    samples = sum(map(trainer.samples, given))
    facts = f"after {trainer.step} steps on {samples} samples: {', '.join(changes)}"
    if watch.is_learnt():
        return f"the model has learned {facts}"
    frozen = sum(p.numel() for p in trainer.module.parameters() if not p.requires_grad)
    raise TrainingError(
        f"overfit={count}: the model has not learned {facts}.\n"
        "Check optimizer.lr (try ten times the value, and a tenth of it), the loss, and whether "
        f"the targets are right; {frozen:,} parameters are frozen."
    )
