"""What your own class of Trainers overrides."""

from typing import Any


def is_usual(kind: Any, method: str) -> bool:
    """Return whether a method of this class of Trainers is the framework's, and not your own.

    A function that builds a Trainer has no methods to look at.
    """
    module: str = getattr(getattr(kind, method, None), "__module__", "")
    return module.startswith("stoker.trainer.")
