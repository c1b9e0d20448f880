"""Check a saved state against the model, optimizer and so on, before anything is loaded."""

import inspect
from typing import Any, NoReturn

import torch

from stoker.trainer.errors import UserError

# Options that do not change an optimizer's result; they may differ between a GPU and a CPU.
WAYS = ("foreach", "fused", "capturable")
ANYTHING = object()
# Parts of a Trainer whose state always has the same structure.
OURS = ("train_loss", "grad_norm", "micro_batch")


def check(part: Any, state: Any, name: str) -> None:
    """Compare the form of a state with that of the part it is for; change nothing.

    A part with its own form of state, such as a custom optimizer, is not looked into.

    Raises:
        UserError: The state belongs to another model, optimizer or schedule.
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
    elif name == "scheduler":
        check_scheduler(part, state, name)
    elif name in OURS or (name == "scaler" and part.is_enabled()):
        check_like(state, part.state_dict(), name)


def frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the frozen parameters; a shared one has several."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: list[str]) -> None:
    """Freeze the parameters of these names, and train all others."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in names)


def check_like(state: Any, like: Any, name: str) -> None:
    """Compare a nesting with one of the right form: its keys, lengths, shapes and types.

    Raises:
        UserError: They differ; it says where.
    """
    if isinstance(like, dict):
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
    elif torch.nn.parameter.is_lazy(like):
        pass
    elif isinstance(like, torch.Tensor) and like.ndim:
        require(is_like_tensor(state, like), state, shown(like), name)
    elif isinstance(like, (bool, str)):
        require(type(state) is type(like), state, f"of type {type(like).__name__}", name)
    elif isinstance(like, (int, float, torch.Tensor)):
        require(is_number(state), state, "a number", name)
    elif like is None:
        fits = state is None or isinstance(state, bool) or is_number(state)
        require(fits, state, "null or a number", name)


def is_like_tensor(state: Any, like: torch.Tensor) -> bool:
    """Return whether this is a tensor of the same shape, and floating-point if `like` is."""
    return (
        isinstance(state, torch.Tensor)
        and state.shape == like.shape
        and state.is_floating_point() == like.is_floating_point()
    )


def is_number(value: Any) -> bool:
    """Return whether this is one number, in a tensor or not."""
    if isinstance(value, torch.Tensor):
        return not value.ndim
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_scheduler(scheduler: Any, state: Any, name: str) -> None:
    """Raise UserError for the state of another scheduler, or of one with other settings."""
    like = scheduler.state_dict()
    kind = type(scheduler).__name__
    if isinstance(state, dict) and set(state) != set(like):
        raise UserError(f"The checkpoint was written with a scheduler other than {kind}.")
    check_like(state, like, name)
    for key in inspect.signature(type(scheduler)).parameters:
        if key == "last_epoch" or key not in like:
            continue
        if state[key] != like[key]:
            raise UserError(
                f"The checkpoint's {kind} has {key}={state[key]}, and this one {like[key]}: "
                "torch's schedulers cannot be changed.\nUse the same settings and epochs, or start "
                "with scheduler=cosine, which can be extended."
            )
    for key in ("given", "base_lrs"):  # keys of our Schedule and of torch's
        if state.get(key) != like.get(key):
            before = ", ".join(f"{rate:g}" for rate in state[key])
            now = ", ".join(f"{rate:g}" for rate in like[key])
            raise UserError(
                f"The checkpoint was written with the learning rate {before}; this fit has {now}.\n"
                f"Set it to {before} to resume. To change it from this point on, call "
                f"trainer.set_lr({now}) in on_fit_start."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, state: Any, name: str) -> None:
    """Compare the parameter groups; torch itself compares only their lengths."""
    groups = optimizer.state_dict()["param_groups"]
    check_like(state, {"state": ANYTHING, "param_groups": [ANYTHING] * len(groups)}, name)
    require(isinstance(state["state"], dict), state["state"], "a dict", f"{name}.state")
    for i, group in enumerate(groups):
        check_group(state["param_groups"][i], group, f"{name}.param_groups.{i}")


def check_group(group: Any, like: dict[str, Any], place: str) -> None:
    """Compare a parameter group: the same parameters and options; numbers may differ."""
    require(isinstance(group, dict), group, "a dict", place)
    for key, value in like.items():
        if key in WAYS:
            continue
        where = f"{place}.{key}"
        if key not in group:
            refuse("missing", None, where)
        if key in ("params", "param_names") or isinstance(value, (bool, str)):
            require(repr(group[key]) == repr(value), group[key], value, where)
        else:
            check_like(group[key], value, where)


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the states of an optimizer are of torch's form."""
    kind = type(optimizer)
    usual = torch.optim.Optimizer
    return kind.state_dict is usual.state_dict and kind.load_state_dict is usual.load_state_dict


def require(fits: bool, value: Any, wanted: Any, name: str) -> None:
    """Raise UserError for the value at `name` unless it `fits`."""
    if not fits:
        refuse(value, wanted, name)


def refuse(value: Any, wanted: Any, name: str) -> NoReturn:
    """Raise UserError for the value at `name`; if `wanted` is None, `value` is the problem."""
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
