"""Stoker: a configurable PyTorch training framework whose loop is a page.

`import stoker` costs no torch: each public name is imported when you first use it.
"""

import importlib

__version__ = "0.1.0"

# Where each public name lives.
PUBLIC = {
    "Callback": "stoker.trainer.callbacks",
    "Trainer": "stoker.trainer.trainer",
    "TrainingError": "stoker.trainer.errors",
    "UserError": "stoker.trainer.errors",
    "load": "stoker.runs.inference",
    "tune_process": "stoker.trainer.process",
}
__all__ = ["__version__", *sorted(PUBLIC)]


def __getattr__(name: str) -> object:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
