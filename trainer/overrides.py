"""Find out which methods a custom Trainer class overrides."""

import inspect
import sys
from types import CodeType
from typing import Any


def is_usual(kind: Any, method: str) -> bool:
    """Return whether a Trainer class uses the framework's own version of a method.

    Return False if `kind` is a function that builds a Trainer, because its methods are unknown.
    """
    module: str = getattr(getattr(kind, method, None), "__module__", "")
    return module.startswith("stoker.trainer.")


def step_uses(kind: type, name: str) -> bool:
    """Return whether the train_step of a Trainer class can use this attribute of the Trainer."""
    # Your own train_step may call super().train_step.
    return is_usual(kind, "train_step") or bool(names_in(kind) & {name, "train_step"})


def names_in(kind: type) -> set[str]:
    """Return the names in the code of your own classes and of the functions that they call."""
    own = [one for one in kind.__mro__ if not one.__module__.startswith("stoker.trainer.")]
    methods = [inspect.unwrap(value) for one in own for value in vars(one).values()]
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    names: set[str] = set()
    for code in codes:  # the list grows during the loop
        names.update(code.co_names)
        parts = list(code.co_consts)  # includes the code of nested functions
        for name in code.co_names:
            parts.append(getattr(getattr(sys.modules.get(kind.__module__), name, 0), "__code__", 0))
        codes += [part for part in parts if isinstance(part, CodeType) and part not in codes]
    return names
