"""Exceptions that users see as a few lines instead of a traceback."""

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


class UserError(ValueError):
    """A mistake that you can fix. Exit code 2.

    The message is one to three lines that name the key, file or class, and what to type.
    """

    exit_code = 2


class RunInUse(UserError):
    """Another process is using this run directory.

    Exit code 75, which sysexits.h defines as "try again later".
    """

    exit_code = 75


class TrainingError(RuntimeError):
    """Training failed: a non-finite loss, no memory, no good checkpoint. Exit code 3."""

    exit_code = 3


class NotFinite(TrainingError):
    """A loss, gradient or weight is not finite. The same command fails at the same step again.

    Attributes:
        symptom: What was noticed, and when; "" if a replay would not explain it.
        replay: The checkpoint before the first bad step, which the last line of the message tells
            how to resume from; None if none was kept.
    """

    def __init__(self, text: str, symptom: str = "", replay: Path | None = None) -> None:
        super().__init__(text)
        self.symptom = symptom
        self.replay = replay


def explanation_of(error: BaseException) -> str | None:
    """Return the text that the Trainer attached to an exception of another class, or None."""
    return getattr(error, "where_and_what", None)


def did_you_mean(name: Any, choices: Iterable[Any], whole: Callable[[str], str] = str) -> str:
    """Return " Did you mean 'X'?" for the choice closest to `name`, or "" if none is close.

    `whole` returns the text to show for a choice.
    """
    choice = nearest(name, choices)
    return "" if choice is None else f" Did you mean {whole(choice)!r}?"


def nearest(name: Any, choices: Iterable[Any], *, loosely: bool = True) -> str | None:
    """Return the choice that `name` most likely stands for, or None if none is close.

    Uses difflib, with a stricter cutoff without `loosely`; prefixes of a name match too.
    """
    typed = str(name)[:100].lower()
    names = {str(choice).lower(): str(choice) for choice in choices}
    matches = difflib.get_close_matches(typed, names, n=1, cutoff=0.65 if loosely else 0.8)
    if not matches and len(typed) > 1:
        matches = [one for one in names if one.startswith(typed) or typed.startswith(one)]
    return names[matches[0]] if matches else None


def as_typed(value: Any) -> str:
    """Return a value as you would type it on the command line: null, true, [1,2], {a:1}."""
    if isinstance(value, dict):
        pairs = [f"{key}:{as_typed(item)}" for key, item in value.items()]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        items = map(as_typed, value)
        return "[" + ",".join(items) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def check_choice(key: str, value: Any, choices: Collection[Any]) -> Any:
    """Return `value` if it is one of `choices`, where 1 is not accepted for True.

    Raises:
        UserError: It is not. The message has `key` and the choices.
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
    """Return `value` if it is a (whole) number in the range.

    None is allowed if `optional`, and the word "auto" if `auto`.

    Raises:
        UserError: It is anything else. The message says what is valid.
    """
    if (value is None and optional) or (auto and value == "auto"):
        return value
    kinds = int if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool)
    # A float may exceed 2**63, but must be finite.
    fits = fits and abs(value) < (2**63 if isinstance(value, int) else math.inf)
    wanted = "a whole number" if whole else "a number"
    limits = []
    for words, bound, holds in (
        ("at least", least, operator.ge),
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
    is_text = isinstance(value, str) and value.isdecimal()
    typed = repr(value) if is_text else as_typed(value)
    raise UserError(f"{key}={typed}: give {wanted}.")


def kind_of(value: object) -> str:
    """Return the class name of a value with an article: "an int", "a Tensor"."""
    name = type(value).__name__
    article = "an" if name[0] in "aeioAEIO" else "a"
    return f"{article} {name}"


def printable(text: object) -> str:
    """Escape control characters, because a file name could contain terminal codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def first_few(names: Sequence[str], count: int) -> str:
    """Return the first `count` names as text, with "..." if there are more."""
    shown = ", ".join(map(printable, names[:count]))
    return f"{shown}, ..." if len(names) > count else shown


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    line = str(error).strip().partition("\n")[0]
    return line.removesuffix(", but expected one of:") or type(error).__name__


def cause(error: BaseException) -> str:
    """Return the error with its innermost line: "KeyError: 'x' (mine.py:12)"."""
    text = str(error).strip()
    # torch wraps a worker's error.
    if text.startswith("Caught ") and "Original Traceback" in text:
        file, line = re.findall(r'File "(.*)", line (\d+)', text)[-1]
        return printable(f"{text.splitlines()[-1]} ({file}:{line})")
    description = type(error).__name__
    if text:
        description += f": {text.splitlines()[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        innermost = frames[-1]
        description += f" ({innermost.filename}:{innermost.lineno})"
    return printable(description)
