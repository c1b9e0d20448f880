"""Named spans of a fit, which the loop, the loaders and the Checkpoint callback enter and leave.

A silent span costs nothing, because `SILENT` runs no Python code. To measure where the time goes,
put your own context managers into `Trainer.spans`, and put `SILENT` back afterward.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

NAMES = (
    "transfer",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "checkpoint",
    "logging",
    "report",
)

# Tells whether torch's profiler is running.
is_profiled = torch.autograd._profiler_enabled  # private: there is no public check, torch 2.15
Spans = dict[str, AbstractContextManager[Any]]


class Silent(AbstractContextManager[Any]):
    """A context manager that does nothing and does not suppress exceptions.

    Its methods are C functions that accept any arguments and return an empty string. Entering and
    leaving it therefore creates no Python frame.
    """

    __enter__ = "".format
    __exit__ = "".format  # type: ignore[assignment]  # "" is false: exceptions propagate


SILENT = Silent()


def silent_spans() -> Spans:
    """Return {name: SILENT} for all spans."""
    return dict.fromkeys(NAMES, SILENT)
