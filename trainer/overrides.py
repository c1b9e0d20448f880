"""What your own class of Trainers overrides, and what its code reads."""

import inspect
import re
import sys
from typing import Any


def is_usual(kind: Any, method: str) -> bool:
    """Return whether a method of this class of Trainers is the framework's, and not your own.

    A function that builds a Trainer has no methods to look at.
    """
    module: str = getattr(getattr(kind, method, None), "__module__", "")
    return module.startswith("stoker.trainer.")


def mentions(kind: Any, pattern: str) -> bool:
    """Return whether the modules of your own class of Trainers contain a pattern, or may do so."""
    for parent in kind.__mro__ if isinstance(kind, type) else ():
        if parent.__module__.startswith("stoker.trainer."):
            return False
        try:
            source = inspect.getsource(sys.modules[parent.__module__])
        except (OSError, TypeError):  # typed line by line
            return True
        if re.search(pattern, source):
            return True
    return True
