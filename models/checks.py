"""Checks of the models' arguments.

Each raises a ValueError whose text starts with the argument's name.
"""

import math
from collections.abc import Collection, Sequence


def check(name: str, value: object, valid: bool, wanted: str) -> None:
    """Raise ValueError, saying what is `wanted`, unless the value is `valid`."""
    if not valid:
        raise ValueError(f"{name}={value}: give {wanted}.")


def is_number(value: object) -> bool:
    """Tell whether a value is a finite number; True and False are not numbers here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_dropout(value: float) -> None:
    """Check the probability with which Dropout sets a value to zero."""
    valid = is_number(value) and 0 <= value <= 0.95
    check("dropout", value, valid, "a number at least 0 and at most 0.95")


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Check that a value is one of the choices."""
    check(name, value, value in choices, f"one of: {', '.join(choices)}")


def check_sizes(name: str, sizes: Sequence[int], *, empty: bool = False) -> list[int]:
    """Return the sizes, whole numbers of at least 1, as a list; it may be `empty` if that is
    said.
    """
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    valid = is_list and (empty or len(sizes) > 0)
    valid = valid and all(type(size) is int and size >= 1 for size in sizes)
    shown = f"[{','.join(map(str, sizes))}]" if is_list else sizes
    check(name, shown, valid, "a list of whole numbers at least 1, such as [64,128]")
    return list(sizes)


def check_image(model: str, in_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width) of the inputs; ValueError if they are not images."""
    if len(in_shape) != 3:
        raise ValueError(
            f"{model} takes images, but these inputs have the shape {tuple(in_shape)}.\n"
            "Type model=mlp or model=linear."
        )
    channels, height, width = in_shape
    return channels, height, width
