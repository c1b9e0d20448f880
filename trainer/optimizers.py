"""Build optimizers in their fused form, step them with less overhead; decoupled_sgd."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

# private: the global optimizer hooks, which a lean step has to check, torch 2.15
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from stoker.trainer import device as devices
from stoker.trainer import parallel
from stoker.trainer.combined import Combined, parts
from stoker.trainer.errors import UserError, check_number
from stoker.trainer.groups import Groups, check_options, scale_rates

# The torch optimizers that need whole matrices. The others work element by element.
OF_MATRICES = ("Muon", "Adafactor")

# what a Trainer takes: a factory or an optimizer
Given = Callable[..., Any] | torch.optim.Optimizer


def build(
    factory: Given,
    groups: Groups,
    device: torch.device,
    module: torch.nn.Module | None = None,
) -> Any:
    """Return `factory(groups)`, in its fused form if there is one and you did not choose another.

    A ready-made optimizer of the module's parameters is returned as it is.

    Fused forms are for dense floating-point parameters on some devices. Groups with equal settings
    in the end become one, since each costs a step of its own.

    Raises:
        UserError: The factory refuses a value, or the optimizer does not work in this Trainer.
    """
    if isinstance(factory, torch.optim.Optimizer):
        assert module is not None
        check_ready(factory, module)
        begin_training(factory)
        return factory
    settings = inspect.signature(factory).parameters
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:
        raise UserError(f"model: {type(module).__name__} has no parameters to train.")
    is_sharded = any(map(parallel.is_shard, parameters))
    options: dict[str, Any] = {"module": module} if "module" in settings else {}
    if is_choice_open(settings) and devices.has_fused(device) and not is_sharded:
        is_sparse = module is not None and any(
            getattr(m, "sparse", False) for m in module.modules()
        )
        if not is_sparse and all(p.is_floating_point() for p in parameters):
            options["fused"] = True
    kind = getattr(factory, "func", factory)
    is_lbfgs = isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS)
    if is_lbfgs and len(groups) == 2 and "name" not in groups[0]:
        groups = [{"params": parameters}]  # LBFGS has no decay, and takes a single group
    scale_rates(groups, settings["lr"].default if "lr" in settings else None)
    as_ruled = [dict(group) for group in groups]  # torch adds an optimizer's defaults to its groups
    try:
        optimizer = factory(groups, **options)
    except UserError:
        raise
    except (ValueError, TypeError, IndexError) as error:  # torch rejects a value
        raise UserError(f"optimizer: {error}. Choose a different value.") from error
    if is_sharded:
        check_sharded(optimizer)
    for part in parts(optimizer):
        trained = {parameter for group in part.param_groups for parameter in group["params"]}
        theirs = [group for group in as_ruled if not trained.isdisjoint(group["params"])]
        check_options(theirs, {*settings, *part.defaults})
    if not isinstance(optimizer, Combined):
        merge(optimizer.param_groups, groups)
    for part in parts(optimizer):
        if isinstance(part, torch.optim.SGD):
            begin_momentum(part, is_sharded)
    begin_training(optimizer)
    return optimizer


def check_ready(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    """Raise UserError for an optimizer, made before the Trainer, that would not train the module.

    It may have a part of the parameters only. Its rates are as they are now,
    whatever another scheduler began with.
    """
    trained = set(module.parameters())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not trained.issuperset(parameters):
        kind = type(optimizer).__name__
        raise UserError(
            f"optimizer: this {kind} has parameters that do not belong to the Trainer's model "
            "(strategy=fsdp replaces them).\n"
            f"Build it from the model, {kind}(model.parameters(), ...), or pass a factory: "
            f"optimizer=functools.partial({kind}, lr=...)."
        )
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
    if isinstance(optimizer, torch.optim.SGD) and not optimizer.state:
        begin_momentum(optimizer, is_sharded=False)


def is_choice_open(settings: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a factory takes `fused` and `foreach` and neither was chosen."""
    return all(name in settings and settings[name].default is None for name in ("fused", "foreach"))


def check_sharded(optimizer: Any) -> None:
    """Raise UserError for an optimizer that `strategy=fsdp` does not work with."""
    for kind in map(type, parts(optimizer)):
        if is_torchs(kind) and kind.__name__ in OF_MATRICES:
            raise UserError(
                f"strategy=fsdp: {kind.__name__} needs whole matrices, but each process holds "
                "only a part of them. Type optimizer=adamw, or strategy=ddp."
            )


def needs_closure(optimizer: Any) -> bool:
    """Return whether a step evaluates the loss itself, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def begin_training(optimizer: Any) -> None:
    """Put an optimizer with two sets of weights (schedule-free) where its steps are taken."""
    if hasattr(optimizer, "train"):
        optimizer.train()


@contextlib.contextmanager
def evaluated_weights(optimizer: Any) -> Iterator[None]:
    """Give the model the weights that an optimizer with an `eval()` evaluates with.

    Afterwards it has the same bits as before: its `train()` alone would round.
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


def is_torchs(kind: type) -> bool:
    """Return whether this is one of torch's own optimizers."""
    return f"{kind.__module__}.".startswith("torch.optim.")


def merge(built: Groups, given: Groups) -> None:
    """Join groups with the same settings, if the factory took the groups as given."""
    taken = [list(map(id, group["params"])) for group in built]
    if taken != [list(map(id, group["params"])) for group in given]:
        return
    merged: Groups = []
    for group in built:
        for first in merged:
            if {**first, "params": None} == {**group, "params": None}:
                first["params"] += group["params"]
                break
        else:
            merged.append(group)
    built[:] = merged


def begin_momentum(optimizer: torch.optim.SGD, is_sharded: bool) -> None:
    """Give a fused SGD its momentum, 0 before the first step, which makes the same numbers.

    If the fp16 scaler skips that step, torch (2.15) takes unwritten memory for the momentum from
    then on. A sharded SGD gets it too, or a fused one could not go on from its state where a
    parameter had no gradient yet.
    """
    groups = optimizer.param_groups
    if any(group["momentum"] and group["dampening"] and group["fused"] for group in groups):
        # torch does not apply dampening in the first step; starting from 0 would apply it.
        # private: _step_supports_amp_scaling, says whether the optimizer unscales fp16, torch 2.15
        optimizer._step_supports_amp_scaling = False
        for group in groups:
            group["fused"] = False
        return
    for group in groups:
        if group["momentum"] and (group["fused"] or (is_sharded and not group["dampening"])):
            for parameter in group["params"]:
                momentum = torch.zeros_like(parameter)
                optimizer.state[parameter]["momentum_buffer"] = momentum


def make_capturable(optimizer: Any, device: torch.device) -> None:
    """Make the rates tensors, which a graph reads at each replay, and count steps on the device."""
    if not optimizer.defaults.get("fused") and not optimizer.defaults.get("capturable"):
        raise UserError(
            f"compile=graph: {type(optimizer).__name__} is not fused. "
            "Leave fused out, and type optimizer=adamw or sgd."
        )
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", float(group["lr"]))
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group:
            group["capturable"] = True


def lean_step(optimizer: Any, compiled: bool = False) -> Callable[[], Any]:
    """Return `optimizer.step` without the wrappers of torch.optim, which cost 30 us per step.

    They import torch's compiler (a second), call hooks, and record a name for the profiler. If
    anybody listens, or has replaced `step` as torch's schedules do, this is `optimizer.step`.
    """
    kind = type(optimizer)
    is_known = is_torchs(kind) or kind is Combined
    if compiled or not is_known or optimizer.defaults.get("differentiable"):
        step: Callable[[], Any] = optimizer.step
        return step
    bare = inspect.unwrap(kind.step)

    def lean() -> None:
        if (
            optimizer._optimizer_step_pre_hooks  # private: the only way to find hooks, torch 2.15
            or optimizer._optimizer_step_post_hooks  # private: the same
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            # private: whether a profiler is running, torch 2.15
            or torch.autograd._profiler_enabled()
            or "step" in vars(optimizer)
        ):
            optimizer.step()
            return
        with torch.no_grad():
            bare(optimizer)

    return lean


def zero_grad(optimizer: Any, unoptimized: Iterable[torch.Tensor] = ()) -> None:
    """Drop the gradients of the optimizer's parameters, without the wrappers of torch.optim.

    `unoptimized` are parameters that no optimizer has. Their gradients would add up over the steps.
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
    """Build SGD with Nesterov momentum from a rate and a decay per 1,024 samples.

    Source: Jordan 2024, arXiv 2404.00498, section 3.4.

    Args:
        params: Parameter groups.
        lr: How far 1,024 samples of the same gradient move a weight, whatever the batch size and
            the momentum are.
        batch_size: Samples per step.
        momentum: Share of the last update in the next one.
        weight_decay: Share by which 1,024 samples shrink a weight, whatever the rate is.
        bias_scale: Factor on the rate of biases and the weights of norms (one dimension), which
            have the same decay.
        fused: As for torch.optim.SGD.
        foreach: As for torch.optim.SGD.
    """
    check_number("optimizer.lr", lr, above=0)
    check_number("optimizer.batch_size", batch_size, whole=True, least=1)
    check_number("optimizer.momentum", momentum, above=0, most=0.999)
    check_number("optimizer.weight_decay", weight_decay, least=0)
    check_number("optimizer.bias_scale", bias_scale, above=0)
    # The loss is a mean over the batch, and momentum repeats its gradient (as the paper counts it).
    per_step = batch_size / 1024 / (1 + 1 / (1 - momentum))
    groups = []
    for group in params:
        decay = group.get("weight_decay", weight_decay) * per_step
        rate = group.get("lr", lr) * per_step
        matrices = [p for p in group["params"] if p.ndim > 1]
        vectors = [p for p in group["params"] if p.ndim <= 1]
        for parameters, scale in ((matrices, 1.0), (vectors, bias_scale)):
            if parameters:
                # torch multiplies the decay by the learning rate.
                settings = {"lr": rate * scale, "weight_decay": decay / (rate * scale)}
                groups.append({**group, **settings, "params": parameters})
    return torch.optim.SGD(
        groups,
        lr=lr * per_step,
        momentum=momentum,
        nesterov=True,
        fused=fused,
        foreach=foreach,
    )
