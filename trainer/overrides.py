"""Find out which methods a custom Trainer class overrides."""

import inspect
import re
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
    return is_usual(kind, "train_step") or reads_any(kind, name, "train_step")


def reads_any(kind: type, *attributes: str) -> bool:
    """Return whether the source code of your own classes reads any of these attributes.

    Return True if there is no source, as for a class typed into an interpreter.
    """
    classes = kind.__mro__[:-1]  # without `object`
    own = [one for one in classes if not one.__module__.startswith("stoker.trainer.")]
    try:
        text = "".join(map(inspect.getsource, own))
    except (OSError, TypeError):
        return True
    return not set(attributes).isdisjoint(re.findall(r"\.(\w+)", text))
