"""Compare a state with the part of a training that it is for, before anything is loaded."""

import collections
import contextlib
import copy
import inspect
import math
from typing import Any, NoReturn

import torch
from stoker.trainer.errors import UserError

# How an optimizer works, not what it computes: a GPU's checkpoint has others than the CPU needs.
WAYS = ("foreach", "fused", "capturable")
ANYTHING = object()
AXES = (2, 3, 5, 7, 11, 13)  # lengths that stand for the axes of a parameter


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
        like = {}
        for key, value in part.state_dict().items():
            like[key] = value if isinstance(value, torch.Tensor) else ANYTHING
        check_like(state, like, name)
    elif isinstance(part, torch.amp.GradScaler):
        if part.is_enabled():
            check_scaler(part, state, name)
    elif name in ("train_loss", "grad_norm"):
        # nan: the mean of a diverged training is not finite.
        check_like(state, {"total": math.nan, "samples": 0}, name)
    elif name == "scheduler":
        check_scheduler(part, state, name)
    elif name == "micro_batch":
        check_like(state, part.state_dict(), name)


def check_like(state: Any, like: Any, name: str) -> None:
    """Compare a nesting with one of the right form: keys, lengths, shapes, numbers for numbers.

    Raises:
        UserError: They differ; it names the place.
    """
    if isinstance(like, torch.Tensor):
        if not torch.nn.parameter.is_lazy(like) and not is_like_tensor(state, like):
            refuse(state, shown(like), name)
    elif isinstance(like, dict):
        if not isinstance(state, dict):
            refuse(state, "a dict", name)
        for key in [*like, *state]:
            place = f"{name}.{str(key)[:80]}"
            if key not in state:
                refuse("missing", None, place)
            if key not in like:
                refuse("there", None, place)
            check_like(state[key], like[key], place)
    elif isinstance(like, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(like):
            refuse(state, f"a list of {len(like)}", name)
        for i, (item, like_item) in enumerate(zip(state, like, strict=True)):
            check_like(item, like_item, f"{name}.{i}")
    elif isinstance(like, bool):
        if not isinstance(state, bool):
            refuse(state, "true or false", name)
    elif isinstance(like, str):
        if not isinstance(state, str):
            refuse(state, "a text", name)
    elif isinstance(like, (int, float)):
        if not is_number(state, finite=math.isfinite(like)):
            refuse(state, "a number", name)
    elif like is None and not (state is None or isinstance(state, bool) or is_number(state)):
        refuse(state, "null or a number", name)


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
        if key in like and key != "last_epoch" and state[key] != like[key]:
            raise UserError(
                f"The checkpoint's {kind} has {key}={state[key]}, and this one {like[key]}: "
                "torch's schedules keep what they began with.\nType the settings and epochs of "
                "then, or begin with scheduler=cosine, which can be made longer."
            )


def check_scaler(scaler: torch.amp.GradScaler, state: Any, name: str) -> None:
    """Raise UserError for numbers that no scaler has."""
    like = scaler.state_dict()
    check_like(state, like, name)
    for key, value in like.items():
        number = state[key]
        may_be_0 = key == "_growth_tracker"
        if type(number) is not type(value) or number < 0 or (number == 0 and not may_be_0):
            refuse(number, f"a {type(value).__name__} above 0", f"{name}.{key}")


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any, name: str) -> None:
    """Compare a state of torch's form; torch itself compares only the numbers of parameters."""
    like = optimizer.state_dict()
    form = {"state": ANYTHING, "param_groups": [ANYTHING] * len(like["param_groups"])}
    check_like(state, form, name)
    groups = zip(state["param_groups"], like["param_groups"], strict=True)
    indices: list[int] = []
    for i, (group, like_group) in enumerate(groups):
        check_group(group, like_group, f"{name}.param_groups.{i}")
        indices += like_group["params"]
    if not isinstance(state["state"], dict):
        refuse(state["state"], "a dict", f"{name}.state")
    expected = {**expected_moments(optimizer, like), **like["state"]}
    for index, moments in state["state"].items():
        place = f"{name}.state.{str(index)[:80]}"
        if index not in indices or isinstance(index, bool) or not isinstance(moments, dict):
            refuse(moments, f"the state of one of {len(indices)} parameters", place)
        if index in expected:
            check_like(moments, loosely(expected[index]), place)
        step = moments.get("step", 0)
        if is_number(step) and step < 0:
            refuse(float(step), "a number of steps", f"{place}.step")


def check_group(group: Any, like: dict[str, Any], place: str) -> None:
    """Compare one parameter group: the same parameters, switches and texts, numbers for numbers."""
    if not isinstance(group, dict):
        refuse(group, "a dict", place)
    for key, value in like.items():
        if key not in group:
            refuse("missing", None, f"{place}.{key}")
        if key in WAYS:
            continue
        if key in ("params", "param_names") or isinstance(value, (bool, str)):
            if repr(group[key]) != repr(value):
                refuse(group[key], value, f"{place}.{key}")
        else:
            check_like(group[key], loosely(value), f"{place}.{key}")


def expected_moments(
    optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Return {index of a parameter: what one of torch's optimizers keeps for it}.

    It is what a first step makes, here of small parameters on the CPU.
    """
    expected: dict[int, dict[str, Any]] = {}
    if not type(optimizer).__module__.startswith("torch.optim"):
        return expected
    for like, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        moments = first_moments(optimizer, group)
        for index, parameter, kept in zip(like["params"], group["params"], moments, strict=True):
            if kept and parameter.ndim <= len(AXES):
                expected[index] = {k: enlarged(v, parameter.shape) for k, v in kept.items()}
    return expected


def first_moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the optimizer keeps for each parameter of a group after a first step.

    A copy of the optimizer takes that step with small parameters, each of whose axes has a length
    that stands for it: some optimizers keep sums over an axis.
    """
    small = []
    for parameter in group["params"]:
        stand_in = torch.nn.Parameter(torch.zeros(AXES[: parameter.ndim], dtype=parameter.dtype))
        stand_in.grad = torch.zeros_like(stand_in)
        small.append(stand_in)
    usual = {key: value for key, value in group.items() if key not in WAYS}
    twin = copy.copy(optimizer)
    twin.state = collections.defaultdict(dict)
    twin.param_groups = [{**usual, **dict.fromkeys(WAYS, False), "params": small}]
    # Without torch's wrappers, which import its compiler: a second.
    step = inspect.unwrap(type(optimizer).step)
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # SparseAdam needs sparse gradients
        step(twin)
    return [twin.state[parameter] for parameter in small]


def enlarged(value: Any, shape: torch.Size) -> Any:
    """Return a stand-in's moment with the lengths of the real parameter, on the meta device."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    lengths = dict(zip(AXES, shape, strict=False))
    return torch.empty([lengths.get(n, n) for n in value.shape], dtype=value.dtype, device="meta")


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
    if not isinstance(value, bool) and is_number(value, finite=False):
        return 0.0
    return value


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
