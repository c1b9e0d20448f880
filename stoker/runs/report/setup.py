"""How to repeat a run: its settings against the defaults, and the commands that use it."""

import re
from typing import Any

from stoker.command import dotted, exit_codes
from stoker.command.defaults import of_choices
from stoker.command.shell import command, setting
from stoker.command.trust import own_packages
from stoker.configs import file_of
from stoker.runs import saved_config
from stoker.runs.report import words
from stoker.runs.report.inputs import Run, checkpoints
from stoker.runs.result import command_for
from stoker.trainer.readable import significant
from stoker.trainer.typed import is_number

MOST_ENTRIES = 300  # settings shown
MISSING = "???"  # in OmegaConf
OF_FILES = r"stoker\.data\.(images\.|tables\.|datasets\.(?!synthetic))"  # task=predict input=PATH
OF_TEXT = "stoker.data.text."


def settings(run: Run) -> dict[str, Any]:
    """Return the settings of the run, and which differ from the defaults, if those are known."""
    is_script = saved_config.script_of(run.config) is not None
    defaults = {} if is_script else defaults_of(run.overrides or [])
    rows = []
    for key, value in list(run.config.items())[:MOST_ENTRIES]:
        default = defaults.get(key, MISSING)
        if value == default and re.fullmatch(r"\$\{\w+\}", str(value)):
            continue  # repeats another key, which has its own line
        is_changed = bool(defaults) and value != default and key != "run_dir"
        rows.append((key, value, default, is_changed))
    return {
        "rows": rows,
        "has_defaults": bool(defaults),
        "chosen": list(filter(is_choice, run.overrides or [])),
    }


def is_choice(override: str) -> bool:
    """Whether this chooses files of a group, as in model=cnn or callbacks=[doctor,ema]."""
    match = re.fullmatch(r"(\w+)=\[?(\w+(?:,\w+)*)\]?", override)
    if match is None:
        return False
    return all(file_of(f"{match[1]}/{name}") is not None for name in match[2].split(","))


def defaults_of(overrides: list[str]) -> dict[str, Any]:
    """Return the defaults for the options of the run; {} if they cannot be composed."""
    try:
        return dotted.flat(of_choices(list(filter(is_choice, overrides))))
    except Exception:  # Hydra may raise anything, and the report can do without the marks
        return {}


def origin(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) of what started the run, and of what continues it."""
    script = saved_config.script_of(run.config)
    if script is not None:
        return [("Started by a script, which also resumes it", script)]
    if run.overrides is None:
        return []
    commands = [("Started by", command(run.overrides))]
    again = command(run.overrides, setting("run_dir", run.folder))
    rate = run.config.get("optimizer.lr")
    if run.result.will_repeat and is_number(rate):
        anew = [override for override in run.overrides if not override.startswith("run_dir=")]
        tenth = significant(rate / 10, 6)
        slower = command(anew, f"optimizer.lr={tenth}")
        commands.append(("Train it with a tenth of the learning rate", slower))
    elif run.state == "failed" and run.result.code == exit_codes.TRAINING_ERROR:
        commands.append(("Resume it once the cause is fixed", again))
    elif run.state == "stopped":
        commands.append(("Resume it", again))
    _, more = words.without_commands(run.result.error or "")
    return [*commands, *more]


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) of what the model of a run can do."""
    if saved_config.script_of(run.config) is not None or not checkpoints(run.folder):
        return []
    packages = trusted(run)
    samples = run.result.samples or {}
    split = next((name for name in ("test", "val") if name in samples), "train")
    dataset = str(run.config.get("dataset._target_"))
    option = ["split=val"] if split == "val" else []
    listed = [("Evaluate it", command_for("evaluate", run.folder, packages, *option))]
    if dataset.startswith(OF_TEXT):
        listed.append(("Generate with it", command_for("generate", run.folder, packages)))
    else:
        source = "input=PATH" if re.match(OF_FILES, dataset) else f"split={split}"
        listed.append(("Predict with it", command_for("predict", run.folder, packages, source)))
    if dataset.startswith("stoker.") or run.evaluation is not None:
        # The inputs of a model for arbitrary samples are unknown.
        listed.append(("Export it", command_for("export", run.folder, packages, "format=onnx")))
    return listed


def trusted(run: Run) -> list[str]:
    """Return the packages that the user trusted for this run, except our own."""
    return [name for name in own_packages(run.overrides or []) if name]
