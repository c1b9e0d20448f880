"""What the user reads instead of a traceback: one to three lines for each error."""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from stoker import configs
from stoker.command import arguments, invocation, settings
from stoker.command.build import arguments_of
from stoker.command.defaults import of_choices
from stoker.command.dotted import flat
from stoker.command.references import explain_broken, reason
from stoker.trainer.errors import (
    TrainingError,
    UserError,
    did_you_mean,
    first_line,
    nearest,
    printable,
)

LONGEST = 500  # characters of a line: a value or a path may have any number
ROOM = "Make room there, and type the same command with run_dir=DIR to resume."
WHAT_TO_DO = {
    errno.ENOSPC: ROOM,
    getattr(errno, "EDQUOT", None): ROOM,
    errno.EFBIG: (
        "Raise the limit on the size of files (ulimit -f), "
        "and type the same command with run_dir=DIR."
    ),
    errno.EROFS: "Type run_dir=DIR for a folder that can be written.",
    errno.EACCES: "Type another path, or change its permissions.",
    errno.ENAMETOOLONG: "Type a shorter path.",
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
    # Hydra's MissingConfigException is an OSError without a number.
    if isinstance(error, OSError) and error.errno:
        place = f"{os.fsdecode(error.filename)}: " if error.filename is not None else ""
        reason = (error.strerror or str(error)).lower()
        return f"{place}{reason}.\n{WHAT_TO_DO.get(error.errno, '')}"
    if "Unsupported config file extension '.yml'" in str(error):
        return "configs/: an option is a .yaml file. Rename those that end in .yml."
    for explain in (
        broken_reference,
        no_such_option,
        key_mistake,
        several_values,
        not_understood,
        hydra_key,
    ):
        text = explain(error)
        if text is not None:
            return text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "\n".join(lines[:3])


def broken_reference(error: BaseException) -> str | None:
    """Explain a ${...} that Hydra needs before the config is checked."""
    if not isinstance(error.__cause__ or error, InterpolationResolutionError):
        return None
    choices = arguments.choices(sys.argv[1:])
    typed = [one for one in sys.argv[1:] if "${" in one and not one.startswith("-")]
    keys = [one for one in typed if not one.startswith("hydra")]
    text = explain_broken(OmegaConf.create(of_choices([*choices, *keys])), choices)
    return text or f"{' '.join(typed)}: {reason(error)}."


def no_such_option(error: BaseException) -> str | None:
    """Explain Hydra's error for a group without the option that was chosen."""
    missing = getattr(error, "missing_cfg_file", None)
    if not missing:
        return None
    group, _, choice = missing.rpartition("/")
    options = getattr(error, "options", None)
    is_list = options is None and group in settings.GROUPS_OF_MANY
    if is_list:  # Hydra does not name the options of a list
        options = [path.stem for path in configs.options(group)]
    if options is None:
        within = re.match(r"In '([^']+)'", str(error))  # the defaults of this file
        if within is None:
            return None
        hint = did_you_mean(choice, [path.stem for path in configs.options(group)])
        return f"configs/{within[1]}.yaml: its defaults name {missing}, which does not exist.{hint}"
    if group == "hydra/sweeper" and choice == "optuna":
        install = invocation.pip_install(choice)
        return f"sweep={choice} needs Hydra's plugin of that name.\nType {install}."
    if group == "hydra/launcher":  # propose only installed ones that have been tested
        tested = {"basic", *(path.stem for path in configs.options(group))}
        options = [option for option in options if option in tested]
    return (
        f"{group}={choice}: there is no such choice.{did_you_mean(choice, options)}\n"
        f"Type {group}= one of: {', '.join(options)}."
    )


def key_mistake(error: BaseException) -> str | None:
    """Explain Hydra's errors for an unknown key, or for adding one that exists."""
    cause = error.__cause__ or error
    if "is not in struct" in str(cause):
        usual = of_choices(arguments.choices(sys.argv[1:]))
        return no_such_key(str(getattr(cause, "full_key", "")), usual)
    change = re.match(r"Could not (append|delete)\b.*?'([\w.@/-]+)'", str(cause), re.DOTALL)
    if change is None:
        return None
    action, key = change.groups()
    if action == "delete":
        return f"~{key}: there is no such key to leave out.\n{see_help()}"
    values = [one.partition("=")[2] for one in sys.argv if one.startswith(f"+{key}=")]
    value = values[0] if values else "..."
    return f"+{key}={value}: this key exists, and + adds a new one. Type {key}={value}."


def several_values(error: BaseException) -> str | None:
    """Explain Hydra's error for a value with commas outside a sweep."""
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'\n", str(error))
    if ambiguous is None:
        return None
    typed = ambiguous[1]
    key, _, value = typed.lstrip("+").partition("=")
    start = f"{typed}: several values make a sweep. Type"
    if settings.record(key).path:
        return f"{start} \"{key}='{value}'\" for one path with a comma in it."
    return f"{start} -m {typed}, or for one list '{key}=[{value}]'."


def not_understood(error: BaseException) -> str | None:
    """Explain an error of Hydra's grammar."""
    override = getattr(error, "override", None)
    if override is None and "Error when parsing" not in str(error):
        return None
    typed = override or str(error).partition("string: ")[2].partition(" out of")[0]
    key, _, value = typed.partition("=")
    quoted = "\"dataset.path='my täble.csv'\""
    if value and "'" not in value and '"' not in value:
        quoted = f"\"{key}='{value}'\""
    return (
        f"{typed}: this is not understood. Settings are key=value, as in epochs=3, "
        "and lists 'key=[1,2]'.\n"
        f"Put a value with unusual characters in quotes inside those of the shell: {quoted}."
    )


def hydra_key(error: BaseException) -> str | None:
    """Explain an error about one key, such as a misspelt key of Hydra."""
    cause = error.__cause__ or error
    key = getattr(cause, "full_key", None)
    if not key:
        return None
    unknown = re.match(r"Key '\w+' not in '\w+'\.?(?: Did you mean: '(\w+)')?", str(cause))
    if "list index out of range" in str(cause):
        name = re.sub(r"\[\d+\]$", "", key)
        return f"{key}: there is no such entry. Type the whole list: '{name}=[...]'."
    if unknown is None:
        return f"{key}: {first_line(cause)}."
    hint = ""
    if unknown[1]:
        hint = f" Did you mean '{key.rpartition('.')[0]}.{unknown[1]}'?"
    return f"{key}: Hydra has no such key.{hint}"


def no_such_key(key: str, config: Mapping[str, Any]) -> str:
    """Explain a misspelt key, with a hint at the right one."""
    advice = arguments.type_instead(key)
    if advice is not None:
        return f"{key}: there is no such key. {advice}"
    return f"{key}: there is no such key.{hint_for(key, config)}\n{see_help()}"


def hint_for(key: str, config: Mapping[str, Any]) -> str:
    """Return a hint for an unknown key: another option's key, a similar one, or ''."""
    group, _, last = key.rpartition(".")
    if any(argument.startswith(f"{group}._target_=") for argument in sys.argv):
        return f" Type +{key}=... for an argument of your own {group}."
    nearby: dict[str, str] = {}
    anywhere: dict[str, str] = {}
    for name in (*flat(config), *config):
        place, _, end = name.rpartition(".")
        if not name.startswith("hydra"):
            anywhere.setdefault(end, name)
        if place == group:
            nearby[end] = name
    for place, choice in options_with(group, last):
        # A key of a callback is rarely meant.
        if group or anywhere.get(last, "callbacks.").startswith("callbacks."):
            return f" It is a key of {place}={choice}: type {place}={choice} {place}.{last}=..."
    for name, setting in settings.SETTINGS.items():
        anywhere.update(dict.fromkeys(setting.aliases, name))
    if last in anywhere:
        return f" Did you mean {anywhere[last]!r}?"
    if nearest(last, nearby, loosely=False) is None:
        with contextlib.suppress(UserError, KeyError, TypeError):
            names, _ = arguments_of(group, config[group]["_target_"])
            if last in names:
                return f" Type +{group}.{last}=..., an argument that no file gives yet."
    for loosely in (False, True):
        for whole_names in (nearby, anywhere):
            near = nearest(last, whole_names, loosely=loosely)
            if near is not None:
                return f" Did you mean {whole_names[near]!r}?"
    return ""


def options_with(group: str, key: str) -> list[tuple[str, str]]:
    """Return (group, option) of each option with this key, in this group or in any."""
    groups = [group]
    if not group:
        groups = sorted({path.parent.name for path in configs.FOLDER.glob("*/*.yaml")})
    return [
        (name, path.stem)
        for name in groups
        for path in configs.options(name)
        if f"\n{key}:" in path.read_text(encoding="utf-8", errors="replace")
    ]


def see_help() -> str:
    """Return the line that points to the help."""
    program = " ".join(invocation.program())
    return f"Type {program} --help to see the keys."
