"""Descriptions: what a checkpoint says about the model's inputs and outputs. A description contains
only plain values, and may come from an untrusted file.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from stoker.data.typed import typed
from stoker.trainer.errors import first_few
from stoker.trainer.loading import length_of

KINDS = ("classification", "regression", "other")
# The maximum number of classes, and of values in a sample or a table.
MOST_NUMBERS = 2**28

Description = dict[str, Any]
# A column of a table: {"name", "mean", "std"} if it is numeric, else {"name", "categories"}.
Column = dict[str, Any]


@dataclasses.dataclass
class Numbers:
    """A numeric column of a table."""

    name: str
    mean: float
    std: float


@dataclasses.dataclass
class Categories:
    """A categorical column of a table."""

    name: str
    categories: list[str]


@dataclasses.dataclass
class TableEntries:
    """The columns of a table, and how to read it."""

    target: str
    missing: str
    delimiter: str
    columns: list[Categories | Numbers]
    decimal: str = "."
    marks: str = ""


@dataclasses.dataclass
class Entries:
    """The keys of a description, with their types."""

    dataset: str
    kind: Literal["classification", "regression"]
    in_shape: list[int]
    dtype: str
    num_classes: int
    classes: list[str] | None
    mean: list[float] | None
    std: list[float] | None
    target_mean: float | list[float]
    target_scale: float | list[float]
    table: TableEntries | None
    tokens: Literal["characters", "bytes", "ids"] | None = None
    resize: bool | int | None = None


KEYS = [field.name for field in dataclasses.fields(Entries)]


def names_of(column: Column) -> list[str]:
    """Return the names of a column's inputs: the name of the column, or one name per category."""
    categories = column.get("categories")
    if categories is None:
        return [column["name"]]
    return [f"{column['name']}={category}" for category in categories]


def columns_line(about: Description) -> str:
    """Describe how the input columns of a table are read: "numbers: age; categories: town (3)"."""
    kinds: dict[str, list[str]] = {"numbers": [], "categories": []}
    for column in about["table"]["columns"]:
        if "categories" in column:
            kinds["categories"].append(f"{column['name']} ({len(column['categories'])})")
        else:
            kinds["numbers"].append(column["name"])
    return "; ".join(f"{kind}: {first_few(names, 10)}" for kind, names in kinds.items() if names)


def is_description(about: Any) -> bool:
    """Return whether this has the form of a `Data.description()`, with valid values."""
    try:
        if about["kind"] == "other":
            known = {key for key in KEYS if about.get(key) is not None}
            return known == {"dataset", "kind"} and isinstance(about["dataset"], str)
        return _is_consistent(typed(about, Entries))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return False


def _is_consistent(about: Entries) -> bool:
    """Return whether the sizes in a description are possible and consistent."""
    shape = about.in_shape
    outputs = about.num_classes
    sizes = [outputs, *shape, int(about.resize or 1)]
    # Check the sizes before they are multiplied: the product of huge integers from an untrusted
    # file could use any amount of memory.
    if not all(1 <= size <= MOST_NUMBERS for size in sizes) or not 1 <= len(shape) <= 8:
        return False
    if math.prod(shape) > MOST_NUMBERS or not isinstance(getattr(torch, about.dtype), torch.dtype):
        return False
    is_classification = about.kind == "classification"
    if about.classes is not None and not (is_classification and len(about.classes) == outputs):
        return False
    return all(len(values) == shape[0] for values in (about.mean, about.std) if values)


def sample_counts(loaders: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of samples in each loader, except where it is unknown."""
    counts = {}
    for name, loader in loaders.items():
        count = getattr(loader, "samples", length_of(getattr(loader, "dataset", None)))
        if count is not None:
            counts[name] = count
    return counts


def data_line(data: Any, loaders: Mapping[str, Any], why: str) -> str:
    """Return the line that describes the data."""
    counts = [f"{count:,} {name}" for name, count in sample_counts(loaders).items()]
    line = f"data     {data.name}"
    if counts:
        line += f": {', '.join(counts)} samples"
    if data.kind == "other":
        return line
    inputs = f"{'x'.join(map(str, data.in_shape))} {data.tokens or 'numbers'}"
    outputs = "classes" if data.kind == "classification" else "to predict"
    if data.tokens is not None:
        outputs = f"{data.tokens} in the vocabulary"
    return f"{line} of {inputs}, {data.num_classes:,} {outputs}; {why}"
