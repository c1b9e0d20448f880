"""Stoker: a configurable PyTorch training framework with a loop that fits on a page.

`import stoker` does not import torch: each public name is imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.command.script_errors import short_errors
    from stoker.command.tuning import tune_process
    from stoker.runs.inference import load
    from stoker.runs.weights import init_from
    from stoker.tasks.script import fit
    from stoker.trainer.callbacks import Callback
    from stoker.trainer.errors import TrainingError, UserError
    from stoker.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Trainer",
    "TrainingError",
    "UserError",
    "__version__",
    "fit",
    "init_from",
    "load",
    "short_errors",
    "tune_process",
]

# The module of each name that is imported on first use.
_MODULES = {
    "Callback": "stoker.trainer.callbacks",
    "Trainer": "stoker.trainer.trainer",
    "TrainingError": "stoker.trainer.errors",
    "UserError": "stoker.trainer.errors",
    "fit": "stoker.tasks.script",
    "init_from": "stoker.runs.weights",
    "load": "stoker.runs.inference",
    "short_errors": "stoker.command.script_errors",
    "tune_process": "stoker.command.tuning",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
