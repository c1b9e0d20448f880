"""Traverse, measure and split batches: nested structures of tensors and other objects."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from stoker.trainer.errors import UserError, first_few

PLAIN = (str, bytes, int, float, complex, type(None))
HOW = (
    "Override Trainer.sample_dim to return the dimension along which to split each value; "
    "'Bring your own' in the documentation shows how."
)

SampleDim = int | Literal["auto"] | None
SampleDimOf = Callable[[str, Any], SampleDim]
DimOf = Callable[[str, Any], int | None]  # a SampleDimOf with "auto" resolved


@dataclasses.dataclass
class Accumulated:
    """Several batches from a loader, used as the micro-batches of one step."""

    parts: list[Any]


def look_inside(name: str, value: Any) -> None:
    """Return None, which tells `walk` to look inside every list."""


def walk(
    function: Callable[[str, Any], Any],
    batch: Any,
    name: str = "batch",
    list_dim: DimOf = look_inside,
) -> Any:
    """Return the same structure with `function(name, leaf)` in place of each leaf.

    A leaf is a tensor or an object with a `.to` method, such as PackedSequence or PyG's Data. A
    list or tuple inside the batch is also a leaf if `list_dim(name, value)` is not None. All other
    lists, tuples, named tuples, dicts and dataclasses are traversed, and other values stay as they
    are. The name of a leaf is the expression that accesses it: `batch[0]['mask']`.
    """
    if hasattr(batch, "to"):
        return function(name, batch)
    if isinstance(batch, Mapping):
        walked: Any = copy.copy(batch)  # keeps the type, such as OrderedDict
        for key, value in batch.items():
            walked[key] = walk(function, value, f"{name}[{key!r}]", list_dim)
        return walked
    if isinstance(batch, (list, tuple)):
        is_named = hasattr(batch, "_fields")
        if not is_named and name != "batch" and list_dim(name, batch) is not None:
            return function(name, batch)
        if all(isinstance(value, PLAIN) for value in batch):
            return batch
        items = [walk(function, value, f"{name}[{i}]", list_dim) for i, value in enumerate(batch)]
        return type(batch)(*items) if is_named else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        walked = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            value = walk(function, value, f"{name}.{field.name}", list_dim)
            # Works for frozen dataclasses and, unlike dataclasses.replace, does not run __init__.
            object.__setattr__(walked, field.name, value)
        return walked
    return batch


def entries(batch: Any) -> list[tuple[str, Tensor]]:
    """Return [(name, tensor)] for all tensors in the batch."""
    tensors: list[tuple[str, Tensor]] = []

    def note(name: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            tensors.append((name, leaf))

    walk(note, batch)
    return tensors


def is_list(value: Any) -> bool:
    """Return whether this is a list or tuple; a PackedSequence does not count as one."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "to")


def usual_dim(name: str, value: Any) -> SampleDim:
    """Return the default sample dimension: 0 for tensors and lists of plain values.

    It is "auto" for lists of other objects (see `reading`), and None for a scalar or an empty list.
    """
    if is_list(value):
        if not value:
            return None
        return 0 if all(isinstance(item, PLAIN) for item in value) else "auto"
    if isinstance(value, Tensor) and not value.ndim:
        return None
    return 0


def resolved(sample_dim: SampleDimOf, auto: int | None) -> DimOf:
    """Return `sample_dim` with "auto" replaced by `auto`.

    For a list, the result is 0 (each item is a sample) or None (look inside the list).
    """

    def dim_of(name: str, value: Any) -> int | None:
        dim = sample_dim(name, value)
        if dim == "auto":
            return auto
        return 0 if dim is not None and is_list(value) else dim

    return dim_of


def lengths(batch: Any, dim_of: DimOf) -> dict[str, int | None]:
    """Return {name: number of samples} for each value in a batch that has a sample dimension.

    The number is None for objects other than tensors and lists, whose samples cannot be counted.
    """
    counted: dict[str, int | None] = {}

    def note(name: str, leaf: Any) -> None:
        dim = dim_of(name, leaf)
        if is_list(leaf):
            counted[name] = len(leaf)
        elif dim is not None:
            counted[name] = leaf.shape[dim] if isinstance(leaf, Tensor) else None

    walk(note, batch, list_dim=dim_of)
    return counted


def reading(batch: Any, sample_dim: SampleDimOf) -> tuple[dict[str, int | None], DimOf, bool]:
    """Return ({name: number of samples}, sample dimensions, whether both are unambiguous).

    If the tensors in a list are as long as everything else in the batch, like several inputs of a
    model, each tensor is split by rows. Otherwise each item of the list is a sample, like images of
    different sizes.
    """
    by_row = resolved(sample_dim, None)
    by_item = resolved(sample_dim, 0)
    stacked = lengths(batch, by_row)
    items = lengths(batch, by_item)
    are_stacked = len(set(stacked.values())) <= 1
    are_items = len(set(items.values())) <= 1
    if are_items and not are_stacked:
        return items, by_item, True
    return stacked, by_row, are_stacked and (not are_items or stacked.keys() == items.keys())


def size(batch: Any, sample_dim: SampleDimOf = usual_dim) -> int:
    """Return the number of samples in a batch, or 1 if no entry has a sample dimension.

    If the numbers differ, return that of the last entry (usually the targets).
    """
    if sample_dim is usual_dim and isinstance(batch, (list, tuple)) and len(batch) == 2:
        # Fast path for (inputs, targets).
        inputs, targets = batch
        are_tensors = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        if are_tensors and inputs.shape[:1] == targets.shape[:1] and inputs.ndim:
            return int(inputs.shape[0])
    if isinstance(batch, Accumulated):
        return sum(size(part, sample_dim) for part in batch.parts)
    counted, _, _ = reading(batch, sample_dim)
    known = [length for length in counted.values() if length is not None]
    return known[-1] if known else 1


def check(batch: Any, sample_dim: SampleDimOf, use: str) -> tuple[int | None, DimOf]:
    """Return (number of samples, sample dimensions) of a batch that is to be split.

    The number is None if no entry of the batch has a sample dimension.

    Raises:
        UserError: The lengths differ or are unknown, or there are two ways to split the batch.
    """
    counted, dim_of, is_clear = reading(batch, sample_dim)
    numbers = set(counted.values())
    if not is_clear or None in numbers:
        shown = [
            f"{'unknown' if length is None else length} in {name}"
            for name, length in counted.items()
        ]
        raise UserError(
            f"{use}: it is unclear how to split this batch. The number of samples is "
            f"{first_few(shown, 4)}.\n{HOW}"
        )
    return next(iter(numbers), None), dim_of


def split(batch: Any, parts: int, sample_dim: SampleDimOf = usual_dim) -> list[Any]:
    """Split a batch into at most `parts` micro-batches of nearly equal size.

    Raises:
        UserError: It is unclear how to split the batch.
    """
    if parts == 1:
        return [batch]
    samples, dim_of = check(batch, sample_dim, "micro-batches")
    if not samples:
        return [batch]
    parts = min(parts, samples)
    bounds = [samples * i // parts for i in range(parts + 1)]
    return [select(batch, slice(*ends), dim_of) for ends in pairwise(bounds)]


def deal(batch: Any, rank: int, ranks: int, sample_dim: SampleDimOf = usual_dim) -> tuple[int, Any]:
    """Return (number of samples in the batch, this rank's part of the batch).

    The part has the samples rank, rank + ranks and so on. If there are none, the part is a copy of
    the first sample, because many models do not accept an empty batch. Callers must not count it.

    Raises:
        UserError: It is unclear how to split the batch, or no entry has a sample dimension.
    """
    use = f"{ranks} processes"
    samples, dim_of = check(batch, sample_dim, use)
    if samples is None:
        raise UserError(f"{use}: this batch contains nothing that can be split among them.\n{HOW}")
    rows = slice(rank, None, ranks) if rank < samples else slice(1)
    return samples, select(batch, rows, dim_of)


def select(batch: Any, rows: slice, dim_of: DimOf) -> Any:
    """Return the selected samples of a batch: rows of tensors, items of lists.

    Values without a sample dimension are kept whole.
    """

    def cut(name: str, leaf: Any) -> Any:
        dim = dim_of(name, leaf)
        if dim is None:
            return leaf
        return leaf[(slice(None),) * dim + (rows,)] if dim else leaf[rows]

    return walk(cut, batch, list_dim=dim_of)
