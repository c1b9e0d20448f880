"""Say what a Trainer will do, where its tensors are, and how much memory they take."""

import inspect
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stoker.trainer import batch as batches
from stoker.trainer import copies, memory, overrides, parallel, schedules, seeding
from stoker.trainer import device as devices
from stoker.trainer.combined import parts
from stoker.trainer.modes import modes_restored

if TYPE_CHECKING:
    from stoker.trainer.trainer import Trainer

MIB = memory.MIB
PRECISIONS = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def plan(trainer: "Trainer") -> Iterator[str]:
    """Yield the lines that open a run: device, model and plan."""
    device = devices.describe(trainer.device)
    yield f"device   {device}, {precision(trainer)} ({trainer.precision_reason})"
    weights = list(trainer.module.parameters())
    total = sum(p.numel() for p in weights)
    frozen = sum(p.numel() for p in weights if not p.requires_grad)
    name, _, _ = parallel.plain_text(trainer.module).partition("(")
    line = f"model    {name}, {total:,} parameters"
    if frozen:
        line += f", {frozen:,} of them frozen"
    yield line
    batch_size = getattr(trainer.train_loader, "batch_size", None)
    optimizer = trainer.optimizer
    rate = optimizer.param_groups[0].get("initial_lr", 0)
    kinds = " + ".join(type(part).__name__ for part in parts(optimizer))
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    schedule = schedules.describe(trainer.scheduler)
    update = f"{kinds}{fused} lr {rate:g}{changed(parts(optimizer)[0])}, {schedule}"
    own_step = not overrides.is_usual(type(trainer), "train_step")
    uses = r"\.optimizer\b|super\(\)\.train_step"
    if own_step and not overrides.mentions(type(trainer), uses):
        update = f"{type(trainer).__name__}.train_step with its own optimizers"
    line = (
        f"plan     {length(trainer)}, batch {batch_size or 'as the loader gives it'}"
        f"{parallel.description(trainer)}{trainer.micro_batch.description()}, {update}"
    )
    rules: dict[str, float] = {}
    for group in optimizer.param_groups:
        if "name" in group:
            rules.setdefault(group["name"], group.get("initial_lr", 0))
    if rules:
        line += f"; lr of {', '.join(f'{name} {value:g}' for name, value in rules.items())}"
    if trainer.step:
        line += f", continued at step {trainer.step}"
    if trainer.step >= trainer.total_steps:
        line += ", its end: there is nothing left to train"
    yield line


def changed(optimizer: torch.optim.Optimizer) -> str:
    """Return ', momentum 0.9' for the arguments that are not the default of the optimizer's class.

    The rate is left out, and options that change no result, such as `fused`.
    """
    named = ""
    for name, argument in inspect.signature(type(optimizer)).parameters.items():
        if name in ("lr", "fused", "foreach", "capturable"):
            continue
        value = optimizer.defaults.get(name, argument.default)
        if isinstance(value, list):
            value = tuple(value)
        if value != argument.default:
            text = f"{value:g}" if isinstance(value, float) else value
            named += f", {name} {text}"
    return named


def length(trainer: "Trainer") -> str:
    """Return '3 epochs of 8 steps = 24 steps', or '24 steps' if they are the one epoch."""
    steps = "step" if trainer.total_steps == 1 else "steps"
    total = f"{trainer.total_steps:,} {steps}"
    if trainer.steps_per_epoch == trainer.max_steps:
        return total
    epochs = trainer.total_steps / trainer.steps_per_epoch
    if epochs < 1:
        return f"a part of an epoch = {total}"
    unit = "epoch" if epochs == 1 else "epochs"
    return f"{epochs:.4g} {unit} of {trainer.steps_per_epoch} steps = {total}"


def precision(trainer: "Trainer") -> str:
    """Return 'fp32', 'bf16' or 'fp16'."""
    return PRECISIONS[trainer.dtype]


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state."""
    tensors: list[torch.Tensor] = []
    if optimizer is not None:
        for moments in optimizer.state.values():
            tensors += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return tensors


def mib(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MiB of tensors; with shards, only those of this process."""
    parts = parallel.local(tensors)
    return sum(tensor.element_size() * tensor.nelement() for tensor in parts) / MIB


def layout(tensors: Iterable[torch.Tensor]) -> str:
    """Return 'float32 on cpu, int64 on cpu; 0.33 MiB'."""
    tensors = list(tensors)
    if not tensors:
        return "nothing"
    places = {f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in tensors}
    return f"{', '.join(sorted(places))}; {mib(tensors):.2f} MiB"


def layout_of(batch: Any) -> str:
    """Return the `layout` of the tensors of a batch."""
    return layout(tensor for _, tensor in batches.entries(batch))


def where(trainer: "Trainer", batch: Any = None) -> Iterator[str]:
    """Yield the lines of `Trainer.where`, on the batch or else on the last one trained on."""
    model = [*trainer.module.parameters(), *trainer.module.buffers()]
    yield f"model      {layout(model)}"
    yield f"optimizer  {layout(optimizer_tensors(trainer.optimizer))}"
    yield f"batch      {trainer.batch_layout if batch is None else layout_of(batch)}"


def not_finite(trainer: "Trainer") -> str:
    """Return '3 of 4 tensors of the model are not finite, the first being 0.weight'."""
    weights = dict(trainer.module.named_parameters(remove_duplicate=False))
    tensors = {}
    for name, tensor in trainer.module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            tensors[name] = tensor
    names = []
    for name, tensor in zip(tensors, parallel.local(tensors.values()), strict=True):
        # An infinity in a buffer can be meant, as in the mask of an attention.
        fine = tensor.isfinite() if name in weights else ~tensor.isnan()
        if not fine.all():
            names.append(name)
    if not names:
        return "all weights are finite, so look at the inputs, the targets and the loss"
    return (
        f"{len(names)} of {len(tensors)} tensors of the model are not finite, "
        f"the first being {names[0]}"
    )


def can_be_counted(trainer: "Trainer") -> bool:
    """Return whether `Saved` sees everything that a step saves.

    Hooks would recompile a compiled module, and do not reach the threads of replicas.
    """
    return not (parallel.is_compiled(trainer.module) or trainer.replicas)


class Saved:
    """Counts the bytes that autograd saves for backward passes, without weights and buffers.

    With several micro-batches, `most` is the value of the largest one.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        kept = [*module.parameters(), *module.buffers()]
        self.of_model = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self.kept: dict[int, int] = {}  # {address: bytes} that the backward pass will need
        self.most: int = 0
        self.backward = False  # whether the backward pass has begun

    def counted(self) -> Any:
        """Return a context in which what is saved is counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.keep, self.use)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.backward:  # the next micro-batch begins, and the last one's is free
            self.kept = {}
            self.backward = False
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.of_model:
            self.kept[storage.data_ptr()] = storage.nbytes()
            self.most = max(self.most, sum(self.kept.values()))
        return tensor

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        self.backward = True
        return tensor


def activations(trainer: "Trainer", batch: Any) -> float:
    """Return the MiB that a forward pass of the whole batch saves for its backward pass.

    The model is left as it was, with the running statistics of its norms.
    """
    batch = copies.move(batch, trainer.device)
    buffers = list(trainer.module.buffers())
    before = [buffer.clone() for buffer in buffers]
    states = seeding.random_states(trainer.device)
    saved = Saved(trainer.module)
    try:
        with modes_restored(trainer.model):
            trainer.model.train()
            with torch.enable_grad(), saved.counted(), trainer.autocast:
                # Kept in a variable: without its graph, addresses would be used again.
                loss = trainer.compute_loss(batch)
            del loss
    finally:
        seeding.set_random_states(states)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
    return saved.most / MIB


def memory_report(trainer: "Trainer", batch: Any = None) -> dict[str, float]:
    """Return MiB by use; `peak` is of the device (on the CPU and mps, of the process).

    With a batch, `activations` is what a step on all of it saves for its backward pass; it is left
    out where the model is compiled or has replicas.
    """
    parameters = list(trainer.module.parameters())
    report = {}
    if batch is not None and can_be_counted(trainer):
        report["activations"] = activations(trainer, batch)
    return report | {
        "parameters": mib(parameters),
        "gradients": mib(p.grad for p in parameters if p.grad is not None),
        "optimizer": mib(optimizer_tensors(trainer.optimizer)),
        "buffers": mib(trainer.module.buffers()),
        "data": trainer.data_bytes / MIB,
        "peak": memory.peak_memory(trainer.device) / MIB,
    }


def memory_of_a_step(trainer: "Trainer") -> dict[str, float]:
    """Return `memory_report` with the gradients of a step, which are gone at the end of a fit."""
    report = memory_report(trainer)
    report["gradients"] = mib(p for p in trainer.module.parameters() if p.requires_grad)
    return report
