"""Prepare a fit, and clean up after it."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stoker.trainer import (
    checkpoint,
    launch,
    losses,
    memory,
    misuse,
    optimizers,
    overrides,
    schedules,
    seeding,
    steps,
)
from stoker.trainer import device as devices
from stoker.trainer.callbacks.saving import Checkpoint
from stoker.trainer.history import History
from stoker.trainer.loading import (
    IterableLoader,
    Seekable,
    by_name,
    epoch_length,
    resident_bytes,
    seekable,
)

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


def prepare(trainer: "Trainer", train_loader: Any, val_loader: Any, resume: Any) -> None:
    """Check the arguments of a fit, reset its state, and load the checkpoint to resume from."""
    misuse.check_fit(trainer, train_loader, val_loader)
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    misuse.check_whole_batches(trainer, loader)

    # How to weigh batches; see `Batching`.
    uniform = getattr(loader, "targets_are_uniform", False)
    is_usual = overrides.is_usual(type(trainer), "loss_weight")
    trainer.weighs_samples = is_usual and losses.is_mean_over_samples(trainer.loss, uniform)
    trainer.may_weigh_nothing = not is_usual or losses.has_class_weights(trainer.loss)

    # The length of this fit. `epochs_begun` still counts the steps of the last fit.
    trainer.epochs_before = trainer.epochs_begun
    trainer.step = 0
    steps_per_epoch = epoch_length(loader, trainer.max_steps)
    if isinstance(loader, IterableLoader):
        loader.steps = steps_per_epoch
    trainer.total_steps = trainer.max_steps or (trainer.epochs or 0) * steps_per_epoch
    trainer.scheduler = schedules.build(
        trainer.make_scheduler, trainer.optimizer, trainer.total_steps, trainer.scheduler
    )

    trainer.carried = {}
    trainer.stop_reason = None
    trainer.failed = False
    trainer.in_step = False
    trainer.evaluation_due = False
    trainer.window.clear()
    trainer.data_bytes = resident_bytes(train_loader, *by_name(val_loader).values())
    if resume is not None:
        trainer.resume_from(checkpoint.loaded(resume), loader)
    trainer.steps_per_epoch = steps_per_epoch  # this loader's value, not the checkpoint's
    if isinstance(trainer.special_step, steps.GraphStep):
        trainer.special_step.begin_fit(trainer)
    trainer.rates = trainer.scheduler.get_last_lr()

    misuse.warn_of_untrained(trainer)
    misuse.warn_of_own_step(trainer)
    warn_of_stream(trainer, loader)

    trainer.history = History()
    if isinstance(loader, Seekable):
        loader.spans = trainer.spans
    trainer.train_loader = loader
    trainer.val_loader = val_loader


@contextlib.contextmanager
def setup_and_cleanup(trainer: "Trainer") -> Iterator[None]:
    """Context manager for a fit: clear gradients before and after it, and clean up at the end.

    The global random states are restored, the loaders are dropped, and unused memory is released.
    """
    trainer.unoptimized = list(trainer.without_optimizer().values())
    optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
    devices.make_current(trainer.device)
    random_states_kept = seeding.random_states_kept(trainer.device, trainer.replica_indices)
    try:
        with random_states_kept, losses.examined(trainer):
            yield
    finally:
        if trainer.optimizer is not None:  # a callback may have closed the Trainer
            optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
        trainer.unoptimized = ()
        trainer.train_loader = trainer.val_loader = None
        trainer.interruption = None
        memory.release(trainer.device)


def warn_of_stream(trainer: "Trainer", loader: Any) -> None:
    """Warn if a resumed fit would have to read a stream from its start."""
    is_saved = any(isinstance(callback, Checkpoint) for callback in trainer.callbacks)
    if not is_saved or not isinstance(loader, IterableLoader):
        return
    if not loader.length_is_exact and not loader.is_stateful:
        launch.warn(
            "The training data is a stream that cannot save its state, so a resumed run reads it "
            "from the start and skips the batches already trained on.\nTo avoid this, use "
            "torchdata's StatefulDataLoader."
        )
