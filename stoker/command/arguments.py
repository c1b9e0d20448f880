"""Read the command line: options, settings, and mistakes in how either is written."""

import contextvars
import re
from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser

from stoker import configs, project
from stoker.command import invocation, settings
from stoker.command.dotted import flat, plain
from stoker.command.shell import quoted, setting
from stoker.trainer import launch
from stoker.trainer.errors import UserError, did_you_mean, is_one_slip

# Hydra's options, and whether each needs a value.
OPTIONS = {
    "--help": False,
    "--multirun": False,
    "--cfg": True,
    "--resolve": False,
    "--package": True,
    "--config-dir": True,
    "--config-path": True,
    "--config-name": True,
    "--experimental-rerun": True,
    "--info": False,
    "--hydra-help": False,
    "--run": False,
    "--shell-completion": False,
    "--version": False,
}
SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-c": "--cfg",
    "-p": "--package",
    "-cd": "--config-dir",
    "-cp": "--config-path",
    "-cn": "--config-name",
    "-i": "--info",
    "-r": "--run",
    "-sc": "--shell-completion",
}
# What to type here for the options that other programs have for a device and a precision.
ELSEWHERE = {
    "device=cpu, device=auto for a GPU, or device=cuda:1 for one of several": (
        "accel", "accelerator", "cpu", "cuda", "disable_cuda", "gpu", "gpu_id", "mps",
        "no_accel", "no_cuda", "no_gpu", "no_mps", "use_cuda", "use_gpu", "use_mps",
    ),
    "strategy=ddp devices=2 for two GPUs": (
        "gpus", "n_gpu", "n_gpus", "ngpus", "nproc_per_node", "num_gpus",
    ),
    "precision=bf16, or precision=fp16": ("amp", "bf16", "fp16", "half", "use_amp"),
    "'groups=[{match: \"*\", weight_decay: 0.01}]'": ("decay_all",),
}  # fmt: skip
# Settings that count as typed although there is no command line.
typed_in_python: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "typed_in_python", default=()
)


def typed() -> list[str]:
    """Return the settings of this job as they were typed, with interpolations unresolved."""
    in_python = list(typed_in_python.get())
    if not HydraConfig.initialized():
        return in_python
    return [*plain(HydraConfig.get().overrides)["task"], *in_python]


def typed_keys() -> set[str]:
    """Return the keys of the settings that were typed; for key={...}, those inside."""
    keys = set()
    for override in typed():
        key, _, value = override.partition("=")
        key = key.lstrip("+")
        keys.add(key)
        if value.startswith("{"):
            inside = OverridesParser.create().parse_override(override).value()
            keys.update(flat({key: inside}))
    return keys


def typed_value(key: str) -> str | None:
    """Return the value of a key as it was typed: 1e1 for 10.0; None if it was not."""
    values = [override.partition("=")[2] for override in typed() if override.startswith(f"{key}=")]
    return values[-1] if values else None


def is_sweep(arguments: Sequence[str]) -> bool:
    """Return whether these arguments start a sweep."""
    return "-m" in arguments or "--multirun" in arguments


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether these arguments ask for the help text."""
    return "-h" in arguments or "--help" in arguments


def is_debugged(arguments: Sequence[str]) -> bool:
    """Return whether debug=true was typed, even if the config could not be composed."""
    pattern = re.compile(r"\+*debug=true", re.IGNORECASE)
    return any(pattern.fullmatch(argument) for argument in arguments)


def choices(arguments: Sequence[str]) -> list[str]:
    """Return the chosen options, as in ["model=cnn"]; for a sweep, the first one of each group."""
    chosen = []
    for argument in arguments:
        group, _, value = argument.lstrip("+").partition("=")
        if configs.is_group(group) and value:
            option = value if value.startswith("[") else value.partition(",")[0]
            chosen.append(f"{group}={option}")
    return chosen


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra needs them.

    A task that takes a run accepts `dataset.root=DIR` even if the default data set has no `root`.
    The project adds its experiment, its `configs/` and where its runs go.
    A prompt is kept character for character. `stoker plan` is short for `stoker task=plan`, and
    so on for each task.
    """
    if arguments and arguments[0] in settings.TASKS:
        arguments = [f"task={arguments[0]}", *arguments[1:]]
    given = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        given.append(f"prompt={quoted(value)}" if key == "prompt" and value else argument)
    if set(arguments) & {f"task={task}" for task in settings.WITH_RUN}:
        result = [f"++{one}" if re.match(r"\w+\.[\w.]+=", one) else one for one in given]
        return [*result, *search_path()]
    return [*of_project(arguments), *given, *search_path()]


def of_project(arguments: Sequence[str]) -> list[str]:
    """Return the overrides that the project file stands for, if they are not typed."""
    here = project.current()
    keys = {argument.partition("=")[0].lstrip("+~") for argument in arguments}
    added = []
    if here.experiment is not None and "experiment" not in keys:
        names = [path.stem for path in configs.options("experiment")]
        if here.experiment not in names:
            raise UserError(
                f"{here.file}: there is no experiment {here.experiment}."
                f"{did_you_mean(here.experiment, names)} Type one of: {', '.join(names)}."
            )
        added.append(f"experiment={here.experiment}")
    if here.file is not None and "hydra.sweep.dir" not in keys:
        folder = f"{here.runs_folder}/${{now:%Y-%m-%d_%H-%M-%S}}-sweep"
        added.append(setting("hydra.sweep.dir", folder))
    return added


def search_path() -> list[str]:
    """Return the override that adds the `configs/` of the project, if it has some."""
    added = [quoted(f"file://{folder}") for folder in configs.folders()[1:]]
    return [f"hydra.searchpath=[{','.join(added)}]"] if added else []


def check(arguments: Sequence[str]) -> None:
    """Raise UserError for what Hydra would misunderstand, or report only in each job of a sweep."""
    sweep = is_sweep(arguments)
    if sweep and launch.world_size() > 1:
        program = " ".join(invocation.program())
        raise UserError(
            f"-m: a sweep starts its runs itself. Type {program} -m ... strategy=ddp devices=N."
        )
    check_options(arguments)
    for argument in arguments:
        if argument.startswith("="):
            raise UserError(
                f"{argument}: the key before the = is missing. "
                "Settings are key=value, as in epochs=3."
            )
        check_place(argument, sweep)
        key, equals, value = argument.partition("=")
        if equals and configs.is_group(key.lstrip("+")):
            check_group(argument, key, value, sweep)


def check_options(arguments: Sequence[str]) -> None:
    """Raise UserError for an unknown option, or one without the value that it needs."""
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        following = arguments[position + 1 : position + 2]
        name, _, value = argument.partition("=")
        name = SHORT.get(name, name)
        if name not in OPTIONS:
            refuse_option(argument, following)
        if OPTIONS[name] and not (value or following):
            raise UserError(f"{argument}: this option needs a value. Type {name} VALUE.")


def refuse_option(argument: str, following: Sequence[str]) -> None:
    """Raise UserError for an unknown option, such as the `--epochs=3` of other programs."""
    name, _, value = argument.partition("=")
    advice = type_instead(name)
    if advice is not None:
        raise UserError(f"{argument}: there is no such option. {advice}")
    if re.fullmatch(r"-\w{3,}(\.\w+)*", name):
        raise UserError(f"{argument}: settings have no dashes. Type {argument.lstrip('-')}.")
    for known in OPTIONS:
        if is_one_slip(name, known):
            raise UserError(f"{argument}: there is no such option. Did you mean {known!r}?")
    if not value and following and not re.match("-|.*=", following[0]):
        value = following[0]  # as in --model cnn
    setting = f"{name.lstrip('-').replace('-', '_')}={value or '...'}"
    raise UserError(
        f"{argument}: there is no such option. Settings have no dashes: type {setting}."
    )


def type_instead(name: str) -> str | None:
    """Return what to type for an option or a key of other programs, such as `--disable-cuda`."""
    for instead, names in ELSEWHERE.items():
        if name.lower().lstrip("-").replace("-", "_") in names:
            return f"Type {instead}."
    return None


def check_place(argument: str, sweep: bool) -> None:
    """Raise UserError for a run's setting typed for a sweep, or a sweep's typed for a run."""
    key, _, value = argument.partition("=")
    if key == "run_dir" and sweep and value != "null":
        raise UserError(
            f"{argument}: this names a single run. For a sweep, type hydra.sweep.dir=DIR."
        )
    is_for_sweep = re.fullmatch(r"hydra/launcher|sweep([./].*)?", key)
    if is_for_sweep and not sweep and launch.world_size() == 1:
        example = argument
        if key == "hydra/launcher" or "." in key:
            example += " seed=0,1"
        raise UserError(
            f"{argument}: this is for the jobs of a sweep. Type -m as well, as in -m {example}."
        )


def check_group(argument: str, key: str, value: str, sweep: bool) -> None:
    """Raise UserError unless this chooses one option of a group, or several if it takes several."""
    if not (configs.FOLDER / key.lstrip("+")).is_dir() and not key.lstrip("+").startswith("hydra/"):
        raise UserError(
            f"{argument}: a run has no group of this name. Put the options into a folder of "
            f"configs/ that --help lists,\nor settings of several groups into configs/experiment/."
        )
    if key.startswith("+"):
        raise UserError(
            f"{argument}: this group has an option already, and + adds one. "
            f"Type {argument.lstrip('+')}."
        )
    options = [path.stem for path in configs.options(key)]
    if value == "null" and key != "experiment":  # experiment is null by default
        raise UserError(
            f"{argument}: this is a group, and needs an option. "
            f"Type {key}= one of: {', '.join(options)}."
        )
    if "," in value and not sweep and not value.startswith("["):
        raise UserError(f"{argument}: several options make a sweep. Type -m {argument}.")
    if not value.startswith("["):
        return
    names = re.findall(r"[\w-]+", value) or options
    if key not in settings.GROUPS_OF_MANY:
        several = names if len(names) > 1 else options[:2]
        raise UserError(
            f"{argument}: this is a group, and takes one option. "
            f"Type {key}={names[0]}, or for a sweep -m {key}={','.join(several)}."
        )
    if len(set(names)) < len(names):
        raise UserError(f"{argument}: an option is given twice. Type it once.")
