"""The evaluation loop."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import device as devices
from stoker.trainer import (
    losses,
    memory,
    misuse,
    optimizers,
    parallel,
    seeding,
    step_errors,
    transfer,
)
from stoker.trainer.errors import UserError
from stoker.trainer.loading import by_name, seekable
from stoker.trainer.metrics import Mean, OfClasses
from stoker.trainer.modes import modes_restored
from stoker.trainer.stopping import EvaluationInterrupted

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


def run(trainer: "Trainer", loader: Any, split: str) -> dict[str, Any]:
    """Evaluate a loader; return {"val/loss": ..., "val/acc": ...} over all of its samples.

    The loss is omitted if `compute_loss` returns None for it.

    Raises:
        EvaluationInterrupted: A fit was interrupted during an evaluation.
    """
    misuse.check_loader(trainer, loader, "evaluate")
    loader = seekable(loader, trainer.seed, trainer.sample_dims)
    loss_mean = Mean()
    batch = None

    def compute_losses(parts: list[Any]) -> list[tuple[Any, Any, Any]]:
        results = []
        with trainer.autocast:
            for part in parts:
                loss, outputs = trainer.compute_loss(part)
                results.append((part, loss, outputs))
        return results

    try:
        reset(trainer)
        # Not inference_mode, which forbids in-place copies of sharded parameters.
        with eval_mode(trainer), torch.no_grad(), losses.examined(trainer):
            trainer.seed_generators(split)
            for batch in loader:
                if trainer.evaluation_due and trainer.poll_interruption():
                    raise EvaluationInterrupted
                batch = transfer.move(batch, trainer.device)
                results = trainer.eval_splitter.apply(compute_losses, batch)
                if not parallel.has_samples(loader):  # this rank has only a copy of a sample
                    continue
                for part, loss, outputs in results:
                    if loss is not None:
                        loss_mean.update(loss, trainer.samples(part), trainer.loss_weight(part))
                    trainer.update_metrics(outputs, part)
    except Exception as error:
        step_errors.raise_if_explained(
            trainer, error, batch, trainer.eval_splitter, f"{split} batch"
        )
        raise
    if batch is None:
        raise UserError(f"The {split} loader is empty.")
    return logged_values(trainer, split, loss_mean.over_ranks())


def validate(trainer: "Trainer") -> dict[str, Any]:
    """Evaluate all validation loaders of a fit, and return their results in one dict."""
    results = {}
    for split, loader in by_name(trainer.val_loader).items():
        results.update(trainer.evaluate(loader, split))
    return results


def logged_values(trainer: "Trainer", split: str, loss_mean: Mean) -> dict[str, Any]:
    """Compute the metrics; return {"val/loss": ..., "val/acc": ...}."""
    values: dict[str, Any] = {}
    if loss_mean.samples:
        values[f"{split}/loss"] = float(loss_mean.compute())
    for name, metric in trainer.metrics.items():
        full_name = f"{split}/{name}"
        with step_errors.naming_metric(name):
            values[full_name] = misuse.number(full_name, metric.compute())
    return values


def reset(trainer: "Trainer") -> None:
    """Reset the metrics, and make them ignore the class that the loss ignores."""
    ignored = losses.ignored_class(trainer.loss)
    for metric in trainer.metrics.values():
        metric.reset()
        if isinstance(metric, OfClasses):
            metric.ignored_by_loss = ignored
        if hasattr(metric, "to"):  # a torchmetrics metric keeps its sums on its own device
            metric.to(trainer.device)


@contextlib.contextmanager
def eval_mode(trainer: "Trainer") -> Iterator[None]:
    """Put the model in evaluation mode and call the hooks. Restore everything at the end."""
    within_fit = trainer.train_loader is not None
    devices.make_current(trainer.device)
    random_states_kept: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not within_fit:  # a fit restores the states itself
        random_states_kept = seeding.random_states_kept(trainer.device, trainer.replica_indices)
    carried = trainer.carried
    trainer.carried = {}
    try:
        with random_states_kept, modes_restored(trainer.model):
            trainer.model.eval()
            with hooks(trainer):
                yield
    finally:
        trainer.carried = carried
        if not within_fit:
            memory.release(trainer.device)


@contextlib.contextmanager
def hooks(trainer: "Trainer") -> Iterator[None]:
    """Call the hooks before and after an evaluation, unless it is inside another one.

    In between, an optimizer that averages the weights, such as Schedule-Free, uses the averages.
    """
    if trainer.is_evaluating:
        yield
        return
    start = time.perf_counter()
    with optimizers.evaluated_weights(trainer.optimizer):
        trainer.is_evaluating = True
        try:
            trainer.call("on_eval_start")
            yield
        finally:
            trainer.is_evaluating = False
            trainer.call("on_eval_end")
    trainer.window.start += time.perf_counter() - start  # not training time
