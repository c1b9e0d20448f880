"""What there is to say about a trainer: the plan of a run, where its tensors are, and how much memory they take."""

import torch
from stoker.trainer import batch as batches
from stoker.trainer import device as devices
from stoker.trainer import parallel

MIB = devices.MIB


def plan(trainer):
    """The lines that open a run: device, model and plan."""
    parameters = sum(p.numel() for p in trainer.module.parameters())
    frozen = sum(p.numel() for p in trainer.module.parameters() if not p.requires_grad)
    fixed = f", {frozen:,} of them frozen" if frozen else ""
    epochs = trainer.total_steps / trainer.steps_per_epoch
    length = (
        f"{epochs:.4g} epoch{'s' * (epochs != 1)} of {trainer.steps_per_epoch} steps"
        if epochs >= 1
        else "a part of an epoch"
    )
    batch_size = getattr(trainer.train_loader, "batch_size", None)
    optimizer = trainer.optimizer
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    at = f", continued at step {trainer.step}" if trainer.step else ""
    at += ", its end: there is nothing left to train" if trainer.step >= trainer.total_steps else ""
    yield f"device   {devices.describe(trainer.device)}, {precision(trainer)} ({trainer.precision_reason})"
    yield f"model    {parallel.plain_text(trainer.module).partition('(')[0]}, {parameters:,} parameters{fixed}"
    yield (
        f"plan     {length} = {trainer.total_steps:,} step{'s' * (trainer.total_steps != 1)}, "
        f"batch {batch_size or 'as the loader gives it'}{parallel.description(trainer)}"
        f"{trainer.micro_batch.description()}, "
        f"{type(optimizer).__name__}{fused} lr {optimizer.param_groups[0].get('initial_lr', 0):g}, "
        f"{getattr(trainer.scheduler, 'description', type(trainer.scheduler).__name__)}{at}"
    )


def precision(trainer):
    """'fp32', 'bf16' or 'fp16'."""
    return {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[trainer.dtype]


def data_line(data, loaders, why, whole=False):
    """The line that tells what is learnt from; `whole` where the one part is all of it."""
    names = ("train", "val", "test")
    counts = [
        f"{part.samples:,} {name}"
        for name, part in zip(names, loaders, strict=True)
        if part is not None
    ]
    counts = [f"all {part.samples:,}" for part in loaders if part is not None] if whole else counts
    inputs = (
        "x".join(map(str, data.in_shape))
        if len(data.in_shape) > 1
        else f"{data.in_shape[0]} numbers"
    )
    kinds = {
        "classification": f"{data.num_classes} classes",
        "regression": f"{data.num_classes} to predict",
    }
    outputs = kinds[data.kind]
    return f"data     {data.name}: {', '.join(counts)} samples of {inputs}, {outputs}; {why}"


def optimizer_tensors(optimizer):
    """The list of the tensors of the optimizer's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]


def mib(tensors):
    """The MiB of tensors, `element_size() * nelement()` each; of shards, what this process has."""
    return (
        sum(tensor.element_size() * tensor.nelement() for tensor in parallel.local(tensors)) / MIB
    )


def layout(tensors):
    """'float32 on cpu, int64 on cpu; 0.33 MiB' for a list of tensors."""
    tensors = list(tensors)
    if not tensors:
        return "nothing"
    places = sorted(
        {f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}" for tensor in tensors}
    )
    return f"{', '.join(places)}; {mib(tensors):.2f} MiB"


def where(trainer, batch=None):
    """The lines of `Trainer.where`: device, types and MiB of the model, the optimizer's state and a batch.

    The batch is the last one trained on, unless one is given.
    """
    seen = (
        trainer.batch_layout
        if batch is None
        else layout(tensor for _, tensor in batches.entries(batch))
    )
    yield f"model      {layout([*trainer.module.parameters(), *trainer.module.buffers()])}"
    yield f"optimizer  {layout(optimizer_tensors(trainer.optimizer))}"
    yield f"batch      {seen}"


def not_finite(trainer):
    """'3 of 4 tensors of the model are not finite, the first being 0.weight', in its order."""
    state, weights = (
        trainer.module.state_dict(),
        dict(trainer.module.named_parameters(remove_duplicate=False)),
    )
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    # An infinity in a buffer can be meant, as in the mask of an attention.
    tensors = dict(zip(tensors, parallel.local(tensors.values()), strict=True))
    finite = {
        name: ~tensor.isnan() if name not in weights else tensor.isfinite()
        for name, tensor in tensors.items()
    }
    names = [name for name, fine in finite.items() if not fine.all()]
    if not names:
        return "all weights are finite, so look at the inputs, the targets and the loss"
    return f"{len(names)} of {len(tensors)} tensors of the model are not finite, the first being {names[0]}"


def memory_report(trainer):
    """MiB by what takes them; `peak` is the most that the device (for the CPU and mps: the process) has held."""
    parameters = list(trainer.module.parameters())
    return {
        "parameters": mib(parameters),
        "gradients": mib(p.grad for p in parameters if p.grad is not None),
        "optimizer": mib(optimizer_tensors(trainer.optimizer)),
        "buffers": mib(trainer.module.buffers()),
        "data": trainer.data_bytes / MIB,
        "peak": devices.peak_memory(trainer.device) / MIB,
    }


def memory_of_a_step(trainer):
    """`memory_report`, with the gradients that a step has: at the end of a fit they are gone."""
    return memory_report(trainer) | {
        "gradients": mib(p for p in trainer.module.parameters() if p.requires_grad)
    }
