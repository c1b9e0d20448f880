"""What the user sees instead of a traceback: exceptions, and the lines that each becomes."""

import difflib
import logging
import re
import traceback

log = logging.getLogger("stoker")


class UserError(ValueError):
    """The user's mistake, exit code 2: one to three lines that name the key, file or class, and what to type."""


class RunInUse(UserError):
    """Another process is at work in this run directory. Exit code 75, as sysexits.h has it for "try again later"."""


class TrainingError(RuntimeError):
    """The training failed: a non-finite loss, no memory, no good checkpoint. Exit code 3."""


def did_you_mean(name, choices):
    """' Did you mean X?' for the choice nearest to `name`, or '' where none is near."""
    near = difflib.get_close_matches(str(name), [str(choice) for choice in choices], n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_choice(key, value, choices):
    """Raises UserError unless `value` is one of `choices`, naming `key` and what there is."""
    if value not in choices:
        names = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
        raise UserError(
            f"{key}={value}: there is no such choice.{did_you_mean(value, names)}\n"
            f"Type {key}= one of: {', '.join(names)}."
        )
    return value


def check_number(key, value, *, whole=False, least=None, above=None, most=None, optional=False):
    """`value`, if it is a number (a whole one) in the range, or None where `optional`; UserError otherwise."""
    if value is None and optional:
        return value
    shown = "null" if value is None else value
    kind = "a whole number" if whole else "a number"
    limits = (
        [f"at least {least}"] * (least is not None)
        + [f"above {above}"] * (above is not None)
        + [f"at most {most}"] * (most is not None)
    )
    ok = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    ok = (
        ok
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )
    if not ok:
        raise UserError(
            f"{key}={shown}: give {kind}{' ' * bool(limits)}{' and '.join(limits)}{', or null' if optional else ''}."
        )
    return value


def printable(text):
    """The text with escapes for what is no letter, digit, sign or space: a file's name may move a terminal's cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def cause(error):
    """What happened and where, in one line: 'KeyError: 'x' (mine.py:12)', the place being the innermost one."""
    text = str(error)
    kind, message = type(error).__name__, text.strip().partition("\n")[0]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if text.startswith("Caught ") and "Original Traceback" in text:  # how torch hands an error of a worker on
        places = re.findall(r'File "(.*)", line (\d+)', text)
        return printable(f"{text.strip().splitlines()[-1]} ({':'.join(places[-1])})")
    place = " ({}:{})".format(*places[-1]) if places else ""
    return printable(f"{kind}{f': {message}' if message else ''}{place}")
