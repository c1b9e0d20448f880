"""What the user sees instead of a traceback: exceptions, and the lines that each becomes."""

import difflib
import logging
import math
import re
import traceback

log = logging.getLogger("stoker")


class UserError(ValueError):
    """The user's mistake, exit code 2: one to three lines that name the key, file or class, and what to type."""


class RunInUse(UserError):
    """Another process is at work in this run directory. Exit code 75, as sysexits.h has it for "try again later"."""


class TrainingError(RuntimeError):
    """The training failed: a non-finite loss, no memory, no good checkpoint. Exit code 3."""


def did_you_mean(name, choices, whole=str):
    """' Did you mean X?' for the choice nearest to `name`, shown as `whole` gives it, or '' where none is near."""
    found = nearest(name, choices)
    return f" Did you mean {whole(found)!r}?" if found is not None else ""


def nearest(name, choices):
    """The choice that was most likely meant by `name`, None where none is near.

    One letter too much, too few, another or two swapped is a typo in names of any length; beyond that, difflib's ratio
    decides, which is harsh on short names.
    """
    name, choices = str(name)[:100], [str(choice) for choice in choices]
    close = [choice for choice in choices if choice.lower() == name.lower()]
    close = close or [choice for choice in choices if is_one_slip(name.lower(), choice.lower())]
    return next(
        iter(difflib.get_close_matches(name, close or choices, n=1, cutoff=0.0 if close else 0.6)),
        None,
    )


def is_one_slip(typed, meant):
    """Whether one insertion, deletion, replacement or swap of neighbours makes the one of the other."""
    if abs(len(typed) - len(meant)) > 1:
        return False
    start = next(
        (i for i, (a, b) in enumerate(zip(typed, meant, strict=False)) if a != b),
        min(len(typed), len(meant)),
    )
    a, b = typed[start:], meant[start:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[2:] == b[2:] and a[:2] == b[1::-1])


def as_typed(value):
    """A value as one types it: null, true, [1,2], {a:1}."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def check_choice(key, value, choices):
    """Raises UserError unless `value` is one of `choices`, naming `key` and what there is."""
    if value not in list(choices):
        names = [as_typed(choice) for choice in choices]
        raise UserError(
            f"{key}={as_typed(value)}: there is no such choice.{did_you_mean(value, names)}\n"
            f"Type {key}= one of: {', '.join(names)}."
        )
    return value


def check_number(
    key, value, *, whole=False, least=None, above=None, most=None, optional=False, auto=False
):
    """`value`, if it is a number (a whole one) in the range, None where `optional`, or the word auto where `auto`."""
    if (value is None and optional) or (auto and value == "auto"):
        return value
    kind = "a whole number" if whole else "a number"
    limits = (
        [f"at least {least}"] * (least is not None)
        + [f"above {above}"] * (above is not None)
        + [f"at most {most}"] * (most is not None)
        + ["below 2**63"] * (isinstance(value, int) and abs(value) >= 2**63)
    )
    ok = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    ok = ok and (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value))
    ok = (
        ok
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if not ok:
        what = " ".join([kind, " and ".join(limits)]).strip() + ", or null" * optional
        hint = ""
        if auto:
            what = f"auto, {what}" if optional else f"auto, or {what}"
            hint = did_you_mean(value, ("auto",))
        raise UserError(f"{key}={as_typed(value)}: give {what}.{hint}")
    return value


def printable(text):
    """The text with escapes for what is no letter, digit, sign or space: a file's name may move a terminal's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def cause(error):
    """What happened and where, in one line: 'KeyError: 'x' (mine.py:12)', the place being the innermost one."""
    text = str(error)
    kind, message = type(error).__name__, text.strip().partition("\n")[0]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if (
        text.startswith("Caught ") and "Original Traceback" in text
    ):  # how torch hands an error of a worker on
        places = re.findall(r'File "(.*)", line (\d+)', text)
        return printable(f"{text.strip().splitlines()[-1]} ({':'.join(places[-1])})")
    place = " ({}:{})".format(*places[-1]) if places else ""
    return printable(f"{kind}{f': {message}' if message else ''}{place}")
