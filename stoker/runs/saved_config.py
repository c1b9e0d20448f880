"""The config.yaml of a run of which nothing is known: read as plain data, and made one of this machine."""

import json
import re
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from stoker import configs
from stoker.command import arguments, check, defaults, keys, settings
from stoker.command.build import check_nested, is_on, without_downloads
from stoker.runs.directory import CONFIG, TYPED
from stoker.runs.result import are_overrides
from stoker.trainer import files
from stoker.trainer.errors import UserError, did_you_mean

# Of a config.yaml: bytes, levels of nesting, and values after each ${...} is replaced. Ours have 3 KB, 4 and 100.
MOST_YAML, MOST_LEVELS, MOST_VALUES = 2**17, 20, 10_000
MOST_DIGITS = (
    1000  # of a number: Python prints none of more than 4,300 decimal ones, and 0x... may have any
)
MOST_NAMES = 3  # of runs that are named
KEY_PATH = r"\$\{[A-Za-z_][\w.]*\}"


def check_folder(folder):
    """UserError where a run directory is wanted, and this is none."""
    path = Path(folder)
    if path.is_file():
        found = next((part for part in path.parents if (part / "config.yaml").is_file()), "DIR")
        raise UserError(f"run={folder}: this is a file. Type run={found}.")
    if not path.is_dir():
        hint = did_you_mean(folder, path.parent.glob("*"))
        raise UserError(f"run={folder}: there is no such folder.{hint} Type run=DIR.")


def of_this_machine(cfg):
    """The config of the run directory `run`, for a task that trains nothing, on this machine: it may be anybody's.

    Its data may lie elsewhere here, and for an evaluation be other data. What only a training needs is left out, and
    what reaches out of the run directory; the settings of the loaders are the defaults, unless they were typed or
    data had to be streamed.
    """
    typed = arguments.typed_keys()
    if cfg.run is None:
        raise UserError(f"task={cfg.task} needs a run directory. Type run={cfg.run_dir or 'DIR'}.")
    check_folder(cfg.run)
    saved = load_config("run", cfg.run)
    before = keys.flat(saved)
    for key in sorted(typed):
        if cfg.task not in settings.record(key).tasks and "${" not in str(before.get(key)):
            takes = ", ".join(f"{name}=" for name in settings.keys_of(cfg.task))
            raise UserError(
                f"{key}: task={cfg.task} takes the run's own settings, beside device=, {takes}."
            )
    try:
        of_the_task = [
            key for key, setting in settings.SETTINGS.items() if "train" not in setting.tasks
        ]
        saved = {
            **defaults.defaults(),
            **saved,
            **dict.fromkeys(of_the_task),
            "run_dir": str(cfg.run),
        }
        saved |= {"resume": "auto", "device": cfg.device, "strategy": "single", "compile": False}
        if {"dataset", "dataset._target_"} & typed:
            saved["dataset"] = OmegaConf.to_container(cfg.dataset, resolve=True)
            typed = {key for key in typed if not key.startswith("dataset")}
        everywhere = {key for key in typed if settings.record(key).tasks == settings.TASKS}
        typed = typed.difference(of_the_task, everywhere)
        keys.put(saved, {key: OmegaConf.select(cfg, key) for key in typed})
        own = resolved("run", cfg.run, saved)
        check.check_types("", own, resolved("run", cfg.run, defaults.defaults()))
        dataset = own["dataset"]
        kept = {
            name for name in settings.LOADER_KEYS if f"dataset.{name}" in arguments.typed_keys()
        }
        kept |= {"resident"} if dataset.get("resident") is False else set()
        for name in settings.LOADER_KEYS:
            if name not in kept:
                dataset.pop(name, None)
        if "download" in dataset:
            dataset["download"] = False
        if dataset.get("cache") and "dataset.cache" not in arguments.typed_keys():
            dataset["cache"] = "auto"
        settings.check_all(own)
        for group in ("dataset", "model", "loss", "metrics", "callbacks", "trainer"):
            without_downloads(group, own[group])
        for group in ("dataset", "optimizer", "scheduler", "trainer"):
            check_nested(group, own[group])
        for group in ("metrics", "callbacks"):
            for name, node in own[group].items():
                check_nested(f"{group}.{name}", node)
    except UserError as error:
        raise of_run(cfg.run, error, "in its config.yaml, ") from None
    own["callbacks"] = evaluating_callbacks(own["callbacks"])
    return OmegaConf.create(own)


def of_run(folder, error, where=""):
    """The UserError with the run that it is about."""
    text = str(error)
    return UserError(text if text.startswith("run=") else f"run={folder}: {where}{text}")


def evaluating_callbacks(nodes):
    """{name: node} of the callbacks that an evaluation has: those that are on, and no loggers."""
    if not isinstance(nodes, dict):
        raise UserError("callbacks: this is no group of keys.")
    logging = ("stoker.runs.loggers.",)
    return {
        name: node
        for name, node in nodes.items()
        if is_on(node)
        and not (isinstance(node, dict) and str(node.get("_target_")).startswith(logging))
    }


def load_config(key, folder):
    """The config that a run was started with, as plain data; UserError where `folder` is no run directory.

    The file may be anybody's: a small mapping without tags and aliases, its ${...} still as they are.
    """
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        hint = did_you_mean(
            folder, (other for other in Path(folder).parent.glob("*") if str(other) != str(folder))
        )
        runs = sorted(file.parent for file in Path(folder).glob("*/config.yaml"))
        if runs and any((run / "job.json").exists() for run in runs):
            others = f" or another of its {len(runs)} jobs" if len(runs) > 1 else ""
            hint = f" It is a sweep: type {key}={runs[0]}{others}."
        elif runs:
            named = ", ".join(run.name for run in runs[:MOST_NAMES]) + ", ..." * (
                len(runs) > MOST_NAMES
            )
            hint = f"\nIt is a folder of runs, {named}: type {key}={runs[-1]}, or another one."
        raise UserError(
            f"{key}={folder}: there is no config.yaml in it, so it is no run directory.{hint}"
        )
    try:
        text = files.read(path, MOST_YAML).decode()
        check_yaml(text)
        config = yaml.safe_load(text)
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = (
            getattr(error, "problem", None)
            or getattr(error, "strerror", None)
            or str(error).splitlines()[0]
        )
        raise UserError(f"{key}={folder}: its config.yaml is none of a run's ({reason}).") from None
    if not isinstance(config, dict) or not all(isinstance(name, str) for name in config):
        raise UserError(
            f"{key}={folder}: its config.yaml is none of a run's (it has no keys with values)."
        )
    return config


def overrides_in(folder: Path) -> list[str] | None:
    """Return what was typed for a run, from the first line of its config.yaml; None if it does not say."""
    try:
        first = files.read(folder / CONFIG, MOST_YAML).partition(b"\n")[0]
        overrides = json.loads(first.removeprefix(TYPED.encode()))
    except (OSError, ValueError, RecursionError):
        return None
    return overrides if are_overrides(overrides) else None


def check_yaml(text):
    """ValueError for what our files do not have, and what can make a small file cost much, or build objects.

    Looked for event by event, before anything is put together.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("it has an anchor or an alias")
        if getattr(event, "tag", None):
            raise ValueError(f"it has the tag {event.tag}")
        if re.match(rf"[-+\d]\S{{{MOST_DIGITS}}}", getattr(event, "value", "")):
            raise ValueError("it has a number that is too long")
        if depth > MOST_LEVELS:
            raise ValueError(f"it has more than {MOST_LEVELS} levels")


def resolved(key, folder, config, parts=None):
    """A saved config, or these parts of it, with every ${key.path} replaced by what is there; else a UserError.

    A resolver such as ${oc.env:NAME} would take something of this machine into somebody's config. It stays only where
    this project's own config has the very same text for the key.
    """
    left = MOST_VALUES

    def value_of(name, value, depth):
        nonlocal left
        left -= 1
        check_budget(name, depth)
        if isinstance(value, dict):
            return {
                part: value_of(f"{name}.{part}".lstrip("."), item, depth)
                for part, item in value.items()
            }
        if isinstance(value, list):
            return [value_of(f"{name}.{i}", item, depth) for i, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value or is_ours(name, value):
            return value
        if re.fullmatch(KEY_PATH, value):
            return value_of(name, target_of(name, value), depth + 1)
        parts = [
            value_of(name, target_of(name, found), depth + 1)
            for found in re.findall(KEY_PATH, value)
        ]
        if "${" in re.sub(KEY_PATH, "", value) or any(
            isinstance(part, (dict, list)) for part in parts
        ):
            raise UserError(
                f"{key}={folder}: {name} in its config.yaml is {value}, which is not looked up for a file.\n"
                f"Type {name}=... for what it should be."
            )
        parts = [str(part) for part in parts]
        left -= (len(value) + sum(map(len, parts))) // 100
        check_budget(name, depth)  # before the parts are put together
        return re.sub(KEY_PATH, lambda _: parts.pop(0), value)

    def check_budget(name, depth):
        if left < 0 or depth > MOST_LEVELS:
            raise UserError(
                f"{key}={folder}: {name} in its config.yaml leads back to itself, or to too much."
            )

    def target_of(name, interpolation):
        found = config
        for part in interpolation[2:-1].split("."):
            if not isinstance(found, dict) or part not in found:
                raise UserError(
                    f"{key}={folder}: {name} in its config.yaml is {interpolation}, and there is no such key."
                )
            found = found[part]
        return found

    if parts is None:
        return value_of("", config, 0)
    for part in parts:
        if part not in config:
            raise UserError(f"{key}={folder}: its config.yaml has no {part}.")
    return {part: value_of(part, config[part], 0) for part in parts}


def for_reading(config):
    """{key: value} of this run's config, with ${key} replaced by what is there.

    Any other ${...}, such as what the environment has, stays as it is written.
    """
    found = keys.flat(config)
    for name, value in found.items():
        while isinstance(value, str) and re.fullmatch(KEY_PATH, value) and value[2:-1] in found:
            value = found[value[2:-1]]
        found[name] = value
    return found


def is_ours(name, text):
    """Whether a file in configs/ has the same text for this key of its group, such as our dataset.root."""
    group, _, rest = name.partition(".")
    folder = configs.FOLDER / group
    return bool(re.fullmatch(r"\w+\.\w+", name)) and any(
        f"\n{rest}: {text} " in path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")
    )
