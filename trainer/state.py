"""Check that a Trainer can load a saved state, before anything is loaded."""

import contextlib
import inspect
from typing import Any, NoReturn

import torch

from stoker.trainer.errors import UserError

# Options of an optimizer that do not change its results, and may differ between devices.
WAYS = ("foreach", "fused", "capturable")
# A form describes a valid state. It has the same structure, with example numbers, example tensors,
# types, or one of the following in place of the values.
ANYTHING = object()


class Either(tuple[Any, ...]):
    """A form that matches any of several forms. Errors are reported for the last one."""


class Exactly(tuple[Any]):
    """A form that matches only one value: Exactly([value])."""


class AtLeast(dict[Any, Any]):
    """A form that matches a dict with these entries and any others."""


def form_of(part: Any, name: str) -> Any:
    """Return the form of the state that a part of a Trainer can load.

    If the part defines its own state, as a custom optimizer can, the form is ANYTHING.
    """
    if isinstance(part, torch.optim.Optimizer) and has_usual_state(part):
        groups = [form_of_group(group) for group in part.state_dict()["param_groups"]]
        return {"state": dict, "param_groups": groups}
    if isinstance(part, torch.nn.Module):
        state = part.state_dict()
        return {key: v if isinstance(v, torch.Tensor) else ANYTHING for key, v in state.items()}
    if name == "scheduler":
        return form_of_scheduler(part)
    has_our_form = name in ("train_loss", "grad_norm", "micro_batch")
    if has_our_form or (name == "scaler" and part.is_enabled()):
        return part.state_dict()
    return ANYTHING


def form_of_group(group: dict[str, Any]) -> AtLeast:
    """Return the form of a parameter group: options must match, but numbers may differ."""
    form = AtLeast()
    for key, value in group.items():
        if key in ("params", "param_names") or isinstance(value, (bool, str)):
            value = Exactly([value])
        if key not in WAYS:
            form[key] = value
    return form


def form_of_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return the form of a scheduler's state: settings and base rates must match.

    The base rates are `given` in our Schedule, and `base_lrs` in torch's schedulers.
    """
    form: dict[str, Any] = scheduler.state_dict()
    for key in (*inspect.signature(type(scheduler)).parameters, "given", "base_lrs"):
        if key in form and key != "last_epoch":
            form[key] = Exactly([form[key]])
    return form


def compare(state: Any, form: Any, name: str) -> None:
    """Compare the keys, lengths, shapes and types of a state with a form.

    Raises:
        UserError: They differ. The message names the place.
    """
    if isinstance(form, Either):
        for option in form[:-1]:
            with contextlib.suppress(UserError):
                return compare(state, option, name)
        form = form[-1]
    if isinstance(form, dict) and isinstance(state, dict):
        for key in {**form, **state}:
            place = f"{name}.{str(key)[:80]}"
            if key not in state:
                refuse("missing", place)
            if key in form:
                compare(state[key], form[key], place)
            elif not isinstance(form, AtLeast):
                refuse("unknown", place)
    elif is_sequence(form) and is_sequence(state) and len(form) == len(state):
        for i, (item, part) in enumerate(zip(state, form, strict=True)):
            compare(item, part, f"{name}.{i}")
    elif not is_like(state, form):
        refuse(f"{shown(state)}, not {shown(form)}", name)


def is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not isinstance(value, Exactly)


def is_like(value: Any, form: Any) -> bool:
    """Return whether a value matches this form; `compare` handles pairs of dicts or lists."""
    if form is ANYTHING or torch.nn.parameter.is_lazy(form):
        return True
    if isinstance(form, Exactly):
        return repr(value) == repr(form[0])
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, torch.Tensor) and form.ndim:
        return is_like_tensor(value, form)
    if isinstance(form, (bool, str)):
        return type(value) is type(form)
    if isinstance(form, (dict, list, tuple)):
        return False
    if value is None or isinstance(value, bool):
        return form is None
    return isinstance(value, (int, float, torch.Tensor)) and not getattr(value, "ndim", 0)


def is_like_tensor(state: Any, like: torch.Tensor) -> bool:
    """Return whether `state` has the shape of `like`, and both or neither are floating-point."""
    return (
        isinstance(state, torch.Tensor)
        and state.shape == like.shape
        and state.is_floating_point() == like.is_floating_point()
    )


def has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state of an optimizer has torch's usual form."""
    kind = type(optimizer)
    usual = torch.optim.Optimizer
    return kind.state_dict is usual.state_dict and kind.load_state_dict is usual.load_state_dict


def refuse(problem: str, name: str) -> NoReturn:
    """Raise UserError for the value at `name`."""
    name = name.removeprefix("state.")
    advice = ""
    if name.startswith("scheduler"):
        advice = (
            "\nUse the learning rate, scheduler and epochs of the run that wrote the checkpoint. "
            "To change the rate from here on, call trainer.set_lr(rate) in on_fit_start."
        )
    raise UserError(f"The checkpoint does not match this Trainer: {name} is {problem}.{advice}")


def shown(value: Any) -> str:
    """Describe a value or a form for an error message."""
    if isinstance(value, Exactly):
        return shown(value[0])
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return repr(value)[:60]


def frozen(module: torch.nn.Module) -> list[str]:
    """Return the names of the frozen parameters, with all names of a shared parameter."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


def freeze(module: torch.nn.Module, names: list[str]) -> None:
    """Freeze the parameters with these names, and unfreeze all others."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in names)
