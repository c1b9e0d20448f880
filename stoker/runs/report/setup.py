"""How to repeat and use a run: the settings that differ from the defaults, and commands."""

import itertools
import re
from typing import Any

from stoker.command import dotted
from stoker.command.defaults import of_choices
from stoker.command.shell import command, setting
from stoker.command.trust import own_packages
from stoker.configs import file_of
from stoker.runs import saved_config
from stoker.runs.report import words
from stoker.runs.report.inputs import Run, checkpoints
from stoker.runs.result import command_for
from stoker.trainer.number_format import significant
from stoker.trainer.typed import is_number

MOST_ENTRIES = 300  # settings shown
MISSING = "???"  # how OmegaConf marks a missing value
OF_FILES = r"stoker\.data\.(images\.|tables\.|datasets\.(?!synthetic))"  # predict takes input=PATH
OF_TEXT = "stoker.data.text."


def settings(run: Run) -> dict[str, Any]:
    """Return the settings of the run, marking those that differ from the defaults if known."""
    is_script = saved_config.script_of(run.config) is not None
    defaults = {} if is_script else defaults_of(run.overrides or [])
    rows = []
    for key, value in itertools.islice(run.config.items(), MOST_ENTRIES):
        default = defaults.get(key, MISSING)
        if value == default and re.fullmatch(r"\$\{\w+\}", str(value)):
            continue  # a reference to another key, which has its own line
        is_changed = bool(defaults) and value != default and key != "run_dir"
        rows.append((key, value, default, is_changed))
    return {
        "rows": rows,
        "has_defaults": bool(defaults),
        "chosen": list(filter(is_choice, run.overrides or [])),
    }


def is_choice(override: str) -> bool:
    """Return whether an override chooses options, like model=cnn or callbacks=[doctor,ema]."""
    match = re.fullmatch(r"(\w+)=\[?(\w+(?:,\w+)*)\]?", override)
    if match is None:
        return False
    group, options = match.groups()
    files = [file_of(f"{group}/{option}") for option in options.split(",")]
    return None not in files


def defaults_of(overrides: list[str]) -> dict[str, Any]:
    """Return the defaults for the options of the run, or {} if they cannot be composed."""
    try:
        return dotted.flat(of_choices(list(filter(is_choice, overrides))))
    except Exception:  # Hydra can raise any exception, and the report does not need the defaults
        return {}


def origin(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs: how the run was started, and how to continue it."""
    script = saved_config.script_of(run.config)
    if script is not None:
        return [("Started by a script, which also resumes the run", script)]
    if run.overrides is None:
        return []
    again = command(run.overrides, setting("run_dir", run.folder))
    if run.state == "stopped" and again == command(run.overrides):
        return [("Started by this command, which also resumes the run", again)]
    commands = [("Started by", command(run.overrides))]
    rate = run.config.get("optimizer.lr")
    if run.result.will_repeat and is_number(rate):
        anew = [override for override in run.overrides if not override.startswith("run_dir=")]
        default = defaults_of(run.overrides).get("optimizer.lr")
        lower = rate / 10
        if is_number(default):
            lower = min(lower, default)
        slower = command(anew, f"optimizer.lr={significant(lower, 6)}")
        commands.append(("Train again with a lower learning rate", slower))
    elif run.state == "failed":
        commands.append(("Resume the run once the cause is fixed", again))
    elif run.state == "stopped":
        commands.append(("Resume the run", again))
    _, more = words.without_commands(run.result.error or "")
    return [*commands, *more]


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) for each task that uses the model of a run."""
    if saved_config.script_of(run.config) is not None or not checkpoints(run.folder):
        return []
    packages = trusted(run)
    samples = run.result.samples or {}
    split = "train"
    for name in ("val", "test"):
        if name in samples:
            split = name
    dataset = str(run.config.get("dataset._target_"))
    listed = [["Evaluate it", "evaluate"]]
    if split == "val":
        listed[0].append("split=val")
    if dataset.startswith(OF_TEXT):
        listed.append(["Generate text", "generate"])
    else:
        source = "input=PATH" if re.match(OF_FILES, dataset) else f"split={split}"
        listed.append(["Make predictions", "predict", source])
    if dataset.startswith("stoker.") or run.evaluation is not None:
        # If samples have an arbitrary structure, the inputs of the model are unknown.
        listed.append(["Export it", "export", "format=onnx"])
    return [
        (purpose, command_for(task, run.folder, packages, *options))
        for purpose, task, *options in listed
    ]


def trusted(run: Run) -> list[str]:
    """Return the packages that the user trusted for this run, except our own."""
    return [name for name in own_packages(run.overrides or []) if name]
