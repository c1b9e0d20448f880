"""Batches, any nesting of tensors and other things: walk through one, measure it, cut it."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from stoker.trainer.errors import UserError

PLAIN = (str, bytes, int, float, complex, type(None))


def unchanged(values: Any) -> Any:
    return values


def walk(
    function: Callable[[str, Any], Any],
    batch: Any,
    name: str = "batch",
    plain_list: Callable[[Any], Any] = unchanged,
) -> Any:
    """Return the same structure with `function(name, leaf)` in place of each leaf.

    A leaf is a tensor, or an object with a `.to` such as PackedSequence or PyG's Data. Dicts,
    lists, tuples, named tuples and dataclasses are walked through. A list or tuple of plain values
    becomes `plain_list(values)`, and anything else stays. Names read like the code that reaches the
    leaf: `batch[0]['mask']`.
    """
    if hasattr(batch, "to"):
        return function(name, batch)
    if isinstance(batch, Mapping):
        walked: Any = copy.copy(batch)  # keeps an OrderedDict, a defaultdict
        for key, value in batch.items():
            walked[key] = walk(function, value, f"{name}[{key!r}]", plain_list)
        return walked
    if isinstance(batch, (list, tuple)):
        is_named = hasattr(batch, "_fields")
        if not is_named and all(isinstance(value, PLAIN) for value in batch):
            return plain_list(batch)
        items = []
        for i, value in enumerate(batch):
            items.append(walk(function, value, f"{name}[{i}]", plain_list))
        return type(batch)(*items) if is_named else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        walked = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            value = walk(function, value, f"{name}.{field.name}", plain_list)
            # Not dataclasses.replace, which runs __init__ again; and this works on a frozen one.
            object.__setattr__(walked, field.name, value)
        return walked
    return batch


def entries(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """Return [(name, tensor)] of all tensors in the batch."""
    leaves: list[tuple[str, Any]] = []
    walk(lambda name, leaf: leaves.append((name, leaf)), batch)
    return [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]


def size(batch: Any) -> int:
    """Return the number of samples: the length of the first tensor, 1 if there is none."""
    if isinstance(batch, (list, tuple)) and batch:
        first = batch[0]
        if isinstance(first, torch.Tensor) and first.ndim:
            return first.shape[0]  # the usual (inputs, targets), without a walk
    for _, tensor in entries(batch):
        if tensor.ndim:
            return len(tensor)
    return 1


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Cut a batch into at most `parts` micro-batches; return [(micro_batch, share)].

    The shares of the samples add up to 1. See `select` for what is cut.
    """
    if parts == 1:
        return [(batch, 1.0)]
    samples = size(batch)
    parts = min(parts, samples)
    bounds = [samples * i // parts for i in range(parts + 1)]
    pieces = []
    for start, stop in pairwise(bounds):
        if stop > start:
            pieces.append((select(batch, slice(start, stop), samples), (stop - start) / samples))
    return pieces


def deal(batch: Any, rank: int, ranks: int) -> Any:
    """Return the part of a batch for this rank: samples rank, rank + ranks, ...

    If there is none for it, return the first sample, which is not to be counted: a model may not
    take an empty batch.

    Raises:
        UserError: No tensor in the batch has a sample per row.
    """
    samples = size(batch)
    if not any(is_per_sample(tensor, samples) for _, tensor in entries(batch)):
        raise UserError(
            f"A batch of type {type(batch).__name__} cannot be dealt out to {ranks} processes: "
            "it holds no tensor."
        )
    rows = slice(rank, None, ranks) if rank < samples else slice(1)
    return select(batch, rows, samples)


def select(batch: Any, rows: slice, samples: int) -> Any:
    """Return these rows of a batch of `samples`.

    Cut are tensors whose first dimension is the number of samples, and lists with one plain value
    per sample. Everything else stays whole.
    """
    return walk(
        lambda _, leaf: leaf[rows] if is_per_sample(leaf, samples) else leaf,
        batch,
        plain_list=lambda values: values[rows] if len(values) == samples else values,
    )


def is_per_sample(leaf: Any, samples: int) -> bool:
    """Return whether this is a tensor with one row per sample."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == samples
