"""Exceptions that users see as a short message, without a traceback, and helpers for messages."""

import difflib
import logging
import math
import operator
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("stoker")

# Strings that Hydra reads unchanged in a list or dict.
PLAIN_ITEM = r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_/][A-Za-z0-9_/.*-]*"


class UserError(ValueError):
    """A mistake that the user can fix.

    The message has one to three lines. It names the key, file or class, and says what to type.
    """


class RunInUse(UserError):
    """Another process is using this run directory."""


class TrainingError(RuntimeError):
    """Training failed, for example because the loss is not finite."""


class NotFinite(TrainingError):
    """A loss, gradient or weight is not finite. The same command would fail at the same step again.

    Attributes:
        symptom: What is not finite, and at which step; "" if a replay would not explain it.
        replay: The checkpoint before the first bad step, or None if it was not saved. The last line
            of the message says how to resume from it.
    """

    def __init__(self, text: str, symptom: str = "", replay: Path | None = None) -> None:
        super().__init__(text)
        self.symptom = symptom
        self.replay = replay


def explanation_of(error: BaseException) -> str | None:
    """Return the explanation that the Trainer attached to another library's exception, or None."""
    return getattr(error, "where_and_what", None)


def did_you_mean(name: Any, choices: Iterable[Any], shown: Callable[[str], str] = str) -> str:
    """Return " Did you mean 'X'?" for the choice closest to `name`, or "" if none is close.

    `shown` maps the choice to the text to show.
    """
    choice = nearest(name, choices)
    return "" if choice is None else f" Did you mean {shown(choice)!r}?"


def nearest(name: Any, choices: Iterable[Any], *, loosely: bool = True) -> str | None:
    """Return the choice that `name` is most likely meant to be, or None if none is close.

    The cutoff of difflib is stricter if `loosely` is False. A prefix matches too.
    """
    typed = str(name)[:100].lower()
    names = {str(choice).lower(): str(choice) for choice in choices}
    matches = difflib.get_close_matches(typed, names, n=1, cutoff=0.65 if loosely else 0.8)
    if not matches and len(typed) > 1:
        matches = [one for one in names if one.startswith(typed) or typed.startswith(one)]
    return names[matches[0]] if matches else None


def as_typed(value: Any) -> str:
    """Format a value as you would type it on the command line: null, true, [1,2], {a:1}."""
    if isinstance(value, dict):
        pairs = [f"{key}:{item_as_typed(item)}" for key, item in value.items()]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        items = map(item_as_typed, value)
        return "[" + ",".join(items) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def item_as_typed(value: Any) -> str:
    """Format an item of a list or dict as you would type it, with quotes if Hydra needs them."""
    if isinstance(value, str) and not re.fullmatch(PLAIN_ITEM, value):
        return quoted(value, '"')
    return as_typed(value)


def quoted(text: str, mark: str = "'") -> str:
    """Quote text so that Hydra reads it unchanged."""
    # Backslashes before a quotation mark, including the closing one, are doubled.
    inside = re.sub(rf"(\\+)(?={mark}|\Z)", r"\1\1", text).replace(mark, f"\\{mark}")
    return f"{mark}{inside}{mark}"


def check_choice(key: str, value: Any, choices: Collection[Any]) -> Any:
    """Return `value` if it is one of `choices`. The type must match too: 1 is not True.

    Raises:
        UserError: The value is not a choice. The message lists the choices.
    """
    if not any(value == one and type(value) is type(one) for one in choices):
        names = [as_typed(choice) for choice in choices]
        raise UserError(
            f"{key}={as_typed(value)}: not a valid choice.{did_you_mean(value, names)}\n"
            f"Choose one of: {', '.join(names)}."
        )
    return value


def check_number(
    key: str,
    value: Any,
    *,
    whole: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    optional: bool = False,
    auto: bool = False,
) -> Any:
    """Return `value` if it is a number within the bounds.

    `whole` requires an int, `optional` also allows None, and `auto` allows the word "auto".

    Raises:
        UserError: The value is anything else. The message says what is valid.
    """
    if (value is None and optional) or (auto and value == "auto"):
        return value
    kinds = int if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    # Floats must be finite, but they may exceed 2**63.
    fits = fits and abs(value) < (2**63 if isinstance(value, int) else math.inf)
    wanted = "a whole number" if whole else "a number"
    limits = []
    for words, bound, holds in (
        ("of at least", least, operator.ge),
        ("above", above, operator.gt),
        ("at most", most, operator.le),
    ):
        if bound is not None:
            limits.append(f"{words} {bound}")
            fits = fits and holds(value, bound)
    if fits:
        return value
    if limits:
        wanted += f" {' and '.join(limits)}"
    if auto:
        wanted = f"auto, or {wanted}"
    if optional:
        wanted += ", or null"
    if isinstance(value, str) and value.isdecimal():
        value = repr(value)  # shows that it is a string
    raise UserError(f"{key}={as_typed(value)}: expected {wanted}.")


def kind_of(value: object) -> str:
    """Return the class name of a value with an article: "an int", "a Tensor"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    article = "an" if name[0] in "aeioAEIO" else "a"
    return f"{article} {name}"


def printable(text: object) -> str:
    """Escape control characters, because a file name, for example, could contain terminal codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def first_few(names: Sequence[str], count: int) -> str:
    """Return the first `count` names as text, with "..." if there are more."""
    shown = ", ".join(map(printable, names[:count]))
    return f"{shown}, ..." if len(names) > count else shown


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, KeyError):  # the message is only the key
        return f"no key {line}"
    return line.removesuffix(", but expected one of:") or type(error).__name__


def cause(error: BaseException) -> str:
    """Describe an error with the line that raised it: "KeyError: 'x' (mine.py:12)"."""
    text = str(error).strip()
    # torch wraps errors from the workers of a DataLoader.
    if text.startswith("Caught ") and "Original Traceback" in text:
        file, line = re.findall(r'File "(.*)", line (\d+)', text)[-1]
        return printable(f"{text.splitlines()[-1]} ({file}:{line})")
    description = type(error).__name__
    if text:
        description += f": {text.splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not isinstance(error, SyntaxError):  # its message already names the line
        innermost = frames[-1]
        description += f" ({innermost.filename}:{innermost.lineno})"
    return printable(description)
