"""The valid values of settings, which constructors check: `check("epochs", 3)`.

The keys are those of the command line, so that an error names the key to type. This module does not
import torch.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from stoker.trainer.errors import UserError, as_typed, check_choice, check_number

T = TypeVar("T")

STRATEGIES = ("auto", "single", "dp", "ddp", "fsdp")
PRECISIONS = ("fp32", "bf16", "fp16")


class Limit(Protocol):
    """The valid values of a setting."""

    def check(self, key: str, value: Any) -> Any:
        """Return `value` if it is valid, or raise a UserError that names `key`."""


@dataclasses.dataclass(frozen=True)
class Number:
    """A number within bounds. `optional` also allows None, and `auto` allows the word "auto"."""

    whole: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    optional: bool = False
    auto: bool = False

    def check(self, key: str, value: Any) -> Any:
        return check_number(key, value, **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: tuple[Any, ...]

    def check(self, key: str, value: Any) -> Any:
        return check_choice(key, value, self.values)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Any value that `function` accepts."""

    function: Callable[[Any], Any]

    def check(self, key: str, value: Any) -> Any:
        return self.function(value)


def check_device(device: Any) -> None:
    """Raise UserError for an invalid device name. Only torch can tell which devices exist."""
    name = as_typed(device)
    if not re.fullmatch(r"[a-z]\w*(:\d+)?", name, re.ASCII):
        raise UserError(
            f"device={name}: not a valid device name.\n"
            "Type device=auto, or name a device, as in device=cuda:1."
        )


RESERVED = {"name", "params", "lr_scale"}  # keys of a parameter group that a rule must not set


def check_groups(rules: Any) -> Any:
    """Return the parameter group rules; raise UserError unless they are a list of valid rules."""
    is_list = isinstance(rules, (list, tuple))
    for rule in rules if is_list else [{}]:
        is_rule = isinstance(rule, Mapping) and isinstance(rule.get("match"), str)
        if not is_rule or len(rule) == 1 or RESERVED & rule.keys():
            raise UserError(
                f"groups={as_typed(rules)}: expected a list of rules, each with a name pattern and "
                "optimizer options, such as 'groups=[{match: \"head.*\", lr: 1e-4}]'."
            )
        if "lr_decay" in rule:
            check_number(f"groups: lr_decay of {rule['match']}", rule["lr_decay"], above=0, most=1)
    return rules


def check_thaw_at(value: Any) -> float:
    """Return a number of steps, or inf for "never"; raise UserError for any other value."""
    if value is None or value == "never":  # None: the callback is off
        return math.inf
    if not re.fullmatch(r"\d{1,18}", as_typed(value), re.ASCII):
        raise UserError(
            f"callbacks.freeze.thaw_at={as_typed(value)}: expected a number of steps, or never."
        )
    return int(value)


COUNT = Number(whole=True, least=1)
COUNT_OR_NONE = Number(whole=True, least=1, optional=True)
LIMITS: Mapping[str, Limit] = {
    "epochs": COUNT,
    "max_steps": COUNT_OR_NONE,
    "steps_per_epoch": COUNT_OR_NONE,
    "max_minutes": Number(above=0),
    "grad_accum_steps": COUNT,
    "micro_batch": Number(whole=True, least=1, optional=True, auto=True),
    "max_grad_norm": Number(above=0, optional=True),
    "groups": Checked(check_groups),
    "callbacks.freeze.thaw_at": Checked(check_thaw_at),
    "ema": Number(above=0, most=1),
    "patience": COUNT,
    "monitor_mode": Choice(("auto", "min", "max")),
    "device": Checked(check_device),
    "strategy": Choice(STRATEGIES),
    "precision": Choice(("auto", *PRECISIONS)),
    "compile": Choice((False, True, "graph")),
    "channels_last": Choice(("auto", True, False)),
    "seed": Number(whole=True, least=0),
    "log_every": COUNT,
    "eval_every": COUNT_OR_NONE,
    "checkpoint.every": COUNT_OR_NONE,
    "checkpoint.epochs": COUNT_OR_NONE,
    "checkpoint.minutes": Number(above=0, optional=True),
    "checkpoint.keep": Number(whole=True, least=2),
}


def check(key: str, value: T, *, optional: bool = False) -> T:
    """Return `value` if it is valid for `key`, or raise UserError. `optional` also allows None."""
    if value is not None or not optional:
        LIMITS[key].check(key, value)
    return value


def check_micro_batch(size: int | str | None, parts: int = 1) -> Any:
    """Return `size`; raise UserError if it is invalid, or if `parts` (grad_accum_steps) is set."""
    if size is not None and parts > 1:
        raise UserError(
            f"micro_batch={as_typed(size)} and grad_accum_steps={parts} both split the batch. "
            "Type only one of them."
        )
    return check("micro_batch", size)
