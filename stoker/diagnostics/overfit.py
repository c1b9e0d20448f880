"""Whether a model can learn at all: a few batches by heart, and what to look at where they are not learnt."""

import itertools
import math

import torch

from stoker.diagnostics.doctor import Doctor
from stoker.trainer import batch as batches
from stoker.trainer import graph, schedules, summary
from stoker.trainer.callbacks import Callback
from stoker.trainer.errors import TrainingError, UserError
from stoker.trainer.loading import Seekable, seekable
from stoker.trainer.readable import number

MOST = 1000  # steps
EVERY = 25  # steps between two looks at what is known by heart
GOOD = 0.99  # of the accuracy, or of r2; without either, the loss has to fall by this share


class Batches(Seekable):
    """The first batches of a loader, which stay where they are; `loader` is what they are the beginning of."""

    def __init__(self, loader, count):
        self.kept = [
            batches.walk(lambda _, leaf: leaf.clone(), batch)
            for batch in itertools.islice(loader, count)
        ]
        self.samples = sum(map(batches.size, self.kept))
        self.batch_size = batches.size(self.kept[0])

    def __len__(self):
        return len(self.kept)

    def batches(self, epoch, position):
        return iter(self.kept[position:])


class Watch(Callback):
    """Evaluates on the training batches every EVERY steps, and ends the fit when they are known by heart."""

    def __init__(self, given):
        self.given, self.results, self.first, self.before = given, {}, None, None

    def on_fit_start(self, trainer):
        self.first = trainer.evaluate(self.given, "batch")

    def on_step_end(self, trainer):
        if trainer.is_time(EVERY):
            self.before = self.results
            self.results = trainer.evaluate(self.given, "batch")
            loss = self.results["batch/loss"]
            if not math.isfinite(loss) or is_learnt(self.results, self.first):
                trainer.stop("learnt" if math.isfinite(loss) else "not finite")


def is_learnt(results, first):
    """Whether accuracy or r2 say so; where there is neither, whether the loss has fallen far enough."""
    score = results.get("batch/acc", results.get("batch/r2"))
    if score is not None and math.isfinite(score):
        return score >= GOOD
    return results["batch/loss"] <= (1 - GOOD) * first["batch/loss"]


def learn(trainer, train_loader, count, steps=None):
    """Trains on the first `count` batches alone, at the whole rate throughout; gives the sentence that says it learns.

    It takes at most `steps` steps, MOST by default. TrainingError where it does not learn, with what to look at. The
    loader has to be without augmentation.
    """
    if count > len(train_loader):
        raise UserError(
            f"overfit={count}: an epoch has {len(train_loader)} batches. Type overfit=1."
        )
    loader = seekable(train_loader, trainer.seed)
    loader.seek(0, 0)
    given = Batches(loader, count)
    targets = targets_of(given)
    if targets is not None and len(targets) > 1 and (targets == targets[0]).all():
        what = f"the targets of the first {given.samples} samples are all the same, so there is nothing to learn"
        raise UserError(f"overfit={count}: {what}. Type another overfit or batch_size.")
    doctor, watch = Doctor(EVERY), Watch(given)
    looked_into = trainer.execute is graph.eagerly and not trainer.replicas
    trainer.callbacks = [Opening(count), *[doctor] * looked_into, watch]
    trainer.make_scheduler = schedules.constant
    trainer.epochs, trainer.max_steps = None, steps or MOST
    trainer.fit(given)
    what = f"{count} batch{'es' * (count != 1)} of {given.samples} samples"
    change = f"loss {number(watch.first['batch/loss'])} -> {number(watch.results['batch/loss'])}"
    said = f"after {trainer.step} steps on {what}: {change}{scores(watch.results, given)}"
    if is_learnt(watch.results, watch.first):
        return f"it learns, {said}"
    text = f"overfit={count}: it does not learn, {said}"
    raise TrainingError(
        f"{text}.\nLook at {'; '.join(suspects(trainer, given, watch, doctor.said))}."
    )


class Opening(Callback):
    """Prints the lines that open it."""

    def __init__(self, count):
        self.count = count

    def on_fit_start(self, trainer):
        device, model, _ = summary.plan(trainer)
        print(f"{device}\n{model}")
        rate, name = (
            trainer.optimizer.param_groups[0].get("initial_lr", 0),
            type(trainer.optimizer).__name__,
        )
        first = f"the first {self.count} batches" if self.count > 1 else "the first batch"
        print(
            f"overfit  {first}, without augmentation, for at most {trainer.total_steps:,} steps, {name} lr {rate:g}"
        )


def targets_of(given):
    """The targets of (inputs, targets) batches, on the CPU; None for batches of another form."""
    if not all(isinstance(batch, (list, tuple)) and len(batch) == 2 for batch in given.kept):
        return None
    targets = [batch[1] for batch in given.kept]
    return torch.cat(targets).cpu() if all(isinstance(t, torch.Tensor) for t in targets) else None


def scores(results, given):
    """', acc 0.9844 (chance 0.14)' or ', r2 0.98 (the mean has 0)', as far as these are known."""
    targets = targets_of(given)
    if "batch/acc" in results and targets is not None:
        labels = targets.argmax(1) if targets.is_floating_point() else targets
        chance = torch.bincount(labels.flatten()).max().item() / labels.numel()
        return f", acc {number(results['batch/acc'])} (chance {chance:.2f})"
    return f", r2 {number(results['batch/r2'])} (the mean has 0)" if "batch/r2" in results else ""


def suspects(trainer, given, watch, said):
    """What may be wrong, the most likely first."""
    found, loss, targets = [], watch.results["batch/loss"], targets_of(given)
    if not math.isfinite(loss):
        found.append("optimizer.lr, which is too high, or inputs and targets that are too large")
    if fixed := sum(p.numel() for p in trainer.module.parameters() if not p.requires_grad):
        found.append(f"the {fixed:,} weights that are frozen")
    if twice := contradictions(given, targets):
        found.append(f"the data, in which {twice} samples are there again with another target")
    found += [f"{', '.join(layers[:3])} ({kind})" for kind, layers in said.items()]
    if watch.before and math.isfinite(loss) and loss < 0.98 * watch.before["batch/loss"]:
        found.append(
            "the number of steps, as the loss still falls: type a higher max_steps or optimizer.lr"
        )
    return found or [
        "optimizer.lr (try ten times as much, and a tenth), the loss, and whether the targets are right"
    ]


def contradictions(given, targets):
    """How many samples have the same inputs as an earlier one, and another target."""
    if targets is None or not all(isinstance(batch[0], torch.Tensor) for batch in given.kept):
        return 0
    inputs = torch.cat([batch[0] for batch in given.kept]).flatten(1).cpu()
    _, group = torch.unique(inputs, dim=0, return_inverse=True)
    rows = targets.reshape(len(targets), -1)
    pairs = torch.unique(
        torch.cat([group.unsqueeze(1).to(torch.float64), rows.to(torch.float64)], 1), dim=0
    )
    return len(pairs) - len(group.unique())
