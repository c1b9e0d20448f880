"""Compare a state with the part of a training that it is for, before anything is loaded."""

import collections
import contextlib
import copy
import inspect
import math
from typing import Any, NoReturn

import torch

from stoker.trainer import launch
from stoker.trainer.combined import parts
from stoker.trainer.errors import UserError, first_few

# How an optimizer works, not what it computes: a GPU's checkpoint has others than the CPU needs.
WAYS = ("foreach", "fused", "capturable")
ANYTHING = object()


def check(part: Any, state: Any, name: str) -> None:
    """Compare the state of a part of a training with the part; change nothing.

    The state of a part that makes its own form of it (a custom optimizer, say) is not looked into.

    Raises:
        UserError: The state is another part's, or one that no training has written.
    """
    if isinstance(part, torch.optim.Optimizer):
        if has_usual_state(part):
            check_optimizer(part, state, name)
    elif isinstance(part, torch.nn.Module):
        like = part.state_dict()
        for key, value in like.items():
            if not isinstance(value, torch.Tensor):
                like[key] = ANYTHING
        check_like(state, like, name)
    elif isinstance(part, torch.amp.GradScaler):
        check_scaler(part, state, name)
    elif name in ("train_loss", "grad_norm"):
        # nan: the mean of a diverged training is not finite.
        check_like(state, {"total": math.nan, "samples": 0, "weight": 0.0}, name)
    elif name == "scheduler":
        check_scheduler(part, state, name)
    elif name == "micro_batch":
        check_like(state, part.state_dict(), name)


def frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained, each name of a shared one."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: list[str]) -> None:
    """Freeze the parameters of these names, and train all others."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in names)


def warn_of_frozen(module: torch.nn.Module, before: list[str]) -> None:
    """Warn of the parameters that a checkpoint has frozen, or that are trained again."""
    now = frozen(module)
    changes = {"frozen": set(now) - set(before), "trained again": set(before) - set(now)}
    for change, names in changes.items():
        if names:
            verb = "is" if len(names) == 1 else "are"
            shown_names = first_few(sorted(names), 3)
            launch.warn(f"Restored from the checkpoint: {shown_names} {verb} {change}.")


def check_frozen(module: torch.nn.Module, names: list[Any]) -> None:
    """Raise UserError unless these are names of parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        require(isinstance(name, str) and name in parameters, name, "a parameter's name", "frozen")


def check_like(state: Any, like: Any, name: str) -> None:
    """Compare a nesting with one of the right form: keys, lengths, shapes, numbers for numbers.

    Raises:
        UserError: They differ; it names the place.
    """
    if isinstance(like, torch.Tensor):
        if not torch.nn.parameter.is_lazy(like) and not is_like_tensor(state, like):
            refuse(state, shown(like), name)
    elif isinstance(like, dict):
        require(isinstance(state, dict), state, "a dict", name)
        for key in [*like, *state]:
            place = f"{name}.{str(key)[:80]}"
            if key not in state:
                refuse("missing", None, place)
            if key not in like:
                refuse("there", None, place)
            check_like(state[key], like[key], place)
    elif isinstance(like, (list, tuple)):
        fits = isinstance(state, (list, tuple)) and len(state) == len(like)
        require(fits, state, f"a list of {len(like)}", name)
        for i, item in enumerate(like):
            check_like(state[i], item, f"{name}.{i}")
    elif isinstance(like, bool):
        require(isinstance(state, bool), state, "true or false", name)
    elif isinstance(like, str):
        require(isinstance(state, str), state, "a text", name)
    elif isinstance(like, (int, float)):
        fits = is_number(state, finite=math.isfinite(like))
        require(fits, state, "a number", name)
    elif like is None:
        fits = state is None or isinstance(state, bool) or is_number(state)
        require(fits, state, "null or a number", name)


def is_like_tensor(state: Any, like: torch.Tensor) -> bool:
    """Return whether this is a tensor of the same shape, floating-point if the other is."""
    return (
        isinstance(state, torch.Tensor)
        and state.shape == like.shape
        and state.is_floating_point() == like.is_floating_point()
    )


def check_scheduler(scheduler: Any, state: Any, name: str) -> None:
    """Raise UserError for the state of another scheduler, or of torch's with other settings."""
    like = scheduler.state_dict()
    kind = type(scheduler).__name__
    if isinstance(state, dict) and set(state) != set(like):
        raise UserError(f"The checkpoint was written with another scheduler than {kind}.")
    check_like(state, like, name)
    for key in inspect.signature(type(scheduler)).parameters:
        if key == "last_epoch" or key not in like:
            continue
        if state[key] != like[key]:
            raise UserError(
                f"The checkpoint's {kind} has {key}={state[key]}, and this one {like[key]}: "
                "torch's schedules keep what they began with.\nType the settings and epochs of "
                "then, or begin with scheduler=cosine, which can be made longer."
            )
    for key in ("given", "base_lrs"):  # of a Schedule, and of torch's
        if state.get(key) != like.get(key):
            before = ", ".join(f"{rate:g}" for rate in state[key])
            now = ", ".join(f"{rate:g}" for rate in like[key])
            raise UserError(
                f"The checkpoint was written with the learning rate {before}; this fit has {now}.\n"
                f"Set it to {before} to resume. To change it from here on, call "
                f"trainer.set_lr({now}) in on_fit_start."
            )


def check_scaler(scaler: torch.amp.GradScaler, state: Any, name: str) -> None:
    """Raise UserError for numbers that no scaler has; a disabled one loads none."""
    if not scaler.is_enabled():
        return
    like = scaler.state_dict()
    check_like(state, like, name)
    for key, value in like.items():
        kind = type(value)
        may_be_0 = key == "_growth_tracker"
        fits = type(state[key]) is kind and (state[key] > 0 or (may_be_0 and not state[key]))
        require(fits, state[key], f"a {kind.__name__} above 0", f"{name}.{key}")


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any, name: str) -> None:
    """Compare a state of torch's form; torch itself compares only the numbers of parameters."""
    like = optimizer.state_dict()
    groups = like["param_groups"]
    form = {"state": ANYTHING, "param_groups": [ANYTHING] * len(groups)}
    check_like(state, form, name)
    for i, group in enumerate(groups):
        check_group(state["param_groups"][i], group, f"{name}.param_groups.{i}")
    require(
        isinstance(state["state"], dict),
        state["state"],
        "a dict",
        f"{name}.state",
    )
    count = sum(len(group["params"]) for group in groups)
    present = {index: moments for index, moments in like["state"].items() if moments}
    expected = {**expected_moments(optimizer), **present}
    for index, moments in state["state"].items():
        place = f"{name}.state.{str(index)[:80]}"
        fits = type(index) is int and index in range(count) and isinstance(moments, dict)
        require(
            fits,
            moments,
            f"the state of one of {count} parameters",
            place,
        )
        if index in expected:
            check_like(moments, loosely(expected[index]), place)
        step = moments.get("step", 0)
        if is_number(step):
            require(step >= 0, step, "a number of steps", f"{place}.step")


def check_group(group: Any, like: dict[str, Any], place: str) -> None:
    """Compare one parameter group: the same parameters, switches and texts, numbers for numbers."""
    require(isinstance(group, dict), group, "a dict", place)
    for key, value in like.items():
        where = f"{place}.{key}"
        if key not in group:
            refuse("missing", None, where)
        if key in WAYS:
            continue
        if key in ("params", "param_names") or isinstance(value, (bool, str)):
            require(repr(group[key]) == repr(value), group[key], value, where)
        else:
            check_like(group[key], loosely(value), where)


def expected_moments(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """Return {index of a parameter: what one of torch's optimizers keeps for it}.

    A copy of the optimizer takes a first step on the meta device, where tensors have no memory.
    """
    expected: dict[int, dict[str, Any]] = {}
    for part in parts(optimizer):
        if not type(part).__module__.startswith("torch.optim"):
            return {}
        twin = copy.copy(part)
        twin.state = collections.defaultdict(dict)
        # Without torch's wrappers, which import its compiler: a second.
        step = inspect.unwrap(type(part).step)
        for group in part.param_groups:
            stand_ins = []
            for parameter in group["params"]:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                stand_in = torch.nn.Parameter(empty)
                stand_in.grad = empty
                stand_ins.append(stand_in)
            twin.param_groups = [{**group, **dict.fromkeys(WAYS, False), "params": stand_ins}]
            # Some read a number, after they have made their state; SparseAdam needs sparse
            # gradients, and LBFGS a closure; Adagrad of older torch makes its state in the
            # constructor.
            with torch.no_grad(), contextlib.suppress(RuntimeError, KeyError, TypeError):
                step(twin)
            for parameter, stand_in in zip(group["params"], stand_ins, strict=True):
                moments = twin.state[stand_in] or optimizer.state.get(parameter, {})
                expected[len(expected)] = moments
    return {index: moments for index, moments in expected.items() if moments}


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the states of an optimizer are of torch's form."""
    kind = type(optimizer)
    usual = torch.optim.Optimizer
    return kind.state_dict is usual.state_dict and kind.load_state_dict is usual.load_state_dict


def loosely(value: Any) -> Any:
    """Return 0.0 for each number, in a tensor or not: one may stand for the other."""
    if isinstance(value, dict):
        return {key: loosely(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [loosely(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value if value.ndim else 0.0
    is_plain_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return 0.0 if is_plain_number else value


def is_number(value: Any, finite: bool = True) -> bool:
    """Return whether this is one real number, in a tensor or not, that torch can hold."""
    if isinstance(value, torch.Tensor):
        if value.ndim or value.is_complex():
            return False
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, int):
        return abs(value) < 2**63
    return math.isfinite(value) or not finite


def require(fits: bool, value: Any, wanted: Any, name: str) -> None:
    """Raise UserError for the value at `name` unless it `fits`."""
    if not fits:
        refuse(value, wanted, name)


def refuse(value: Any, wanted: Any, name: str) -> NoReturn:
    """Raise UserError for the value at `name`; without `wanted`, `value` says what is wrong."""
    text = value if wanted is None else f"{shown(value)}, not {wanted}"
    raise UserError(f"The checkpoint does not fit this {name.partition('.')[0]}: {name} is {text}.")


def shown(value: Any) -> str:
    """Return a value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
