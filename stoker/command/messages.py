"""What the user reads instead of a traceback: one to three lines for each error."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from stoker import configs
from stoker.command import arguments, invocation, settings
from stoker.command.build import arguments_of
from stoker.command.defaults import of_choices
from stoker.command.dotted import flat
from stoker.trainer.errors import (
    TrainingError,
    UserError,
    did_you_mean,
    explanation_of,
    first_line,
    nearest,
    printable,
)

LONGEST = 500  # characters in a line, since a value or a path may be of any length
ROOM = "Free some space, then type the same command with run_dir=DIR to resume."
WHAT_TO_DO = {
    errno.ENOSPC: ROOM,
    getattr(errno, "EDQUOT", None): ROOM,
    errno.EFBIG: (
        "Raise the limit on the size of files (ulimit -f), "
        "and type the same command with run_dir=DIR."
    ),
    errno.EROFS: "Type run_dir=DIR with a folder that you can write to.",
}


def message(error: BaseException) -> str:
    """Return the one to three lines that a user sees, free of control characters."""
    lines = [line for line in f"error: {explanation(error)}".split("\n") if line.strip()]
    shown = []
    for line in lines[:3]:
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        shown.append(printable(line))
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return "\n".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def explanation(error: BaseException) -> str:
    """Explain an error: what was typed, what exists, what to type."""
    if isinstance(error, (UserError, TrainingError)):
        return str(error)
    place = explanation_of(error)
    if place is not None:
        return f"{first_line(error)}\n{place} debug=true shows the traceback."
    # Hydra's MissingConfigException is an OSError without a number.
    if isinstance(error, OSError) and error.errno:
        file = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        reason = (error.strerror or str(error)).lower()
        return f"{file}{reason}.\n{WHAT_TO_DO.get(error.errno, '')}"
    if "extension '.yml'" in str(error):  # Hydra does not name the file
        for path in configs.folders()[-1].rglob("*.yml"):
            return f"{path}: the name of a config ends with .yaml. Rename it."
    for explain in (
        no_such_option,
        key_mistake,
        several_values,
        not_understood,
    ):
        text = explain(error)
        if text is not None:
            return text
    text = str(error)
    if isinstance(error, FileNotFoundError) and " " not in text:  # pyarrow's is the path alone
        return f"{text}: no such file or directory."
    if isinstance(error, InterpolationResolutionError):  # Hydra names another key
        typed = [one for one in sys.argv[1:] if "${" in one]
        text = f"{' '.join(typed)}: {text}" if typed else text
    return text


def no_such_option(error: BaseException) -> str | None:
    """Explain Hydra's error for a group without the option that was chosen."""
    missing = getattr(error, "missing_cfg_file", None)
    if not missing:
        return None
    group, _, choice = missing.rpartition("/")
    if group == "hydra/sweeper" and choice == "optuna":
        install = invocation.pip_install(choice)
        return f"sweep={choice} needs the Hydra plugin of that name.\nType {install}."
    options = getattr(error, "options", None)  # Hydra does not name those of a list
    options = options or [path.stem for path in configs.options(group)]
    hint = did_you_mean(choice, options)
    return f"{group}={choice}: not a valid choice.{hint}\nChoose one of: {', '.join(options)}."


def key_mistake(error: BaseException) -> str | None:
    """Explain Hydra's error for an unknown key, or for one that it cannot set."""
    cause = error.__cause__ or error
    if "is not in struct" in str(cause):
        usual = of_choices(arguments.choices(sys.argv[1:]))
        return no_such_key(str(getattr(cause, "full_key", "")), usual)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return f"{first_line(error)}\n{first_line(cause)}"
    return None


def several_values(error: BaseException) -> str | None:
    """Explain Hydra's error for a value with commas outside a sweep."""
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'\n", str(error))
    if ambiguous is None:
        return None
    typed = ambiguous[1]
    key, _, value = typed.lstrip("+").partition("=")
    start = f"{typed}: several values need a sweep. Type"
    if settings.record(key).path:
        return f"{start} \"{key}='{value}'\" for a single path that contains a comma."
    if configs.is_group(key) and key != settings.GROUP_OF_MANY:
        return f"{start} -m {typed}."
    return f"{start} -m {typed}, or '{key}=[{value}]' for a list."


def not_understood(error: BaseException) -> str | None:
    """Explain an error of Hydra's grammar."""
    override = getattr(error, "override", None)
    if override is None and "Error when parsing" not in str(error):
        return None
    typed = override or str(error).partition("string: ")[2].partition(" out of")[0]
    task = did_you_mean(typed, (*settings.TASKS, "new"))
    if task and "=" not in typed and typed not in settings.TASKS:
        return f"{typed}: there is no such task.{task}"
    return (
        f"{typed}: this cannot be parsed. Settings are key=value, as in epochs=3, and lists are "
        "'key=[1,2]'.\n"
        "Quote a value with special characters inside the shell's quotes: "
        "\"dataset.path='my täble.csv'\"."
    )


def no_such_key(key: str, config: Mapping[str, Any], place: str = "") -> str:
    """Explain a misspelt key, with a hint at the right one; `place` is " in FILE"."""
    hint = hint_for(key, config)
    if configs.options(key):  # such as experiment
        hint = " The files of this group begin with '# @package _global_'."
    return f"{key}{place}: there is no such key.{hint}\n{see_help(key.partition('.')[0])}"


def hint_for(key: str, config: Mapping[str, Any]) -> str:
    """Return a hint for an unknown key: another option's key, a similar one, or ''."""
    group, _, last = key.rpartition(".")
    if any(argument.startswith(f"{group}._target_=") for argument in sys.argv):
        near = nearest(key, settings.SETTINGS, loosely=False)
        if near is not None and near.startswith(f"{group}."):
            return f" Did you mean {near!r}?"
        return f" Type +{key}=... for an argument of your own {group}."
    if group == "dataset" and last in settings.LOADER_KEYS:
        return f" Type +{key}=... for a data set whose file does not have it."
    nearby: dict[str, str] = {}
    anywhere: dict[str, str] = {}
    for name in (*flat(config), *config):
        place, _, end = name.rpartition(".")
        anywhere.setdefault(end, name)
        if place == group:
            nearby[end] = name
    for place, choice in options_with(group, last):
        # A callback's key is rarely what was meant.
        if group or anywhere.get(last, "callbacks.").startswith("callbacks."):
            return f" It is a key of {place}={choice}: type {place}={choice} {place}.{last}=..."
    for name, setting in settings.SETTINGS.items():
        anywhere.update(dict.fromkeys(setting.aliases, name))
    if last in anywhere:
        return f" Did you mean {anywhere[last]!r}?"
    if nearest(last, nearby, loosely=False) is None:
        with contextlib.suppress(UserError, KeyError, TypeError):
            if last in arguments_of(group, config[group]["_target_"])[0]:
                return f" Type +{group}.{last}=... for an argument that is not in any file."
    for loosely in (False, True):
        for names in (nearby, anywhere):
            near = nearest(last, names, loosely=loosely)
            if near is not None:
                return f" Did you mean {names[near]!r}?"
    return ""


def options_with(group: str, key: str) -> list[tuple[str, str]]:
    """Return (group, option) of each option with this key, in this group or in any."""
    groups = [group]
    if not group:
        groups = sorted({path.parent.name for path in configs.FOLDER.glob("*/*.yaml")})
    # The keys of a global file, such as an experiment, are not those of its group.
    pattern = rf"(?!# @package _global_)(?s:.*)\n{re.escape(key)}:"
    return [
        (name, path.stem)
        for name in groups
        for path in configs.options(name)
        if re.match(pattern, path.read_text(encoding="utf-8", errors="replace"))
    ]


def see_help(group: str = "") -> str:
    """Return the line that points to the help, or to that of the option of a group."""
    chosen = [one for one in arguments.choices(sys.argv[1:]) if one.startswith(f"{group}=")]
    words = [*invocation.program(), *chosen, "--help"]
    return f"Type {' '.join(words)} to see the keys."
