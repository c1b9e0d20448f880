"""Descriptions: what a checkpoint says about its inputs and outputs, as plain values from a
file that may be untrusted.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from stoker.trainer.errors import first_few, printable
from stoker.trainer.loading import length_of

KINDS = ("classification", "regression", "other")
KEYS = (
    "dataset",
    "kind",
    "in_shape",
    "dtype",
    "num_classes",
    "classes",
    "mean",
    "std",
    "target_mean",
    "target_scale",
    "table",
    "tokens",
    "resize",
)
TOKENS = ("characters", "bytes", "ids")  # kinds of tokens in a text
# Most values in one sample, and most classes.
MOST_NUMBERS = 2**28

Description = dict[str, Any]
# A column of a table: {"name", "mean", "std"} if it is numeric, else {"name", "categories"}.
Column = dict[str, Any]


def names_of(column: Column) -> list[str]:
    """Name the numbers that a table's column becomes: its own name, or one per category."""
    categories = column.get("categories")
    if categories is None:
        return [column["name"]]
    return [f"{column['name']}={category}" for category in categories]


def columns_line(about: Description) -> str:
    """Describe how each column of a table is read, as in "y: 2 classes (no, yes); numbers: age;
    categories: town (3)".
    """
    classes = about["classes"]
    columns = about["table"]["columns"]
    meaning = "a number to predict"
    if classes is not None:
        meaning = f"{len(classes)} classes ({first_few(classes, 5)})"
    parts = [f"{printable(about['table']['target'])}: {meaning}"]
    numbers = []
    categories = []
    for column in columns:
        if "categories" in column:
            categories.append(f"{column['name']} ({len(column['categories'])})")
        else:
            numbers.append(column["name"])
    if numbers:
        parts.append(f"numbers: {first_few(numbers, 10)}")
    if categories:
        parts.append(f"categories: {first_few(categories, 10)}")
    return "; ".join(parts)


def is_description(about: object) -> bool:
    """Tell whether this has the form of `Data.description()`, with numbers that can be used."""
    try:
        return _has_form(about)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return False


def _has_form(about: Any) -> bool:
    """Do the work of `is_description`; a missing or odd part may also raise."""
    if about["kind"] == "other":
        known = {key for key in KEYS if about.get(key) is not None}
        return known == {"dataset", "kind"} and isinstance(about["dataset"], str)
    shape = about["in_shape"]
    outputs = about["num_classes"]
    kind = about["kind"]
    classes = about["classes"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= 8:
        return False
    # Checked in this order, since the product of untrusted values may take any amount of memory.
    if not all(map(_is_size, [outputs, *shape])) or math.prod(shape) > MOST_NUMBERS:
        return False
    if kind not in KINDS or not isinstance(about["dataset"], str):
        return False
    if not isinstance(getattr(torch, about["dtype"]), torch.dtype):
        return False
    resize = about.get("resize")
    if not (resize is None or isinstance(resize, bool) or _is_size(resize)):
        return False
    if classes is not None:
        if kind != "classification" or not _are(str, classes):
            return False
        if len(classes) != outputs:
            return False
    lengths = {
        "mean": (shape[0],),
        "std": (shape[0],),
        "target_mean": (1, outputs),
        "target_scale": (1, outputs),
    }
    for key, fitting in lengths.items():
        values = about[key]
        if values is None and key in ("mean", "std"):
            continue
        if not isinstance(values, list) and key.startswith("target"):
            values = [values]
        is_positive = key in ("std", "target_scale")
        if not _are_numbers(values, positive=is_positive) or len(values) not in fitting:
            return False
    tokens = about.get("tokens")  # older files lack it
    if tokens is not None and not (_is_text(about) and about["dtype"] == "int64"):
        return False
    table = about["table"]
    if table is None:
        return True
    return _is_table(table) and about["dtype"] == "float32" and shape == [_width(table)]


def _is_text(about: Any) -> bool:
    """Tell whether a description of tokens has the vocabulary that they are read with."""
    if about["tokens"] not in TOKENS or about["kind"] != "classification":
        return False
    if about["tokens"] == "characters":
        return all(len(letter) == 1 for letter in about["classes"])
    return bool(about["tokens"] == "ids" or about["num_classes"] == 256)


def _is_table(table: Any) -> bool:
    """Tell whether this has the form of a description's table."""
    texts = [table["target"], table["missing"], table["delimiter"]]
    texts += [table.get("decimal", "."), table.get("marks", "")]
    if not _are(str, texts) or not _are(dict, table["columns"]):
        return False
    return all(map(_is_column, table["columns"]))


def _is_column(column: Column) -> bool:
    categories = column.get("categories")
    if not isinstance(column["name"], str):
        return False
    if categories is not None:
        return _are(str, categories) and len(categories) > 0
    return _are_numbers([column["mean"]]) and _are_numbers([column["std"]], positive=True)


def _width(table: dict[str, Any]) -> int:
    return sum(len(names_of(column)) for column in table["columns"])


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_NUMBERS


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _are_numbers(values: object, positive: bool = False) -> bool:
    """Tell whether this is a list of finite numbers, all of them above 0 if they have to be
    `positive`.
    """
    if not isinstance(values, list):
        return False
    for value in values:
        if type(value) not in (int, float):
            return False
        if not abs(value) < 2**1023:  # NaN is not finite either
            return False
        if positive and value <= 0:
            return False
    return True


def samples_in(loader: Any) -> int | None:
    """Return the number of samples of a loader; None if it is unknown."""
    if hasattr(loader, "samples"):
        samples: int | None = loader.samples
        return samples
    return length_of(getattr(loader, "dataset", None))


def data_line(data: Any, loaders: Mapping[str, Any], why: str, whole: bool = False) -> str:
    """Return the line on the data that is used; `whole` if the one part is all of it."""
    counts = []
    unknown = []
    for name, loader in loaders.items():
        samples = samples_in(loader)
        if samples is None:
            unknown.append(name)
            continue
        all_samples = getattr(loader, "whole", samples)
        of = f" of {all_samples:,}" if all_samples != samples else ""
        count = f"{samples:,}{of}"
        counts.append(f"all {count}" if whole else f"{count} {name}")
    if data.kind == "other":
        parts = [f"{', '.join(counts)} samples"] if counts else []
        if unknown:
            parts.append(f"{', '.join(unknown)} of unknown length")
        return f"data     {data.name}: {'; '.join(parts)}"
    inputs = f"{data.in_shape[0]} {data.tokens or 'numbers'}"
    if len(data.in_shape) > 1:
        inputs = "x".join(map(str, data.in_shape))
    classes = "classes" if data.kind == "classification" else "to predict"
    cut = f", cut{data.cut}" if data.cut else ""
    return (
        f"data     {data.name}: {', '.join(counts)} samples of {inputs}, "
        f"{data.num_classes:,} {classes}{cut}; {why}"
    )
