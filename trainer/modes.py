"""Keep the training and evaluation modes of modules."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def modes_restored(module: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every submodule at the end of this context."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
