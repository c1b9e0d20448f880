"""Convert the contents of an untrusted JSON or YAML file to annotated dataclasses."""

import contextlib
import dataclasses
import types
import typing
from typing import Any, TypeGuard


def typed(value: Any, hint: Any, name: str = "file") -> Any:
    """Convert a plain value to the type `hint`. `name` is the key of the value.

    A hint is a dataclass, `list[X]`, `tuple[X, ...]`, `dict[str, X]`, `Literal`, a union of these,
    str, bool, int, float or Any. Numbers must be finite. In a dataclass, missing entries get their
    defaults, or None where the type allows it; unknown entries are ignored.

    Raises:
        TypeError: The value has a different type. The message names its key, such as "best.step".
    """
    kind = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        for part in parts:
            with contextlib.suppress(TypeError):
                return typed(value, part, name)
    if kind is typing.Literal and type(value) in map(type, parts) and value in parts:
        return value
    if kind in (list, tuple) and isinstance(value, list):
        return kind(typed(item, parts[0], f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, dict):
        if kind is dict and all(isinstance(key, str) for key in value):
            return {key: typed(item, parts[1], f"{name}.{key}") for key, item in value.items()}
        if dataclasses.is_dataclass(hint):
            return record(value, hint, name)
    is_right = type(value) is hint
    if hint in (int, float):
        is_right = is_number(value) and (is_right or hint is float)
    if not is_right and hint is not Any:
        raise TypeError(f"{name}: expected {hint}, not {str(value)[:100]!r}.")
    return value


def record(entries: dict[str, Any], hint: Any, name: str) -> Any:
    hints = typing.get_type_hints(hint)
    values = {}
    for field in dataclasses.fields(hint):
        is_required = field.default is field.default_factory  # both are MISSING
        if is_required or field.name in entries:
            value = entries.get(field.name)
            values[field.name] = typed(value, hints[field.name], f"{name}.{field.name}")
    return hint(**values)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number of reasonable size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e100
