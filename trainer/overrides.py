"""Find out which methods a custom Trainer class overrides."""

from typing import Any


def is_usual(kind: Any, method: str) -> bool:
    """Return whether a Trainer class uses the framework's own version of a method.

    Return False if `kind` is a function that builds a Trainer, because its methods are unknown.
    """
    module: str = getattr(getattr(kind, method, None), "__module__", "")
    return module.startswith("stoker.trainer.")
