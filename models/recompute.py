"""Activation checkpointing: keep only the inputs of blocks, and recompute them in backward.

Chen et al. 2016, arXiv 1604.06174.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from stoker.trainer.errors import UserError
from stoker.trainer.parallel import NORMS

LISTS = (torch.nn.Sequential, torch.nn.ModuleList)


class Recomputed(torch.nn.Module):
    """A block whose activations are recomputed in the backward pass, with the same dropout."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:  # for the forward pass, and for its recomputation
            return contextlib.nullcontext(), statistics_kept(self)

        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextlib.contextmanager
def statistics_kept(block: torch.nn.Module) -> Iterator[None]:
    """Keep BatchNorm's running statistics unchanged, because they already include this batch."""
    norms = [module for module in block.modules() if isinstance(module, NORMS)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # Not `buffer.copy_`, because autograd has saved the buffer and forbids changes to it.
            buffer.data.copy_(value)


def checkpoint_blocks(model: torch.nn.Module) -> list[str]:
    """Make each block of the model recompute its activations, in place; return the block names.

    Blocks are items of a Sequential or ModuleList that contain modules and share their class with
    another item. Of nested blocks, only the outermost counts. Parameter names stay the same, and
    results are bit-identical.

    Raises:
        UserError: The model has no such blocks.
    """
    names = list(block_names("", model))
    if not names:
        raise UserError(
            f"activation_checkpointing: {type(model).__name__} has no repeated blocks (items of "
            "the same class in a Sequential or ModuleList).\nRemove this setting."
        )
    for name in names:
        block = model.get_submodule(name)
        if not isinstance(block, Recomputed):
            kind: Any = type(block)
            block.__class__ = recomputed(kind)
    return names


@functools.cache
def recomputed(kind: Any) -> Any:
    """Return a subclass of `kind`, with the same name, that recomputes its forward pass."""
    return type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__})


def block_names(prefix: str, module: torch.nn.Module) -> Iterator[str]:
    """Yield the dotted names of the blocks in a module."""
    kinds = collections.Counter(map(type, module.children()))
    for name, child in module.named_children():
        is_whole = not isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        is_repeated = isinstance(module, LISTS) and kinds[type(child)] > 1
        if is_whole and is_repeated and list(child.children()):
            yield f"{prefix}{name}"
        else:
            yield from block_names(f"{prefix}{name}.", child)
