"""Build optimizers, fused if possible, and step them with less overhead. Define decoupled_sgd."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

# private: the global optimizer hooks, which a lean step must check, torch 2.15
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from stoker.trainer import device as devices
from stoker.trainer import parallel
from stoker.trainer.combined import Combined, is_torchs, parts
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.groups import Groups, check_options, divided, scale_rates
from stoker.trainer.spans import is_profiled

# torch's optimizers that need whole matrices. All others work element by element.
OF_MATRICES = ("Muon", "Adafactor")

# What a Trainer accepts: a factory or an optimizer.
Given = Callable[..., Any] | torch.optim.Optimizer


def build(factory: Given, groups: Groups, device: torch.device, module: torch.nn.Module) -> Any:
    """Build the optimizer from the parameter groups, or check an optimizer instance.

    Raises:
        UserError: The factory rejects a value, or the optimizer does not work in this Trainer.
    """
    if isinstance(factory, torch.optim.Optimizer):
        check_ready(factory, module)
        optimizer: Any = factory
    else:
        optimizer = called(factory, groups, device, module)
    is_new = not optimizer.state
    for part in parts(optimizer):
        if isinstance(part, torch.optim.SGD) and is_new:
            begin_momentum(part)
    if hasattr(optimizer, "train"):  # a schedule-free optimizer has two sets of weights
        optimizer.train()
    return optimizer


def called(
    factory: Callable[..., Any], groups: Groups, device: torch.device, module: torch.nn.Module
) -> Any:
    """Return `factory(groups)`, fused if possible unless you set `fused` or `foreach`.

    Fused optimizers support dense floating-point parameters on some devices. Without rules and
    without weight decay, there is one group, because each group launches its own kernels.
    """
    settings = inspect.signature(factory).parameters
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:
        raise UserError(f"model: {type(module).__name__} has no parameters to train.")
    is_sharded = any(map(parallel.is_shard, parameters))
    is_sparse = any(getattr(child, "sparse", False) for child in module.modules())
    is_dense = not is_sparse and all(parameter.is_floating_point() for parameter in parameters)
    options: dict[str, Any] = {"module": module} if "module" in settings else {}
    ways = [settings[name].default for name in ("fused", "foreach") if name in settings]
    if ways == [None, None] and devices.has_fused(device) and is_dense and not is_sharded:
        options["fused"] = True
    decay = settings.get("weight_decay")
    is_lbfgs = "line_search_fn" in settings  # LBFGS supports only one group
    has_decay = decay.default != 0 if decay else not is_lbfgs
    if not has_decay and "name" not in groups[0]:  # without rules
        groups = [{"params": parameters}]
    try:
        scale_rates(groups, settings["lr"].default if "lr" in settings else None)
        as_ruled = [dict(group) for group in groups]  # copies: torch adds defaults to `groups`
        optimizer = factory(groups, **options)
    except UserError:
        raise
    except (ValueError, TypeError, IndexError) as error:  # torch rejects a value
        raise UserError(f"optimizer: {error}. Choose a different value.") from error
    for part in parts(optimizer):
        kind = type(part)
        if is_sharded and is_torchs(kind) and kind.__name__ in OF_MATRICES:
            raise UserError(
                f"strategy=fsdp: {kind.__name__} needs whole matrices, but each process holds "
                "only a shard of each. Type optimizer=adamw, or strategy=ddp."
            )
        trained = {parameter for group in part.param_groups for parameter in group["params"]}
        theirs = [group for group in as_ruled if not trained.isdisjoint(group["params"])]
        check_options(theirs, {*settings, *part.defaults})
    return optimizer


def check_ready(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Raise UserError if an optimizer instance has parameters that are not in the module.

    Some of the module's parameters may be missing. The current learning rates become the initial
    ones, whatever an earlier scheduler has recorded.
    """
    trained = set(module.parameters())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not trained.issuperset(parameters):
        kind = type(optimizer).__name__
        raise UserError(
            f"optimizer: this {kind} has parameters that do not belong to the Trainer's model "
            "(strategy=fsdp replaces a model's parameters).\n"
            f"Build it from the model, {kind}(model.parameters(), ...), or pass a factory: "
            f"optimizer=functools.partial({kind}, lr=...)."
        )
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)


def needs_closure(optimizer: Any) -> bool:
    """Return whether `optimizer.step` requires a closure that computes the loss, as in LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


@contextlib.contextmanager
def evaluated_weights(optimizer: Any) -> Iterator[None]:
    """Switch to the evaluation weights of an optimizer that has an `eval()` method.

    The training weights are restored exactly: `optimizer.train()` alone would round them.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p.detach().clone() for p in weights]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for weight, value in zip(weights, trained, strict=True):
                weight.copy_(value)


def begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Initialize the momentum of a fused SGD with 0, which does not change the results.

    Otherwise, if the fp16 scaler skips the first step, torch (2.15) uses uninitialized memory as
    momentum from then on. Sharded SGD gets its momentum too, so that a fused SGD can resume from
    its checkpoints even if a parameter has had no gradient yet.
    """
    groups = optimizer.param_groups
    if any(group["momentum"] and group["dampening"] and group["fused"] for group in groups):
        # torch does not apply dampening in the first step, but would if the momentum started at 0.
        # private: _step_supports_amp_scaling, whether the optimizer unscales fp16, torch 2.15
        optimizer._step_supports_amp_scaling = False
        for group in groups:
            group["fused"] = False
        return
    for group in groups:
        is_sharded = any(map(parallel.is_shard, group["params"]))
        if group["momentum"] and (group["fused"] or (is_sharded and not group["dampening"])):
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def make_capturable(optimizer: Any, device: torch.device) -> None:
    """Make learning rates tensors, so that each replay reads them, and count steps on the GPU."""
    if not optimizer.defaults.get("fused") and not optimizer.defaults.get("capturable"):
        raise UserError(
            f"compile=graph needs a fused optimizer, but {type(optimizer).__name__} is not fused.\n"
            "Type optimizer=adamw or optimizer=sgd, and remove fused=false if you set it."
        )
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:
            group["capturable"] = True


def lean_step(optimizer: Any, compiled: bool = False) -> Callable[[], Any]:
    """Return `optimizer.step` without the wrappers of torch.optim, which cost 30 us per step.

    The wrappers import torch's compiler (one second), call hooks, and record a name for the
    profiler. If there are hooks or a profiler, or if `step` was replaced (torch's schedulers do
    this), the returned function calls `optimizer.step` instead.
    """
    kind = type(optimizer)
    is_known = is_torchs(kind) or kind is Combined
    if compiled or not is_known or optimizer.defaults.get("differentiable"):
        step: Callable[[], Any] = optimizer.step
        return step
    bare = inspect.unwrap(kind.step)

    def lean() -> None:
        if (
            optimizer._optimizer_step_pre_hooks  # private: no other way to find hooks, torch 2.15
            or optimizer._optimizer_step_post_hooks  # private: the same
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or is_profiled()
            or "step" in vars(optimizer)
        ):
            optimizer.step()
            return
        with torch.no_grad():
            bare(optimizer)

    return lean


def zero_grad(optimizer: Any, unoptimized: Iterable[torch.Tensor] = ()) -> None:
    """Drop the gradients of the optimizer's parameters, without the wrappers of torch.optim.

    Also drop those of `unoptimized`, the parameters without an optimizer, whose gradients would
    otherwise accumulate from step to step.
    """
    for parameter in unoptimized:
        parameter.grad = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def decoupled_sgd(
    params: Groups,
    lr: float,
    batch_size: int,
    momentum: float = 0.85,
    weight_decay: float = 0.0153,
    bias_scale: float = 64.0,
    fused: bool | None = None,
    foreach: bool | None = None,
) -> torch.optim.SGD:
    """Build SGD with Nesterov momentum from a learning rate and a weight decay per 1,024 samples.

    Source: Jordan 2024, arXiv 2404.00498, section 3.4.

    Args:
        params: Parameter groups.
        lr: How far 1,024 samples with a gradient of 1 move a weight, regardless of the batch size
            and the momentum.
        batch_size: Samples per step.
        momentum: The momentum of SGD.
        weight_decay: The fraction by which 1,024 samples shrink a weight, regardless of the
            learning rate.
        bias_scale: The factor for the learning rate of biases and norm weights, which have one
            dimension. Their weight decay is not scaled.
        fused: As for torch.optim.SGD.
        foreach: As for torch.optim.SGD.
    """
    check_number("optimizer.lr", lr, above=0)
    check_number("optimizer.batch_size", batch_size, whole=True, least=1)
    check_number("optimizer.momentum", momentum, above=0, most=0.999)
    check_number("optimizer.weight_decay", weight_decay, least=0)
    check_number("optimizer.bias_scale", bias_scale, above=0)
    # The loss is a mean over the batch, so multiply by the batch size. Momentum applies
    # each gradient many times, so divide by the paper's factor for this.
    per_step = batch_size / 1024 / (1 + 1 / (1 - momentum))
    groups = []
    for group in params:
        decay = group.get("weight_decay", weight_decay) * per_step
        rate = group.get("lr", lr) * per_step
        matrices, vectors = divided(group, lambda parameter: parameter.ndim > 1)
        for divisions, scale in ((matrices, 1.0), (vectors, bias_scale)):
            # torch multiplies the decay by the learning rate.
            settings = {"lr": rate * scale, "weight_decay": decay / (rate * scale)}
            groups += [{**division, **settings} for division in divisions]
    return torch.optim.SGD(
        groups,
        lr=lr * per_step,
        momentum=momentum,
        nesterov=True,
        fused=fused,
        foreach=foreach,
    )
