"""What a part of a training can go on from: its state is compared with the part's own before anything is loaded."""

import collections
import contextlib
import inspect
import math

import torch
from stoker.trainer.errors import UserError

# How an optimizer works and not what it computes: a checkpoint of a GPU says other things than the CPU needs.
WAYS = ("foreach", "fused", "capturable")
ANYTHING = object()
AXES = (2, 3, 5, 7, 11, 13)


def check(part, state, name):
    """UserError where `part` cannot go on from `state`: another's, or one that no training has written.

    What has a state of its own making (a custom optimizer, a part of one's own) is not looked into.
    """
    if isinstance(part, torch.optim.Optimizer):
        if has_usual_state(part):
            check_optimizer(part, state, name)
    elif isinstance(part, torch.nn.Module):
        own = part.state_dict().items()
        check_like(
            state,
            {key: value if isinstance(value, torch.Tensor) else ANYTHING for key, value in own},
            name,
        )
    elif isinstance(part, torch.amp.GradScaler):
        if part.is_enabled():
            check_scaler(part, state, name)
    elif name in ("train_loss", "grad_norm"):
        check_like(
            state, {"total": math.nan, "samples": 0}, name
        )  # a mean may be of what is not finite
    elif name == "scheduler":
        check_scheduler(part, state, name)
    elif name == "micro_batch":
        check_like(state, part.state_dict(), name)


def check_like(state, like, name):
    """UserError unless `state` is of the kind of `like`: the same keys, lengths and shapes, numbers for numbers."""
    if isinstance(like, torch.Tensor):
        same = (
            isinstance(state, torch.Tensor)
            and state.is_floating_point() == like.is_floating_point()
        )
        if not torch.nn.parameter.is_lazy(like) and not (same and state.shape == like.shape):
            refuse(state, shown(like), name)
    elif isinstance(like, dict):
        if not isinstance(state, dict):
            refuse(state, "a dict", name)
        for key in [*like, *state]:
            if key not in state or key not in like:
                refuse("there" if key in state else "missing", None, f"{name}.{str(key)[:80]}")
            check_like(state[key], like[key], f"{name}.{key}")
    elif isinstance(like, (list, tuple)):
        if not isinstance(state, (list, tuple)) or len(state) != len(like):
            refuse(state, f"a list of {len(like)}", name)
        for i, (item, own) in enumerate(zip(state, like, strict=True)):
            check_like(item, own, f"{name}.{i}")
    elif isinstance(like, (bool, str)):
        if type(state) is not type(like):
            refuse(state, "true or false" if isinstance(like, bool) else "a text", name)
    elif isinstance(like, (int, float)):
        if not is_number(state, finite=math.isfinite(like)):
            refuse(state, "a number", name)
    elif like is None and not (state is None or isinstance(state, bool) or is_number(state)):
        refuse(state, "null or a number", name)


def check_scheduler(scheduler, state, name):
    """UserError for the state of another scheduler, or of one with other settings: torch's would have these again."""
    own, kind = scheduler.state_dict(), type(scheduler).__name__
    if isinstance(state, dict) and set(state) != set(own):
        raise UserError(f"The checkpoint was written with another scheduler than {kind}.")
    check_like(state, own, name)
    for key in inspect.signature(type(scheduler)).parameters:
        if key in own and key != "last_epoch" and state[key] != own[key]:
            raise UserError(
                f"The checkpoint's {kind} has {key}={state[key]}, and this one {own[key]}: torch's schedules keep what "
                "they began with.\nType the settings and epochs of then, or begin with scheduler=cosine, "
                "which can be made longer."
            )


def check_scaler(scaler, state, name):
    own = scaler.state_dict()
    check_like(state, own, name)
    for key, value in own.items():
        if (
            type(state[key]) is not type(value)
            or state[key] < 0
            or not (state[key] or key == "_growth_tracker")
        ):
            refuse(state[key], f"a {type(value).__name__} above 0", f"{name}.{key}")


def check_optimizer(optimizer, state, name):
    """As `check`, for states of torch's own form, of which torch itself compares only how many parameters they have."""
    own = optimizer.state_dict()
    check_like(
        state, {"state": ANYTHING, "param_groups": [ANYTHING] * len(own["param_groups"])}, name
    )
    for i, (mine, group) in enumerate(zip(own["param_groups"], state["param_groups"], strict=True)):
        here = f"{name}.param_groups.{i}"
        if not isinstance(group, dict):
            refuse(group, "a dict", here)
        for key, value in mine.items():
            if key not in group:
                refuse("missing", None, f"{here}.{key}")
            if key in ("params", "param_names") or (
                isinstance(value, (bool, str)) and key not in WAYS
            ):
                if repr(group[key]) != repr(value):
                    refuse(group[key], value, f"{here}.{key}")
            elif key not in WAYS:
                check_like(group[key], loosely(value), f"{here}.{key}")
    indices = [index for group in own["param_groups"] for index in group["params"]]
    if not isinstance(state["state"], dict):
        refuse(state["state"], "a dict", f"{name}.state")
    expected = {**expected_moments(optimizer, own), **own["state"]}
    for index, moments in state["state"].items():
        here = f"{name}.state.{str(index)[:80]}"
        if index not in indices or isinstance(index, bool) or not isinstance(moments, dict):
            refuse(moments, f"the state of one of {len(indices)} parameters", here)
        if index in expected:
            check_like(
                moments, {key: loosely(value) for key, value in expected[index].items()}, here
            )
        if is_number(moments.get("step")) and moments["step"] < 0:
            refuse(float(moments["step"]), "a number of steps", f"{here}.step")


def expected_moments(optimizer, own):
    """{index: what the optimizer keeps for this parameter} of one of torch's, as far as it can be known.

    It is what torch makes at a first step, here of small parameters. Each axis has a size that stands for it, since
    some keep sums over an axis. (The meta device would do, and would import sympy: 0.3 s.)
    """
    kind, found = type(optimizer), {}
    if not f"{kind.__module__}.".startswith("torch.optim.") or not hasattr(kind, "_init_group"):
        return found
    for mine, group in zip(own["param_groups"], optimizer.param_groups, strict=True):
        small = [
            torch.nn.Parameter(torch.zeros(AXES[: p.ndim], dtype=p.dtype)) for p in group["params"]
        ]
        made = first_moments(optimizer, group, small)
        for index, parameter, real in zip(mine["params"], small, group["params"], strict=True):
            if made[parameter] and real.ndim <= len(AXES):
                found[index] = {
                    key: enlarged(value, real.shape) for key, value in made[parameter].items()
                }
    return found


def first_moments(optimizer, group, parameters):
    """{parameter: what one of torch's optimizers, with the settings of this group, makes for it at a first step}."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    twin.__dict__.update({**vars(optimizer), "state": collections.defaultdict(dict)})
    for parameter in parameters:
        parameter.grad = parameter.detach()
        if kind is torch.optim.SGD and group["momentum"]:  # it makes them in the step itself
            twin.state[parameter] = {"momentum_buffer": parameter}
    ways = {way: False for way in WAYS if way in group}
    for_step = list(inspect.signature(kind._init_group).parameters)[
        2:
    ]  # lists that it fills, behind self and group
    with contextlib.suppress(RuntimeError):  # SparseAdam's, which wants sparse gradients
        twin._init_group({**group, **ways, "params": parameters}, *([] for _ in for_step))
    return twin.state


def enlarged(value, shape):
    """The small twin's value with each axis as long as that of the real parameter, on the meta device: no memory."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    lengths = dict(zip(AXES, shape, strict=False))
    return torch.empty([lengths.get(n, n) for n in value.shape], dtype=value.dtype, device="meta")


def has_usual_state(optimizer):
    """Whether the states of an optimizer are of torch's own form."""
    kind, usual = type(optimizer), torch.optim.Optimizer
    return kind.state_dict is usual.state_dict and kind.load_state_dict is usual.load_state_dict


def loosely(value):
    """0.0 for any one number, in a tensor or not, also one of a list: each may stand for the other."""
    if isinstance(value, (list, tuple)):
        return [loosely(item) for item in value]
    return 0.0 if not isinstance(value, bool) and is_number(value, finite=False) else value


def is_number(value, finite=True):
    """Whether it is one real number, in a tensor or not, that torch and float() can hold."""
    if isinstance(value, torch.Tensor):
        if value.ndim or value.is_complex():
            return False
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value) or not finite


def refuse(value, wanted, name):
    """UserError: what is at `name`, and what was wanted there; None where it should not be, or not be missing."""
    found = value if wanted is None else f"{shown(value)}, not {wanted}"
    raise UserError(
        f"The checkpoint does not fit this {name.partition('.')[0]}: {name} is {found}."
    )


def shown(value):
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value) if len(repr(value)) < 60 else f"{repr(value)[:60]}..."
