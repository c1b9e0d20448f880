"""Find out which methods your own Trainer class overrides."""

from typing import Any


def is_usual(kind: Any, method: str) -> bool:
    """Return whether a method of this Trainer class is the framework's, and not your own.

    Return False for a function that builds a Trainer, which has no such methods.
    """
    module: str = getattr(getattr(kind, method, None), "__module__", "")
    return module.startswith("stoker.trainer.")
