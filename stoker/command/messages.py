"""Error messages: the one to three lines that the user sees instead of a traceback."""

import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stoker import configs
from stoker.command import arguments, invocation, settings
from stoker.command.defaults import of_choices
from stoker.command.dotted import flat, is_interpolation
from stoker.trainer.errors import (
    TrainingError,
    UserError,
    did_you_mean,
    explanation_of,
    first_line,
    printable,
)

FOR_EXPERIMENT = "Files in this group must begin with '# @package _global_'."
# Failures of the disk, the file system or the memory, rather than a path that is wrong.
FAILING = {
    getattr(errno, name, 0)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE", "ENOMEM")
}


def message(error: BaseException) -> str:
    """Return the one to three lines that a user sees, free of control characters."""
    # Shorten long lines: a value or a path can have any length.
    text = re.sub(r"(.{500}).+", r"\1...", f"error: {explanation(error)}")
    lines = [printable(line) for line in text.split("\n") if line.strip()]
    return "\n".join(lines[:3])


def explanation(error: BaseException) -> str:
    """Explain an error: what was typed, what exists, what to type."""
    if isinstance(error, (UserError, TrainingError)):
        return str(error)
    place = explanation_of(error)
    if place is not None:
        return f"{first_line(error)}\n{place} debug=true shows the traceback."
    # Hydra's MissingConfigException is an OSError without an errno.
    if isinstance(error, OSError) and error.errno:
        file = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        advice = ""
        if error.errno in FAILING:
            advice = "Once that is fixed, type the same command with run_dir=DIR to resume."
        return f"{file}{(error.strerror or str(error)).lower()}.\n{advice}"
    if isinstance(error, FileNotFoundError):  # pyarrow's message is only the path
        return f"{error}: no such file or directory."
    for explain in (no_such_option, key_mistake, several_values, not_understood):
        text = explain(error)
        if text is not None:
            return text
    text = re.sub(r"\n +(full_key: *|object_type=.*)(?=\n|$)", "", str(error))
    if re.search(r"No earlier Group Default for '\S+@experiment\.", text):
        text += f"\n{FOR_EXPERIMENT}"
    return text


def no_such_option(error: BaseException) -> str | None:
    """Explain Hydra's error for an option that its group does not have."""
    missing = getattr(error, "missing_cfg_file", None)
    if not missing:
        return None
    group, _, choice = missing.rpartition("/")
    if missing == "hydra/sweeper/sampler/tpe":
        install = invocation.pip_install("optuna")
        return f"sweep=optuna needs Hydra's plugin for Optuna.\nType {install}."
    if missing == "hydra/launcher/joblib":
        return f"{group}={choice}: to run several jobs at once, type sweep.at_once=N instead."
    options = getattr(error, "options", None)  # None for a list of choices, as in callbacks=[a,b]
    if not options or group == "hydra/launcher":  # a sweep does not support Hydra's own launchers
        options = configs.options(group)
    hint = did_you_mean(choice.removesuffix(".yaml"), options)
    return f"{group}={choice}: not a valid choice.{hint}\nChoose one of: {', '.join(options)}."


def key_mistake(error: BaseException) -> str | None:
    """Explain Hydra's error for an unknown key, or for a key that Hydra cannot set."""
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
    typed = arguments.with_one_plus(ambiguous[1])
    return (
        f"{typed}: several values need a sweep. Type -m {typed}.\n"
        "Or type 'key=[1,2]' for a list, or \"key='1,2'\" for one value with a comma."
    )


def not_understood(error: BaseException) -> str | None:
    """Explain a setting that Hydra cannot parse."""
    override = getattr(error, "override", None)
    if override is None and "Error when parsing" not in str(error):
        return None
    typed = override or str(error).partition("string: ")[2].partition(" out of")[0]
    hint = "" if "=" in typed else did_you_mean(typed, settings.TASKS)
    if typed in settings.TASKS:
        return f"{typed}: put the task first, or type task={typed}."
    return (
        f"{typed}: this cannot be parsed.{hint} Type settings as key=value, as in epochs=3, and "
        "lists as 'key=[1,2]'.\n"
        "Put quotes around a value with special characters, inside the shell's quotes: "
        "\"dataset.path='my täble.csv'\"."
    )


def no_such_key(key: str, config: Mapping[str, Any]) -> str:
    """Explain a misspelled key, with a hint about the right one."""
    hint = hint_for(key, config)
    if configs.options(key):  # such as experiment
        hint = f" {FOR_EXPERIMENT}"
    group = key.rpartition(".")[0]
    node = settings.value_of(config, group)
    keys = []
    if isinstance(node, dict) and not is_replaced(group) and "Did you mean" not in hint:
        keys = [one for one in sorted(node) if one[0] != "_" and not is_interpolation(node[one])]
    advice = f"The keys of {group}: {', '.join(keys)}." if keys else "Type --help to see the keys."
    return f"{key}: no such key.{hint}\n{advice}"


def is_replaced(group: str) -> bool:
    """Return whether the command line names another class for this group, with other keys."""
    return any(argument.startswith(f"{group}._target_=") for argument in sys.argv)


def hint_for(key: str, config: Mapping[str, Any]) -> str:
    """Return a hint for an unknown key: another option's key, a similar key, or how to add it."""
    group, _, last = key.rpartition(".")
    to_add = f" To pass your own argument, type +{key}=..."
    if is_replaced(group):
        return to_add
    keys = flat(config)
    target = str(keys.get(f"{group}._target_", ""))
    is_own = target != "" and not target.startswith(("stoker.", "torch."))
    takes_more = group in ("metrics", settings.GROUP_OF_MANY)
    is_apart = is_own or takes_more or group.startswith("hydra")
    siblings = dict(settings.ALIASES)
    elsewhere: dict[str, str] = {}
    for name in (*keys, *config):
        place, _, end = name.rpartition(".")
        if place == group:
            siblings[end] = name
        elif is_apart or place.startswith("callbacks."):  # rarely what was meant
            continue
        elif not target or end == last:
            elsewhere.setdefault(end, name)
    if last not in siblings | elsewhere and not is_own:
        for path in sorted(configs.FOLDER.glob(f"{group or '*'}/*.yaml")):
            if last in list(OmegaConf.load(path)):
                option = f"{path.parent.name}={path.stem}"
                return f" This is a key of {option}: type {option} {path.parent.name}.{last}=..."
    if takes_more:
        to_add = f" Type +{key}._target_=... to add your own."
    elif target.startswith("stoker.") or not target:
        to_add = ""
    hint = did_you_mean(last, siblings, shown=siblings.__getitem__)
    return hint or did_you_mean(last, elsewhere, shown=elsewhere.__getitem__) or to_add
