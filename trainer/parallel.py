"""Parallel strategies: single, dp (torch.nn.DataParallel), ddp and fsdp.

ddp and fsdp run one process per device. Only this module knows how each strategy works.
"""

import functools
import re
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.trainer import launch, losses, settings
from stoker.trainer.device import REPLICAS
from stoker.trainer.errors import TrainingError, UserError, first_few, log
from stoker.trainer.spans import SILENT

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Summable = TypeVar("Summable", int, float, Tensor, Tensor | None)

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# fsdp gathers blocks with at least this many parameters separately, and smaller ones together.
BLOCK = 2**20
# Allowed relative difference between the norms of a weight on two processes, which may run on
# different hardware.
DRIFT = 1e-4
EXCHANGE = 0.25  # seconds between the exchanges of an Agreement
MOST_CALLS = 64  # maximum number of calls between two exchanges, in case steps become slower

process_count: int = 1  # number of processes that train together; `start` sets it


def start(strategy: str, device: torch.device) -> str:
    """Join the other processes, if torchrun started several; return the strategy to use.

    Each process waits at most `launch.timeout` seconds for the others.

    Raises:
        UserError: The strategy supports only one process, but there are several.
    """
    global process_count
    settings.check("strategy", strategy)
    if launch.world_size() == 1:
        return "single" if strategy == "auto" else strategy
    if strategy in ("single", "dp"):
        raise UserError(
            f"strategy={strategy}: {launch.world_size()} processes were started, and each would "
            "train its own model.\n"
            "Type strategy=auto, or start the command without torchrun."
        )
    if not dist.is_initialized():
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        launch.wait_for_ranks("starts")  # init_process_group would ignore signals
        dist.init_process_group(
            backend,
            store=launch.store(),
            rank=launch.rank(),
            world_size=launch.world_size(),
            timeout=timedelta(seconds=launch.timeout),
        )
    process_count = dist.get_world_size()
    return "ddp" if strategy == "auto" else strategy


def leave() -> None:
    """Leave the process group at the end of a successful run."""
    global process_count
    if dist.is_initialized():
        dist.destroy_process_group()
        process_count = 1


# Wrap a model


def wrap(module: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    """Return the module that a step calls: the module itself for `single`, or a parallel wrapper.

    `dp` uses all visible GPUs; with fewer than two, it has no effect. `ddp` keeps the whole module
    in each process, and `fsdp` shards each parameter in place. State dicts are those of the module
    itself, so their keys have no `module.` prefix. BatchNorm computes its statistics across all
    processes.

    Raises:
        UserError: The strategy does not support this module or device.
    """
    if strategy == "single":
        return module
    if strategy == "dp":
        return replicated(module, device)
    if process_count == 1:
        log.warning("strategy=%s has no effect with a single process.", strategy)
        return module
    unwrap(module)  # an earlier Trainer may have wrapped it
    if any(map(is_shard, module.parameters())):
        raise UserError(
            f"strategy={strategy}: this model was already sharded by an earlier Trainer.\n"
            "Build it again, and load a checkpoint if you need its weights."
        )
    take_from_first([*module.parameters(), *module.buffers()])
    spread = sharded(module, device) if strategy == "fsdp" else copied(module, device)
    spread.exchanged = trained(module)  # type: ignore[assignment]
    # Do this last, because DistributedDataParallel rejects a SyncBatchNorm on the CPU.
    spread_norms(module)
    return spread


def trained(module: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    named = module.named_parameters()
    return {name for name, parameter in named if parameter.requires_grad}


def check_exchanged(model: nn.Module, module: nn.Module) -> None:
    """Raise UserError for unfrozen parameters whose gradients are not synchronized."""
    if process_count == 1:
        return
    unfrozen = trained(module) - getattr(model, "exchanged", trained(module))
    if unfrozen:
        raise UserError(
            "strategy: gradients are not synchronized for parameters that were frozen "
            f"when the Trainer was created: {first_few(sorted(unfrozen), 3)}.\n"
            "Freeze them in on_fit_start instead, or train in one process."
        )


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap the module in DistributedDataParallel, if it has anything to train."""
    if not trained(module):
        return module
    # torch 2.15 renames broadcast_buffers, but torch 2.11 only knows this name.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device.index],
            broadcast_buffers=bool(own_buffers(module)),  # rank 0's buffers, as in a checkpoint
            gradient_as_bucket_view=True,
            # This keeps the buckets of the first step. Otherwise a resumed run would sum gradients
            # in a different order, and be off by 7e-9 with three or more processes.
            find_unused_parameters=True,
        )


def replicated(module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap the module in torch.nn.DataParallel, if there are at least two GPUs."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    if count < 2:
        log.warning("strategy=dp has no effect with fewer than two GPUs.")
        return module
    if device.type not in REPLICAS or is_compiled(module):
        raise UserError(
            "strategy=dp: torch.nn.DataParallel needs CUDA and an uncompiled model.\n"
            "Type strategy=single, or strategy=ddp."
        )
    # DataParallel gathers outputs on its first device, which must also hold the parameters.
    indices = sorted(range(count), key=lambda index: index != device.index)
    return Replicated(module, device_ids=indices)


class Replicated(nn.DataParallel[nn.Module]):
    """DataParallel whose replicas use the autocast dtype of the calling thread.

    Each replica runs in its own thread, in which torch would use the default dtype of autocast:
    fp16, without a scaler.
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        within = [autocasting(replica, self.src_device_obj.type) for replica in replicas]
        return super().parallel_apply(within, inputs, kwargs)


def autocasting(module: Any, device_type: str) -> Any:
    """Return a function that calls the module under this thread's autocast, from any thread."""
    dtype = torch.get_autocast_dtype(device_type)
    is_enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, dtype=dtype, enabled=is_enabled)(module)


def sharded(module: nn.Module, device: torch.device) -> nn.Module:
    """Shard the module's parameters across the processes (FSDP2, Zhao 2023, arXiv 2304.11277).

    Items of a Sequential or ModuleList with at least BLOCK parameters are gathered separately.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if is_compiled(module):
        raise UserError(
            "strategy=fsdp: a sharded model cannot be compiled. Type compile=false or strategy=ddp."
        )
    module.to(memory_format=torch.contiguous_format)
    mesh = init_device_mesh(device.type, (launch.world_size(),))
    try:
        for container in reversed(list(module.modules())):  # inner containers first
            if not isinstance(container, (nn.Sequential, nn.ModuleList)):
                continue
            for part in container:
                free = [weight for weight in part.parameters() if not is_shard(weight)]
                if sum(weight.numel() for weight in free) >= BLOCK:
                    fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # Reshard the root too. Otherwise it would stay gathered after an evaluation, and would
        # ignore the weights that EMA copies into its shards.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"strategy=fsdp: {str(error).rstrip('.')}.\nType strategy=ddp.") from error
    if own_buffers(module):
        module.register_forward_pre_hook(follow_first)
    return module


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    # private: nn.Module._compiled_call_impl, because there is no public check, torch 2.15
    return module._compiled_call_impl is not None


# BatchNorm across all processes


class SumOverRanks(torch.autograd.Function):
    """Sum a tensor across ranks, and its gradient too, because each rank has part of the loss."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.forward(ctx, gradient)


class OverRanks(nn.SyncBatchNorm):
    """BatchNorm across all ranks, like SyncBatchNorm, but on the CPU too."""

    process_group = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized():
            return nn.BatchNorm1d.forward(self, input)
        if input.device.type != "cpu":
            return super().forward(input)
        # Each process normalizes the whole batch, and returns its own rows.
        rows = [input.new_zeros(shape) for shape in from_all(input.shape)]
        sizes = [len(part) for part in rows]
        rows[dist.get_rank()] = input
        whole = SumOverRanks.apply(torch.cat(rows))
        normalized = nn.BatchNorm1d.forward(self, whole)
        own: Tensor = normalized.split(sizes)[dist.get_rank()]
        return own.clone()  # because an activation may change it in place


@functools.cache
def over_ranks(kind: Any) -> Any:
    """Return a subclass of `kind` that computes batch statistics across all ranks.

    The class name is unchanged.
    """
    return type(kind.__name__, (OverRanks, kind), {})


def spread_norms(module: nn.Module) -> None:
    """Make each BatchNorm compute its statistics across all processes, in place.

    Classes with their own `forward` are left unchanged.
    """
    for child in module.modules():
        if not isinstance(child, NORMS):
            continue
        kind: Any = type(child)
        if has_usual_forward(child):
            child.__class__ = over_ranks(kind)
        else:
            name = kind.__name__
            log.warning("%s overrides forward, so each process computes its own statistics.", name)


def unwrap(module: nn.Module) -> None:
    """Undo `spread_norms`, because the module may outlive the process group."""
    for child in module.modules():
        if isinstance(child, OverRanks):
            child.__class__ = type(child).__bases__[1]


def has_usual_forward(norm: nn.Module) -> bool:
    """Return whether this is a BatchNorm with torch's own forward."""
    usual = (nn.BatchNorm1d.forward, OverRanks.forward)
    return isinstance(norm, NORMS) and type(norm).forward in usual


def own_buffers(module: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers that may differ between processes, except BatchNorm's."""
    buffers: list[Tensor] = []
    for child in module.modules():
        if not has_usual_forward(child):
            buffers += child.buffers(recurse=False)
    return [buffer for buffer in buffers if buffer.is_floating_point()]


def follow_first(module: nn.Module, _: Any) -> None:
    """Copy rank 0's buffers to all processes before a forward pass, as ddp does."""
    take_from_first(own_buffers(module))


def take_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy these tensors from rank 0 to all processes."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


def plain_text(module: nn.Module) -> str:
    """Return the module as Python prints it, without the prefixes that FSDP adds to class names."""
    return re.sub(r"\bFSDP(?=\w+\()", "", str(module))


# In a step


def replica_indices(model: nn.Module) -> tuple[int, ...]:
    """Return the indices of the GPUs that hold a replica with `dp`, or ()."""
    return tuple(model.device_ids) if isinstance(model, nn.DataParallel) else ()


def gradient_sync(model: nn.Module, *, enabled: bool) -> AbstractContextManager[Any]:
    """Return a context in which backward passes exchange gradients only if `enabled`."""
    if process_count == 1:
        return SILENT
    set_sync: Callable[[bool], None] | None = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is not None:
        set_sync(enabled)
    elif not enabled and isinstance(model, DistributedDataParallel):
        no_sync: AbstractContextManager[Any] = model.no_sync()
        return no_sync
    return SILENT


def average_gradients(module: nn.Module) -> None:
    """Average the gradients of a module across all processes.

    Call this in your own `train_step` if it uses parts of `trainer.module`, such as one of several
    models. If it calls `trainer.model`, the backward pass averages the gradients.
    """
    if process_count == 1:
        return
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= process_count


def broadcast_weights(model: nn.Module) -> None:
    """Copy rank 0's weights and buffers to all processes, if each process has a full copy."""
    if isinstance(model, DistributedDataParallel):
        take_from_first([*model.module.parameters(), *model.module.buffers()])


def check_same_weights(model: nn.Module) -> None:
    """Raise TrainingError if the weights are not the same on all processes.

    They differ if a step bypasses `trainer.model`, for example by calling `self.module(inputs)`:
    each process then uses only its own gradients, without any other symptom.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    named = dict(model.module.named_parameters())
    with torch.no_grad():
        lengths = [torch.linalg.vector_norm(w, dtype=torch.float64) for w in named.values()]
    norms = torch.stack(lengths).cpu()
    for theirs in from_all(norms):
        apart = (theirs - norms).abs() > DRIFT * theirs
        if apart.any():
            name = list(named)[int(apart.nonzero()[0])]
            raise TrainingError(
                f"The parameter {name} differs between processes, because its gradients were not "
                "synchronized.\n"
                "A step must call self.model (not self.module) once per backward(). "
                "If it calls parts of the model, call "
                "stoker.trainer.parallel.average_gradients(part) after each backward()."
            )


# Between steps


def add_up(value: Summable) -> Summable:
    """Return the sum of a number or a tensor across all processes, ignoring None."""
    if process_count == 1:
        return value
    values = [part for part in from_all(value) if part is not None]
    total: Any = sum(values[1:], values[0]) if values else None
    if isinstance(value, Tensor):
        total = total.to(value.device)
    summed: Summable = total
    return summed


def from_all(value: Any) -> list[Any]:
    """Return the values of all ranks as a list: plain values, or tensors on the CPU."""
    if process_count == 1:
        return [value]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
    values = [None] * process_count
    dist.all_gather_object(values, value)
    return values


def check_sampler(loader: Any) -> None:
    """Raise UserError for a loader that already divides samples among the processes."""
    if isinstance(getattr(loader, "sampler", None), torch.utils.data.DistributedSampler):
        raise UserError(
            "DistributedSampler: the Trainer itself splits each batch among the processes.\n"
            "Pass a DataLoader without this sampler; its batch_size is the total for all processes."
        )


def check_size(samples: int) -> None:
    """Raise UserError if a batch has fewer samples than processes."""
    if samples < process_count:
        raise UserError(
            f"A batch of size {samples} is too small to split among {process_count} processes.\n"
            "Increase batch_size."
        )


def weight(here: float | Tensor, total: float | None, device: torch.device) -> float | Tensor:
    """Return the factor by which to multiply this process's mean loss.

    With this factor, the average gradient of all processes is the gradient of the whole batch.
    `here` is the weight of this process's part of the batch. `total` is the weight of the whole
    batch, or None to compute it.
    """
    if total is not None:
        return float(here) * process_count / total
    part = losses.on_device(here, device)
    summed = part.clone()
    dist.all_reduce(summed)
    return losses.fraction(part * process_count, summed)


def has_samples(loader: Any) -> bool:
    """Return whether this rank has samples of the last batch, not just a copy of one."""
    return process_count == 1 or launch.rank() < loader.global_size


# Sharded tensors


def is_shard(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether this tensor is sharded by `fsdp`."""
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # takes 0.3 s, so import it only when needed

    return isinstance(tensor, DTensor)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local shards of sharded tensors (not copied), and other tensors unchanged."""
    return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors]


def unsharded(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded, and return it. All processes must call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def like(tensor: Tensor, target: Tensor | None) -> Tensor:
    """Shard a whole tensor like `target`, if `target` is sharded, without communication."""
    if target is None or not is_shard(target) or is_shard(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        tensor.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


class Agreement:
    """Lets all processes agree on whether to stop, and on the time.

    All processes ask at the same points: after each step, and before each batch of an evaluation.
    They exchange values about every EXCHANGE seconds. Between exchanges, the answers do not change.
    """

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.agreed = 0.0  # longest time since the start on any process, as of the last exchange
        self.calls = 0  # number of calls since the last exchange
        self.soonest = 1  # number of the call at which to exchange
        # With a single process, there is nothing to exchange, and `bool` is the cheapest call.
        self.is_asked: Callable[[Any], bool] = bool if process_count == 1 else self.any_is_asked

    def now(self) -> float:
        """Return the seconds since the start; with several processes, at the last exchange."""
        return time.monotonic() - self.start if process_count == 1 else self.agreed

    def exchange_at_next_poll(self) -> None:
        """Exchange values at the next poll, before or after an operation that may be slow."""
        self.calls = 0
        self.soonest = 1

    def any_is_asked(self, here: str | None) -> bool:
        """Return whether any process had been asked to stop at the last exchange."""
        self.calls += 1
        if self.calls < self.soonest:
            return False
        before = self.agreed
        seconds = time.monotonic() - self.start
        report = torch.tensor([here is not None, seconds], dtype=torch.float64)
        dist.all_reduce(report, op=dist.ReduceOp.MAX)
        asked, self.agreed = report.tolist()
        seconds_per_call = (self.agreed - before) / self.calls
        self.soonest = min(MOST_CALLS, 1 + int(EXCHANGE / max(seconds_per_call, 1e-6)))
        self.calls = 0
        return bool(asked)
