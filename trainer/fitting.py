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
)
from stoker.trainer import device as devices
from stoker.trainer.callbacks import Checkpoint
from stoker.trainer.freezing import Freeze
from stoker.trainer.history import History
from stoker.trainer.loading import (
    IterableLoader,
    Seekable,
    by_name,
    epoch_length,
    resident_bytes,
    seekable,
)
from stoker.trainer.state import frozen, warn_of_frozen

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer


def prepare(trainer: "Trainer", train_loader: Any, val_loader: Any, resume: Any) -> None:
    """Check the arguments of a fit, build the scheduler, and load the checkpoint to resume."""
    misuse.check_fit(trainer, train_loader, val_loader)
    loader = seekable(train_loader, trainer.seed, trainer.sample_dims)
    misuse.check_uncut(trainer, loader)
    trainer.divisor = losses.divisor(trainer.loss)  # a subclass may have another one by now
    uniform = getattr(loader, "targets_are_uniform", False)
    is_usual = overrides.is_usual(type(trainer), "loss_weight")
    trainer.weighs_samples = is_usual and losses.is_mean_over_samples(trainer.loss, uniform)
    trainer.may_weigh_nothing = not is_usual or losses.has_class_weights(trainer.loss)
    trainer.epochs_before = trainer.epochs_begun
    trainer.step = 0
    steps_per_epoch = epoch_length(loader, trainer.max_steps)
    if isinstance(loader, IterableLoader):
        loader.steps = steps_per_epoch
    trainer.steps_per_epoch = steps_per_epoch
    trainer.total_steps = trainer.max_steps or (trainer.epochs or 0) * steps_per_epoch
    trainer.scheduler = schedules.build(
        trainer.make_scheduler, trainer.optimizer, trainer.total_steps, trainer.scheduler
    )
    trainer.carried = {}
    trainer.stop_reason = None
    trainer.failed = False
    trainer.evaluation_due = False
    trainer.window.clear()
    trainer.data_bytes = resident_bytes(train_loader, *by_name(val_loader).values())
    if trainer.layout_may_change and hasattr(train_loader, "in_shape"):
        devices.settle_layout(trainer.module, train_loader.in_shape, trainer.device)
    if resume is not None:
        before = frozen(trainer.module)
        state = checkpoint.to_resume(resume)
        trainer.go_on_from(state, loader)
        if not any(isinstance(callback, Freeze) for callback in trainer.callbacks):
            warn_of_frozen(trainer.module, before)
        trainer.steps_per_epoch = steps_per_epoch  # not the checkpoint's
    if trainer.special_step is not None:
        trainer.special_step.begin(trainer)
    misuse.warn_of_untrained(trainer)
    misuse.warn_of_epochs(trainer)
    warn_of_stream(trainer, loader)
    trainer.rates = trainer.scheduler.get_last_lr()
    trainer.history = History()
    if isinstance(loader, Seekable):
        loader.spans = trainer.spans
    trainer.train_loader = loader
    trainer.val_loader = val_loader


@contextlib.contextmanager
def cleaned_up(trainer: "Trainer") -> Iterator[None]:
    """Clear the gradients before and after a fit, and restore the random states."""
    trainer.left_out = list(trainer.without_optimizer().values())
    optimizers.zero_grad(trainer.optimizer, trainer.left_out)
    devices.make_current(trainer.device)
    outside = seeding.random_states(trainer.device, trainer.replicas)
    try:
        with losses.first_call_checked(trainer):
            yield
        warn_of_weights(trainer)
    finally:
        seeding.set_random_states(outside)
        if trainer.optimizer is not None:  # the Trainer may have been closed
            optimizers.zero_grad(trainer.optimizer, trainer.left_out)
        trainer.left_out = ()
        trainer.train_loader = trainer.val_loader = None
        trainer.interruption = None
        memory.release(trainer.device)


def warn_of_stream(trainer: "Trainer", loader: Any) -> None:
    """Warn of what checkpoints cannot do for data without a length."""
    savers = [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]
    if not savers or not isinstance(loader, IterableLoader) or loader.length_is_exact:
        return
    if not loader.is_stateful:
        launch.warn(
            f"{loader.name}: its loader keeps no state, so a resume reads it again from the start "
            "and skips what was trained on.\ntorchdata's StatefulDataLoader resumes where it was."
        )
    if trainer.steps_per_epoch == trainer.total_steps and not any(s.every for s in savers):
        launch.warn(
            "checkpoint: the whole training is one epoch, so the only checkpoint is at its end. "
            "Type checkpoint.every=N, or give Checkpoint(every=N)."
        )


def warn_of_weights(trainer: "Trainer") -> None:
    """Warn at the end of a fit if a weight is not finite."""
    if trainer.module is None:  # the Trainer was closed
        return
    name = checkpoint.first_nonfinite(trainer.module)
    if name is not None:
        launch.warn(
            f"The weights of {name} are not finite after step {trainer.step}. Add a NaNGuard() to "
            "the callbacks: it stops at the first such step and explains it."
        )
