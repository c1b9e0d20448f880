"""What a batch can be, any nesting of tensors and other things: walk it, measure it, cut it into micro-batches."""

import copy
import dataclasses
from collections.abc import Mapping
from itertools import pairwise

import torch
from stoker.trainer.errors import UserError

PLAIN = (str, bytes, int, float, complex, type(None))


def walk(function, batch, name="batch", plain_list=lambda values: values):
    """The same structure with `function(name, leaf)` in place of each tensor and of each object with a `.to`.

    Goes into dicts, lists, tuples, named tuples and dataclasses; a list or tuple of plain values becomes
    `plain_list(values)`, and anything else comes through unchanged. The names read like the code that reaches the leaf:
    `batch[0]['mask']`.
    """
    # A tensor, or an object that knows how to move itself: PackedSequence, BatchEncoding, PyG's Data.
    if hasattr(batch, "to"):
        return function(name, batch)
    if isinstance(batch, Mapping):
        walked = copy.copy(batch)  # keeps an OrderedDict, a defaultdict
        for key, value in batch.items():
            walked[key] = walk(function, value, f"{name}[{key!r}]", plain_list)
        return walked
    if isinstance(batch, (list, tuple)):
        if not hasattr(batch, "_fields") and all(isinstance(value, PLAIN) for value in batch):
            return plain_list(batch)
        items = [walk(function, value, f"{name}[{i}]", plain_list) for i, value in enumerate(batch)]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        walked = copy.copy(batch)
        for field in dataclasses.fields(
            batch
        ):  # not dataclasses.replace: it would run __init__ again
            value = walk(function, getattr(batch, field.name), f"{name}.{field.name}", plain_list)
            object.__setattr__(walked, field.name, value)  # works on a frozen one too
        return walked
    return batch


def entries(batch):
    """The list of (name, tensor) of all tensors in the batch."""
    found = []
    walk(lambda name, leaf: found.append((name, leaf)), batch)
    return [(name, leaf) for name, leaf in found if isinstance(leaf, torch.Tensor)]


def size(batch):
    """The number of samples: the length of the first tensor."""
    if (
        isinstance(batch, (list, tuple))
        and batch
        and isinstance(batch[0], torch.Tensor)
        and batch[0].ndim
    ):
        return batch[0].shape[0]  # the usual (inputs, targets), without a walk
    for _, tensor in entries(batch):
        if tensor.ndim:
            return len(tensor)
    return 1


def split(batch, parts):
    """Cuts a batch into at most `parts` micro-batches: a list of (micro_batch, share), the shares adding up to 1.

    Every tensor whose first dimension is the number of samples is cut, as are lists with one plain value a sample; the
    rest goes to each part.
    """
    if parts == 1:
        return [(batch, 1.0)]
    samples = size(batch)
    parts = min(parts, samples)
    bounds = [samples * i // parts for i in range(parts + 1)]

    def cut(start, stop):
        def tensor(_, leaf):
            return (
                leaf[start:stop]
                if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == samples
                else leaf
            )

        return walk(
            tensor,
            batch,
            plain_list=lambda values: values[start:stop] if len(values) == samples else values,
        )

    return [
        (cut(start, stop), (stop - start) / samples)
        for start, stop in pairwise(bounds)
        if stop > start
    ]


def deal(batch, rank, ranks):
    """The part of a batch that is dealt to this rank: samples rank, rank + ranks, ... of what `split` would cut.

    Where there is none for it, the first sample, which is not to be counted: a model may not take none.
    """
    samples, dealt = size(batch), []

    def tensor(_, leaf):
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != samples:
            return leaf
        dealt.append(leaf)
        return leaf[mine]

    mine = slice(rank, None, ranks) if rank < samples else slice(1)
    part = walk(
        tensor, batch, plain_list=lambda values: values[mine] if len(values) == samples else values
    )
    if not dealt:
        raise UserError(
            f"A batch of type {type(batch).__name__} cannot be dealt out to {ranks} processes: no tensor in it."
        )
    return part
