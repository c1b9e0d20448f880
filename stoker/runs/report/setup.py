"""The settings of a run, and the commands to repeat and use it."""

import itertools
import math
import re
from typing import Any

from omegaconf import OmegaConf

from stoker import configs
from stoker.command.dotted import plain
from stoker.command.shell import command, command_for, replay_command, setting
from stoker.command.trust import own_packages
from stoker.data.typed import is_number
from stoker.runs import saved_config
from stoker.runs.report.inputs import Run, checkpoints
from stoker.trainer.number_format import significant

MOST_ENTRIES = 300  # maximum settings shown
OF_TEXT = "stoker.data.text."


def settings(run: Run) -> list[tuple[str, Any, bool]]:
    """Return (key, value, whether it was typed) for each setting."""
    typed = {override.lstrip("+").partition("=")[0] for override in run.overrides or []}
    return [
        (key, value, key in typed)
        for key, value in itertools.islice(run.config.items(), MOST_ENTRIES)
        if not re.fullmatch(r"\$\{\w+\}", str(value))  # refers to another key
    ]


def origin(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs: how the run was started, and how to continue it."""
    script = saved_config.script_of(run.config)
    if script is not None:
        return [("Started by this script; run it again to resume", script)]
    if run.overrides is None:
        return []
    again = command(run.overrides, setting("run_dir", run.folder))
    commands = [("Started by", command(run.overrides))]
    rate = run.config.get("optimizer.lr")
    if run.result.will_repeat and is_number(rate):
        anew = [override for override in run.overrides if not override.startswith("run_dir=")]
        lower = min(rate / 10, usual_rate(run))
        slower = command(anew, f"optimizer.lr={significant(lower, 6)}")
        commands.append(("Train again with a lower learning rate", slower))
        if run.result.replay:
            again = replay_command(run.overrides, run.result.replay)
            commands.append(("Replay the failed step", again))
    elif run.state == "failed":
        commands.append(("Resume the run once the cause is fixed", again))
    elif run.state == "stopped":
        commands.append(("Resume the run", again))
    return commands


def usual_rate(run: Run) -> float:
    """Return the default learning rate of the run's optimizer, or infinity if it is your own."""
    for path in (configs.FOLDER / "optimizer").glob("*.yaml"):
        option = plain(OmegaConf.load(path))
        if option["_target_"] == run.config.get("optimizer._target_"):
            return float(option["lr"])
    return math.inf


def commands(run: Run) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs: how to evaluate and to use the model of a run."""
    if saved_config.script_of(run.config) is not None or not checkpoints(run.folder):
        return []
    packages = trusted(run)
    splits = {name.partition("/")[0] for name in run.result.numbers}
    splits |= (run.result.samples or run.status.samples or {}).keys()
    split = next((name for name in ("test", "val") if name in splits), "train")
    use = ("Make predictions", command_for("predict", run.folder, packages, f"split={split}"))
    if str(run.config.get("dataset._target_")).startswith(OF_TEXT):
        use = ("Generate text", command_for("generate", run.folder, packages))
    return [("Evaluate it", command_for("evaluate", run.folder, packages)), use]


def trusted(run: Run) -> list[str]:
    """Return the packages that are trusted only because the user typed them for this run."""
    return [name for name in own_packages(run.overrides or []) if name]
