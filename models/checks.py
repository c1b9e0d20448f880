"""Checks for model arguments; each raises a UserError that names the setting."""

from collections.abc import Sequence

from stoker.trainer.errors import UserError, check_number


def check_dropout(value: float) -> None:
    """Check a dropout probability."""
    check_number("model.dropout", value, least=0, most=0.95)


def check_sizes(name: str, sizes: Sequence[int]) -> list[int]:
    """Return the sizes as a list; raise UserError unless each is a whole number of at least 1."""
    return [check_number(f"model.{name}", size, whole=True, least=1) for size in sizes]


def check_image(model: str, in_shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (channels, height, width) of the inputs; raise UserError if they are not images."""
    if len(in_shape) != 3:
        raise UserError(
            f"model: {model} takes images, but these inputs have shape {tuple(in_shape)}.\n"
            "Type model=mlp or model=linear, or model=gpt for text."
        )
    channels, height, width = in_shape
    return channels, height, width
