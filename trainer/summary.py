"""Describe what a Trainer is going to do, and how much memory its tensors use."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batches, memory, parallel
from stoker.trainer import device as devices
from stoker.trainer.combined import parts
from stoker.trainer.number_format import counted

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

MIB = memory.MIB


def plan(trainer: "Trainer") -> Iterator[str]:
    """Yield the lines that are printed at the start of a run: model, device and plan."""
    weights = list(trainer.module.parameters())
    total = sum(p.numel() for p in weights)
    frozen = sum(p.numel() for p in weights if not p.requires_grad)
    name = parallel.plain_text(trainer.module).partition("(")[0]
    line = f"model    {name}, {total:,} parameters"
    if frozen:
        line += f", {frozen:,} of them frozen"
    yield line
    yield f"device   {devices.describe(trainer.device)}, {precision(trainer)}"
    batch_size = getattr(trainer.train_loader, "batch_size", None) or "size set by the loader"
    optimizer = trainer.optimizer
    rates = {f"{group.get('initial_lr', 0):g}": None for group in optimizer.param_groups}
    kinds = " + ".join(type(part).__name__ for part in parts(optimizer))
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    processes = ""
    if parallel.process_count > 1:
        processes = f" on {parallel.process_count} processes ({trainer.strategy})"
    line = (
        f"plan     {length(trainer)}, batch {batch_size}{processes}"
        f"{trainer.splitter.description()}, {kinds}{fused} lr {', '.join(rates)}, "
        f"{getattr(trainer.scheduler, 'description', type(trainer.scheduler).__name__)}"
    )
    if trainer.step:
        line += f", continued at step {trainer.step:,}"
    if trainer.step == trainer.total_steps:
        line += ", so nothing is left to train"
    yield line


def length(trainer: "Trainer") -> str:
    """Return "3 epochs of 8 steps", "4 of 8 steps", or "24 steps" if the run is a single epoch."""
    steps = counted(trainer.steps_per_epoch, "step")
    if trainer.steps_per_epoch == trainer.max_steps:
        return steps
    if trainer.total_steps < trainer.steps_per_epoch:
        return f"{trainer.total_steps:,} of {steps}"
    epochs = round(trainer.total_steps / trainer.steps_per_epoch, 2)
    return f"{counted(epochs, 'epoch')} of {steps}"


def precision(trainer: "Trainer") -> str:
    """Return "fp32", "bf16" or "fp16"."""
    return next(name for name, dtype in devices.DTYPES.items() if dtype is trainer.dtype)


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state."""
    moments = [] if optimizer is None else list(optimizer.state.values())
    return [tensor for _, tensor in batches.entries(moments)]


def mib(tensors: Iterable[torch.Tensor]) -> float:
    """Return the size of the tensors in MiB. For sharded tensors, count only the local shards."""
    parts = parallel.local(tensors)
    return sum(tensor.element_size() * tensor.nelement() for tensor in parts) / MIB
