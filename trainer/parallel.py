"""The only file that knows strategies: single, dp (torch.nn.DataParallel), ddp and fsdp (one process a device)."""

import contextlib
import contextvars
import datetime
import math
import re
import time
import warnings

import torch
import torch.distributed as dist
from stoker.trainer import batch as batches
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError, log
from stoker.trainer.settings import check_strategy

NOTHING = contextlib.nullcontext()
NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
# Parameters of a block that fsdp gathers by itself, at least: smaller ones are gathered with what is around them.
BLOCK = 2**20
alone = contextvars.ContextVar(
    "alone", default=False
)  # whether a Trainer made here trains nothing, with nobody
joined = 1  # processes that train together, once `start` has joined them
# By how much the norm of a weight may differ between processes, which may be of different machines.
DRIFT = 1e-4
EXCHANGE = 0.25  # seconds between two exchanges of what the ranks were asked
MOST_CALLS = 64  # steps between two: the next ones may be slow


def start(strategy, device, timeout=300):
    """Joins the other processes, where torchrun has started several; gives the strategy, with what `auto` means.

    A process waits at most `timeout` seconds for the others. UserError for a strategy of one process among several.
    """
    name, listed = check_strategy(strategy)
    if launch.world_size() == 1 or alone.get():
        return "single" if name == "auto" else strategy
    if name in ("single", "dp") or listed:
        raise UserError(
            f"strategy={strategy}: {launch.world_size()} processes were started, and each would train by itself.\n"
            "Type strategy=auto, or python train.py without torchrun."
        )
    global joined
    if not dist.is_initialized():
        backend = (
            "gloo"
            if device.type == "cpu"
            else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        )
        dist.init_process_group(
            backend,
            store=launch.store(timeout),
            rank=launch.rank(),
            world_size=launch.world_size(),
            timeout=datetime.timedelta(seconds=timeout),
        )
    joined = dist.get_world_size()
    return "ddp" if name == "auto" else name


def leave():
    """Takes leave of the other processes, at the end of a run that went well."""
    global joined
    if dist.is_initialized():
        dist.destroy_process_group()
        joined = 1


def ranks():
    """How many processes train together here."""
    return joined


def wrap(module, strategy, device):
    """The module as it is called in training: itself for `single`, what spreads its work out for the others.

    `dp` takes all visible GPUs, `dp:0+2` those listed; with fewer than two it is the module itself. `ddp` has the whole
    module in each process, `fsdp` a part of each parameter, in place. State dicts are taken from the module itself and
    never carry a `module.` prefix. The statistics of BatchNorm are those of the batch over all processes.
    """
    name, listed = check_strategy(strategy)
    if name == "single":
        return module
    if name == "dp":
        return replicated(module, strategy, device, listed)
    if ranks() == 1:
        log.warning("strategy=%s: one process, so it changes nothing.", name)
        return module
    unwrap(module)  # of a Trainer before this one
    if any(map(is_shard, module.parameters())):
        raise UserError(
            f"strategy={strategy}: a Trainer before this one has cut the model up.\n"
            "Build it anew, and give it the weights of a checkpoint if it is to have them."
        )
    for child in module.modules():
        if any(
            torch.nn.parameter.is_lazy(tensor)
            for tensor in [*child.parameters(False), *child.buffers(False)]
        ):
            what = (
                f"{type(child).__name__} has no weights yet that could be the same on all processes"
            )
            raise UserError(
                f"strategy={strategy}: {what}.\nCall the model with a batch before the Trainer gets it."
            )
    take_from_first([*module.parameters(), *module.buffers()])
    spread = sharded(module, device) if name == "fsdp" else copied(module, device)
    spread_norms(module)  # last: DistributedDataParallel takes no SyncBatchNorm on the CPU
    return spread


def copied(module, device):
    """The module in DistributedDataParallel, if it has anything to train."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    ids = None if device.type == "cpu" else [device.index]
    # With find_unused_parameters the buckets stay what they are after the first step. Otherwise a run that goes on adds
    # gradients up in another order: off by 7e-9 from three processes on.
    with (
        warnings.catch_warnings()
    ):  # torch 2.15 has a new name for broadcast_buffers, which 2.10 does not know
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.parallel.DistributedDataParallel(
            module,
            device_ids=ids,
            broadcast_buffers=bool(own_buffers(module)),  # rank 0 has its way, as in a checkpoint
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
        )


def replicated(module, strategy, device, listed):
    """The module in torch.nn.DataParallel, if there are two GPUs for it."""
    count = torch.accelerator.device_count() if device.type != "cpu" else 0
    indices = listed or list(range(count))
    missing = [index for index in indices if not 0 <= index < count]
    if missing:
        raise UserError(
            f"strategy={strategy}: there is no GPU {missing[0]}; this run sees {count} on {device.type}.\n"
            "Type strategy=single or strategy=dp."
        )
    if len(indices) < 2:
        log.warning(
            "strategy=dp: %s, so it changes nothing.", "one GPU" if count else "no GPU in this run"
        )
        return module
    if device.index not in indices:
        raise UserError(
            f"strategy={strategy}: device={device} is not among its GPUs.\nType device={device.type}:{indices[0]}."
        )
    if module._compiled_call_impl is not None:
        raise UserError(
            f"strategy={strategy}: replicas cannot be compiled. Type compile=false or strategy=single."
        )
    # DataParallel gathers on its first device, which has to be the one that holds the parameters.
    return torch.nn.DataParallel(
        module, device_ids=sorted(indices, key=lambda index: index != device.index)
    )


def sharded(module, device):
    """The module, its parameters cut up over the processes (FSDP2, Zhao 2023, arXiv 2304.11277).

    Gathered together are the elements of each Sequential and ModuleList with at least BLOCK parameters, and then the
    rest.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    check_shardable(module)
    module.to(memory_format=torch.contiguous_format)  # it takes no other
    mesh = init_device_mesh(device.type, (launch.world_size(),))
    lists = [
        child
        for child in module.modules()
        if isinstance(child, (torch.nn.Sequential, torch.nn.ModuleList))
    ]
    try:
        for part in [part for parts in reversed(lists) for part in parts]:  # the inner ones first
            if sum(p.numel() for p in part.parameters() if not is_shard(p)) >= BLOCK:
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        # The root too, or it would stay gathered after an evaluation, and what EMA puts into its shards be ignored.
        root = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"strategy=fsdp: {str(error).rstrip('.')}.\nType strategy=ddp.") from error
    if own_buffers(module):
        root.register_forward_pre_hook(follow_first)
    return root


def check_shardable(module):
    """UserError for a module that fully_shard would refuse later, without a word on what to do."""
    if module._compiled_call_impl is not None:
        raise UserError(
            "strategy=fsdp: sharded parameters are not compiled. Type compile=false or strategy=ddp."
        )
    types = {str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.requires_grad}
    if len(types) > 1:
        what = f"{type(module).__name__} has weights of {' and '.join(sorted(types))}, and shards are of one type"
        raise UserError(f"strategy=fsdp: {what}. Type strategy=ddp.")
    for child in module.modules():
        if getattr(child, "sparse", False):
            what = f"{type(child).__name__}(sparse=True) has gradients that cannot be cut up"
            raise UserError(f"strategy=fsdp: {what}. Leave out sparse, or type strategy=ddp.")


def has_usual_forward(child):
    """Whether this is a BatchNorm with torch's own forward."""
    return isinstance(child, NORMS) and type(child).forward in (
        torch.nn.BatchNorm1d.forward,
        OverRanks.forward,
    )


def own_buffers(module):
    """The floating-point buffers that may come to differ between processes: those of BatchNorm over all do not."""
    children = [child for child in module.modules() if not has_usual_forward(child)]
    return [
        buffer
        for child in children
        for buffer in child.buffers(recurse=False)
        if buffer.is_floating_point()
    ]


def follow_first(module, _):
    """Gives all processes the buffers of rank 0 before a forward, as DistributedDataParallel does."""
    take_from_first(own_buffers(module))


def take_from_first(tensors):
    """Gives all processes the values that these tensors have on rank 0."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), 0)


class SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all processes. So is its derivative: each has a part of the loss."""

    @staticmethod
    def forward(ctx, tensor):
        return add_up_in_place(tensor.clone())

    @staticmethod
    def backward(ctx, gradient):
        return add_up_in_place(gradient.clone())


def add_up_in_place(tensor):
    dist.all_reduce(tensor)
    return tensor


class OverRanks(torch.nn.SyncBatchNorm):
    """BatchNorm over the batch of all processes; torch's own, but on the CPU, which that has no kernels for."""

    def forward(self, inputs):
        if not self.training or not dist.is_initialized():
            return torch.nn.modules.batchnorm._BatchNorm.forward(self, inputs)
        if inputs.device.type != "cpu":
            return super().forward(inputs)
        dims = [dim for dim in range(inputs.ndim) if dim != 1]
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        own = wide.new_tensor([inputs.numel() / inputs.shape[1]])
        count, total = SumOverRanks.apply(torch.cat([own, wide.sum(dims)])).split(
            [1, inputs.shape[1]]
        )
        if count.item() == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {inputs.shape}"
            )
        mean = total / count
        centred = wide - mean.view(shape)
        variance = SumOverRanks.apply((centred**2).sum(dims)) / count
        if self.track_running_stats:
            self.num_batches_tracked += 1
            momentum = (
                1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            )
            with torch.no_grad():
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * count / (count - 1), momentum)
        scaled = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            scaled = scaled * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(inputs.dtype)


made = {}  # {a class with OverRanks's forward: the class it stands for}


def spread_norms(module):
    """Gives each BatchNorm the statistics of the batch over all processes; those with a `forward` of their own keep it.

    The classes keep their names: they stand in the card of the model.
    """
    for child in module.modules():
        kind = type(child)
        if isinstance(child, NORMS) and not has_usual_forward(child):
            log.warning(
                "%s has a forward of its own: its statistics are of each process's part.",
                kind.__name__,
            )
        if not has_usual_forward(child):
            continue
        if kind not in made.values():
            made[type(kind.__name__, (OverRanks, kind), {})] = kind
        child.process_group = None
        child.__class__ = next(over for over, plain in made.items() if plain is kind)


def unwrap(module):
    """Undoes what `wrap` has done to BatchNorm: the module may live on by itself."""
    for child in module.modules():
        child.__class__ = made.get(type(child), type(child))


def plain_text(module):
    """The module as Python prints it, without what `wrap` has done to it."""
    return re.sub(r"\bFSDP(?=\w+\()", "", str(module))


def description(trainer):
    """', 16 on each of 4 processes (ddp)' for the plan, '' for one process."""
    if ranks() == 1:
        return ""
    size = getattr(trainer.train_loader, "batch_size", None)
    each = f", {math.ceil(size / ranks())} on each of" if size else " dealt out to"
    return f"{each} {ranks()} processes ({trainer.strategy})"


def replicas(model):
    """The indices of the GPUs that hold a replica; none where there is one device."""
    return (
        tuple(getattr(model, "device_ids", None) or ())
        if isinstance(model, torch.nn.DataParallel)
        else ()
    )


def gradient_sync(model, *, enabled):
    """A context in which backward passes exchange gradients, or do not: only the last micro-batch of a step has to."""
    if joined == 1:
        return NOTHING
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(enabled)
    elif not enabled and isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.no_sync()
    return NOTHING


def same_weights(model):
    """Gives all processes the weights and buffers of rank 0, where each has all of them."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        take_from_first([*model.module.parameters(), *model.module.buffers()])


def check_same_weights(model):
    """TrainingError where the processes have other weights than each other, although each has all of them.

    What bypasses the model that is called in a step, such as a loss of `self.module(inputs)`, has gradients of its own
    on each process, and nothing else would ever say so.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return
    names, weights = zip(*model.module.named_parameters(), strict=True)
    with torch.no_grad():
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(weights)]).cpu()
    extremes = torch.cat([norms, -norms])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    most, least = extremes[: len(names)], -extremes[len(names) :]
    for name, apart in zip(names, (most - least > DRIFT * most).tolist(), strict=True):
        if apart:
            raise TrainingError(
                f"The weights of {name} are not the same on all processes: their gradients were not exchanged.\n"
                "A step has to call self.model, the whole of it and once for each backward(), not self.module."
            )


def explain(error):
    """A UserError for what torch cannot do with sharded parameters, or for a step that DistributedDataParallel cannot
    follow; None for anything else."""
    text = str(error)
    if ranks() > 1 and (
        "DTensor" in text or "sharding strategy" in text or "Sharding propagation" in text
    ):
        return UserError(
            f"strategy=fsdp: torch cannot do this with sharded parameters ({text.splitlines()[0][:150]}).\n"
            "Type strategy=ddp, or another optimizer if it is that. A step has to call self.model, not parts of it."
        )
    if "mark a variable ready only once" in text or "marked as ready twice" in text:
        return UserError(
            "strategy=ddp: a parameter has had two gradients in one backward().\n"
            "A step has to call self.model, the whole of it and once for each backward(), not self.module."
        )
    return None


def add_up(value):
    """The sum over all processes of a number, or of a tensor; of None too, where this process has nothing to add."""
    if ranks() == 1:
        return value
    if isinstance(value, (int, float)):
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return type(value)(total.item())
    # A rank that has none has to know what the others have: the number of dimensions, float64 or int64, the sizes.
    form = torch.zeros(8, dtype=torch.int64)
    if value is not None:
        form[:2] = torch.tensor([value.ndim + 1, value.is_floating_point()])
        form[2 : 2 + value.ndim] = torch.tensor(value.shape)
    dist.all_reduce(form, op=dist.ReduceOp.MAX)
    if not form[0]:
        return None
    if value is None:
        value = torch.zeros(
            form[2 : 1 + form[0]].tolist(), dtype=torch.float64 if form[1] else torch.int64
        )
    total = value.detach().cpu().clone()
    dist.all_reduce(total)
    return total.to(value.device)


def gather(outputs, sizes):
    """The (N, ...) outputs for all samples in their order, from each process's, dealt out of batches of these sizes."""
    if ranks() == 1:
        return outputs
    most = sum(math.ceil(size / ranks()) for size in sizes)  # rank 0 has so many
    padded = outputs.new_zeros(most, *outputs.shape[1:])
    padded[: len(outputs)] = outputs
    parts = [torch.empty_like(padded) for _ in range(ranks())]
    dist.all_gather(parts, padded)
    whole, start = outputs.new_empty(sum(sizes), *outputs.shape[1:]), 0
    taken = [0] * ranks()
    for size in sizes:
        for rank, part in enumerate(parts):
            count = len(range(rank, size, ranks()))
            whole[start + rank : start + size : ranks()] = part[taken[rank] : taken[rank] + count]
            taken[rank] += count
        start += size
    return whole


def check_sampler(loader):
    """UserError for a loader that deals out by itself."""
    if isinstance(getattr(loader, "sampler", None), torch.utils.data.DistributedSampler):
        raise UserError(
            "DistributedSampler: the Trainer deals each batch out to the processes itself.\n"
            "Give a DataLoader without it, with the whole batch_size."
        )


def check_parts(metrics, loss):
    """UserError for a metric that cannot be added up over processes, where there are several.

    A warning for a loss whose mean is not over samples.
    """
    if ranks() > 1 and getattr(loss, "weight", None) is not None:
        log.warning(
            "loss: by class weights each process has the mean of its own part; one process would have another."
        )
    from stoker.trainer.metrics import Sums

    for name, metric in metrics.items() if ranks() > 1 else ():
        if not isinstance(metric, Sums) and not hasattr(metric, "sync_on_compute"):
            raise UserError(
                f"metrics.{name}: {type(metric).__name__} is not added up over {ranks()} processes.\n"
                "Derive it from torchmetrics.Metric or stoker.trainer.metrics.Sums, or leave it out."
            )


def deal(batch):
    """(the number of samples in a batch, this process's part of it)."""
    return batches.size(batch), batches.deal(batch, launch.rank(), launch.world_size())


def shares(batch, loader):
    """((the most and the fewest samples that a process has of this batch), the weight of its mean in that over all).

    Nothing and 1 for one process. What else there is was the loader's last batch.
    """
    if joined == 1:
        return None, 1.0
    whole = loader.global_size
    if whole < ranks():
        raise UserError(
            f"A batch of {whole} samples is too small for {ranks()} processes.\nType another batch_size."
        )
    return (math.ceil(whole / ranks()), whole // ranks()), batches.size(batch) * ranks() / whole


def counts(loader):
    """Whether this process has a part of the loader's last batch. If not, it was lent a sample of it."""
    return joined == 1 or launch.rank() < loader.global_size


def is_shard(tensor):
    """Whether a tensor is one of those that `fsdp` has cut up."""
    return dist.is_initialized() and isinstance(tensor, shard_type())


def shard_type():
    from torch.distributed.tensor import DTensor  # 0.3 s, for those who need it

    return DTensor


def local(tensors):
    """The parts of tensors that this process has: themselves, where they are not cut up. What is done to them stays."""
    return [tensor.to_local() if is_shard(tensor) else tensor for tensor in tensors]


def whole(tensor):
    """The tensor, put together where it is cut up: all processes have to ask."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def like(tensor, own):
    """A whole tensor, cut up as `own` is; without asking the other processes."""
    if not is_shard(own) or is_shard(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(own.device)
    return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)


class Agreement:
    """What all processes have to know alike: whether one of them was asked to stop, and what time it is.

    It is asked as often by each: after each step, and before each batch of an evaluation. About every EXCHANGE seconds
    they tell each other; between that, nobody was asked, and no time goes by.
    """

    def __init__(self):
        self.start = self.last = time.monotonic()
        self.agreed, self.calls, self.soonest = 0.0, 0, 1
        if joined == 1:  # one process alone asks nobody
            self.is_asked = bool

    def now(self):
        """Seconds since the beginning, by the slowest clock."""
        return time.monotonic() - self.start if ranks() == 1 else self.agreed

    def soon(self):
        """Has the next question answered by an exchange: what comes now may take longer than what was before."""
        self.calls, self.soonest = 0, 1

    def is_asked(self, here):
        """Whether any process was asked to stop, this one or not, as far as all know of it."""
        self.calls += 1
        if self.calls < self.soonest:
            return False
        now = time.monotonic()
        told = torch.tensor(
            [here is not None, now - self.start, (now - self.last) / self.calls],
            dtype=torch.float64,
        )
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        asked, self.agreed, seconds = told.tolist()
        self.last, self.calls = time.monotonic(), 0
        self.soonest = min(MOST_CALLS, 1 + int(EXCHANGE / max(seconds, 1e-6)))
        return bool(asked)
