"""Special steps: for fp16, `micro_batch=auto`, CUDA graphs and closure optimizers.

The Trainer chooses one when it is built, and `train_step` calls it instead of its own body. Each
one does what `train_step` does: accumulate gradients, clip them, update the weights.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import graph, losses, optimizers, parallel, schedules
from stoker.trainer.errors import NotFinite, UserError
from stoker.trainer.number_format import brief

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

# The fp16 scaler starts at a scale of 65,536 and halves it at each skipped step. At scales below
# the smallest normal float16 number, the scale cannot be the reason why a gradient overflows.
LOWEST_SCALE = 2.0**-14

# Takes one step, given the Trainer and a batch, and returns the mean loss of the batch.
Step = Callable[["Trainer", Any], torch.Tensor]


def choose(trainer: "Trainer", compile: bool | str) -> Step | None:
    """Return the special step that the settings or the optimizer require, or None.

    Raises:
        UserError: `compile="graph"` or the closure optimizer conflicts with another setting.
    """
    step: Step | None = None
    if compile == "graph":
        graph.check(trainer)
        step = GraphStep()
    elif trainer.scaler.is_enabled() or trainer.splitter.adapts:
        step = adaptive_step
    if trainer.optimizer is None or not optimizers.needs_closure(trainer.optimizer):
        return step
    if step is not None or parallel.process_count > 1:
        raise UserError(
            f"optimizer: {type(trainer.optimizer).__name__} evaluates the loss several times per "
            "step. Use one process, without compile=graph, precision=fp16 or micro_batch=auto."
        )
    return closure_step


def captures(trainer: "Trainer") -> bool:
    """Return whether steps are replayed as graphs, without running the model's Python code."""
    return isinstance(trainer.special_step, GraphStep)


def adaptive_step(trainer: "Trainer", batch: Any) -> torch.Tensor:
    """Take a step with micro_batch=auto, or with the fp16 scaler, which may skip the update."""
    scaler = trainer.scaler
    loss = trainer.splitter.apply(
        functools.partial(accumulate, trainer),
        batch,
        trainer.module,
        undo=functools.partial(start_over, trainer),
    )
    with trainer.spans["optimizer"]:
        if trainer.max_grad_norm is not None and scaler.is_enabled():
            scaler.unscale_(trainer.optimizer)
            unscale_others(trainer)
        norm = clip(trainer)
        scaler.step(trainer.optimizer)  # skips the update if a gradient is not finite
        scaler.update()  # lowers the scale after a skipped step
        optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
    finish(trainer, norm)
    return loss


def closure_step(trainer: "Trainer", batch: Any) -> torch.Tensor:
    """Take a step with an optimizer that requires a closure, such as LBFGS."""
    parts = trainer.splitter.split(batch)
    norms = []
    carried = trainer.carried

    def evaluate() -> torch.Tensor:
        start_over(trainer)  # every evaluation of the loss must use the same dropout mask
        trainer.carried = carried
        loss = accumulate(trainer, parts)
        norms.append(clip(trainer))
        return loss

    loss: torch.Tensor = trainer.optimizer.step(evaluate)
    optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
    finish(trainer, norms[0])  # the gradient norm before the update
    return loss


def unscale_others(trainer: "Trainer") -> None:
    """Unscale the gradients of parameters without an optimizer, because the norm includes them."""
    # private: _get_scale_async, because get_scale() waits for the device, torch 2.15
    scale: torch.Tensor = trainer.scaler._get_scale_async()
    for parameter in trainer.without_optimizer().values():
        if parameter.grad is not None:
            parameter.grad /= scale


def check_scale(trainer: "Trainer") -> None:
    """Raise NotFinite if skipped steps have lowered the fp16 scale below LOWEST_SCALE."""
    scale = trainer.scaler.get_scale()  # 1 without fp16
    if scale < LOWEST_SCALE:
        raise NotFinite(
            f"fp16: the gradients are still not finite at step {trainer.step:,}, even with a loss "
            f"scale of only {brief(scale)} (learning rate {brief(trainer.lr)}).\n"
            "Type precision=bf16 or precision=fp32, or lower optimizer.lr."
        )


class GraphStep:
    """A step that is captured as a CUDA graph, once per kind of batch, and then replayed."""

    def begin_fit(self, trainer: "Trainer") -> None:
        """Prepare the optimizer and the schedule for capture, and forget earlier graphs."""
        # A loaded checkpoint has new tensors, and plain numbers as learning rates.
        optimizers.make_capturable(trainer.optimizer, trainer.device)
        if isinstance(trainer.scheduler, schedules.Schedule):
            trainer.scheduler.set_rates()  # writes the rates into the new tensors
        self.captured = graph.Captured(trainer.optimizer, trainer.device)

    def __call__(self, trainer: "Trainer", batch: Any) -> torch.Tensor:
        """Take one step, as `Trainer.train_step` does."""
        if trainer.optimizer.state is not self.captured.state:  # a callback loaded a checkpoint
            self.begin_fit(trainer)
        loss: torch.Tensor
        loss, norm = self.captured(functools.partial(capturable_part, trainer), batch)
        finish(trainer, norm)
        return loss


def capturable_part(trainer: "Trainer", batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do the part of a step that a graph can capture; return (mean loss, gradient norm)."""
    with graph.without_clock(trainer):
        loss = accumulate(trainer, trainer.splitter.split(batch))
        norm = clip(trainer)
        trainer.optimizer_step()
    optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
    return loss, norm


def accumulate(trainer: "Trainer", parts: list[Any]) -> torch.Tensor:
    """Accumulate gradients over micro-batches; return the mean loss of the batch."""
    terms = []  # a copy of the loop in `Trainer.train_step`: change both
    for i, (micro_batch, fraction) in enumerate(trainer.with_fractions(parts), 1):
        with parallel.gradient_sync(trainer.model, enabled=i == len(parts)):
            with trainer.spans["forward"], trainer.autocast:
                loss, outputs = trainer.compute_loss(micro_batch)
            if fraction is not None:
                loss = losses.scaled(loss, fraction, outputs)
            terms.append(loss.detach())
            if parallel.process_count > 1:
                loss = losses.scaled(loss, trainer.process_weight, outputs)
            with trainer.spans["backward"]:
                trainer.scaler.scale(loss).backward()
    return sum(terms[1:], terms[0])


def clip(trainer: "Trainer") -> torch.Tensor | None:
    """Clip the gradients and return their norm before clipping; None without `max_grad_norm`."""
    if trainer.max_grad_norm is None:
        return None
    return torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), trainer.max_grad_norm)


def start_over(trainer: "Trainer") -> None:
    """Drop the gradients and reseed the generators, so that the step can be repeated."""
    optimizers.zero_grad(trainer.optimizer, trainer.unoptimized)
    trainer.seed_generators("step")


def finish(trainer: "Trainer", norm: torch.Tensor | None) -> None:
    """Advance the schedule, and record the gradient norm."""
    trainer.scheduler.step()
    if norm is not None:
        trainer.window.add_norm(norm, may_be_skipped=trainer.scaler.is_enabled())
