"""Read the options and settings on the command line, and check their syntax."""

import argparse
import contextvars
import re
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser  # private: Hydra's command-line options
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from stoker import configs, project
from stoker.command import settings
from stoker.command.dotted import flat, plain
from stoker.command.shell import setting
from stoker.trainer.errors import UserError, quoted

OPTIONS = {"-h", "--help", "-m", "--multirun", "-c", "--cfg", "--resolve", "-p", "--package"}
OPTIONS |= {"-i", "--info", "-sc", "--shell-completion", "--hydra-help", "--version"}
# Settings whose values Hydra cannot read unless they are quoted.
AS_TYPED = r"prompt=(?s:.+)|dataset\.(delimiter|decimal|marks)=[^'\"].*"
NUMBER = r"(?i)[-+]?([\d_]*\.?[\d_]+\.?(e[-+]?\d+)?|inf|nan)"  # for Hydra, not a string
# Settings that Python code adds; they are treated as if they had been typed.
typed_in_python: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "typed_in_python", default=()
)


def typed() -> list[str]:
    """Return the settings of this job as they were typed, with interpolations unresolved."""
    in_python = list(typed_in_python.get())
    if not HydraConfig.initialized():
        return in_python
    overrides = plain(HydraConfig.get().overrides)["task"]
    return [*map(with_one_plus, overrides), *in_python]


def with_one_plus(override: str) -> str:
    """Remove the second plus that `for_hydra` adds to a dotted key."""
    return re.sub(r"^\+\+(?=\w+\.)", "+", override)


def typed_keys() -> set[str]:
    """Return the keys of all typed settings, including the keys inside a value like key={...}."""
    keys = set()
    for override in typed():
        key, _, value = override.partition("=")
        key = key.lstrip("+")
        keys.add(key)
        if value.startswith("{"):
            inside = OverridesParser.create().parse_override(override).value()
            keys.update(flat({key: inside}))
    return keys


def settings_of_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the settings of Hydra itself, which each job of a sweep needs besides its own."""
    return [argument for argument in arguments if re.match(r"[+~]*hydra[./]", argument)]


def choices(arguments: Sequence[str]) -> list[str]:
    """Return the chosen options, such as ["model=cnn"].

    If a sweep lists several options of a group, only the first one is returned.
    """
    chosen = []
    for argument in arguments:
        group, _, value = argument.lstrip("+").partition("=")
        if configs.is_group(group) and value:
            option = value if value.startswith("[") else value.partition(",")[0]
            chosen.append(f"{group}={option}")
    return chosen


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in the form that Hydra expects.

    `stoker plan` is short for `stoker task=plan`, and likewise for every task. A task that takes a
    run accepts `dataset.root=DIR` even if the default data set has no `root`. A plus before a
    dotted key adds or replaces a value. The project's experiment, its `configs/` and its runs
    folder are added. A prompt and settings such as `dataset.delimiter` are quoted, so that Hydra
    keeps them as typed, and so are strings like run_dir=1e3, which Hydra would read as a number.
    """
    if arguments and arguments[0] in settings.TASKS:
        arguments = [f"task={arguments[0]}", *arguments[1:]]
    takes_run = not {f"task={task}" for task in settings.WITH_RUN}.isdisjoint(arguments)
    # `model=mlp` may already set a key that your own model takes, so let `+` replace it.
    replacing = r"\+?\w+\." if takes_run else r"\+\w+\."
    given = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if re.fullmatch(AS_TYPED, argument):
            value = quoted(value)
        elif isinstance(settings.limit_of(key.lstrip("+")), settings.Text):
            # In a sweep, a setting can have several values.
            values = [quoted(one) if re.fullmatch(NUMBER, one) else one for one in value.split(",")]
            value = ",".join(values)
        if equals and re.match(replacing, key):
            key = f"++{key.lstrip('+')}"
        given.append(f"{key}{equals}{value}")
    if not takes_run:
        given = [*of_project(arguments), *given]
    return [*given, *search_path()]


def of_project(arguments: Sequence[str]) -> list[str]:
    """Return the overrides that come from the project file, except for keys that were typed."""
    here = project.current()
    keys = {argument.partition("=")[0].lstrip("+~") for argument in arguments}
    added = []
    if here.experiment is not None and "experiment" not in keys:
        added.append(f"experiment={here.experiment}")
    if here.runs != "runs" and "hydra.sweep.dir" not in keys:
        folder = Path(here.runs, "${now:%Y-%m-%d_%H-%M-%S-%f}-sweep")
        added.append(setting("hydra.sweep.dir", folder))
    return added


def search_path() -> list[str]:
    """Return a list of the override that adds the project's `configs/` folders; [] without any."""
    added = [quoted(f"file://{folder}") for folder in configs.folders()[1:]]
    return [f"hydra.searchpath=[{','.join(added)}]"] if added else []


def check(arguments: Sequence[str]) -> None:
    """Raise UserError for mistakes that Hydra would miss, or would report once per job."""
    is_sweep = not {"-m", "--multirun"}.isdisjoint(arguments)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if argument.startswith("-") and key not in OPTIONS:
            raise UserError(
                f"{argument}: no such option. Settings are typed without dashes, as in "
                "device=cpu. Type --help to see all settings."
            )
        if key == "run_dir" and is_sweep and value != "null":
            raise UserError(
                f"{argument}: this setting is for a single run. For a sweep, type "
                "hydra.sweep.dir=DIR."
            )
        if re.fullmatch(r"hydra/launcher|sweep([./].*)?", key) and not is_sweep:
            raise UserError(f"{argument}: this setting is for sweeps. Add -m to start a sweep.")
        if equals and configs.is_group(key.lstrip("+")):
            check_group(argument, key.lstrip("+"), value)


def check_values(arguments: Sequence[str]) -> None:
    """Raise UserError for an option without its value, or with a wrong one."""
    parser = get_args_parser()
    parser.exit_on_error = False
    try:
        parser.parse_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}. Type --hydra-help to see all options.") from None


def check_group(argument: str, key: str, value: str) -> None:
    """Raise UserError unless the value is one option, or a list for a group that accepts lists."""
    has_plus = argument.startswith("+") and "/" not in key
    is_name = not re.fullmatch(r"[\[{].*|null|true|false|[\d.]+", value)
    takes_list = value.startswith("[") and key == settings.GROUP_OF_MANY
    if has_plus or not (is_name or takes_list):
        options = ", ".join(configs.options(key))
        raise UserError(f"{argument}: this is a group. Type {key}=NAME, with one of: {options}.")
