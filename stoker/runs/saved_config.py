"""Read the config.yaml of a run, which is untrusted, and adapt it to this machine."""

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from stoker import configs
from stoker.command import arguments, check, defaults, dotted, settings
from stoker.command.build import (
    check_nested,
    check_node,
    is_on,
    without_downloads,
)
from stoker.data.typed import typed
from stoker.runs.directory import CONFIG
from stoker.trainer import files
from stoker.trainer.errors import UserError, printable

# Limits on a config.yaml: its bytes, levels of nesting, and characters of a value with ${...}.
# Stoker's own files have about 3 KB, 4 levels, and values of up to 100 characters.
MOST_YAML = 2**17
MOST_LEVELS = 20
MOST_TEXT = 1000
SCRIPT = "script"  # marks the config of a script's run; its other keys are only informative
LOGGERS = "stoker.runs.loggers."
ROWS = f"{LOGGERS}JSONL"  # the logger that every run has
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is 8 times as fast
KEY_PATH = r"\$\{([A-Za-z_][\w.]*)\}"

Config = dict[str, Any]


def of_this_machine(cfg: DictConfig) -> DictConfig:
    """Return the config of the run directory `run`, for a task other than training.

    On this machine, the data may be in a different folder, and an evaluation may use different
    data. Settings that only training needs are removed, and so is anything that would write outside
    the run directory. Loaders use their defaults, except for typed settings and `resident=false`.
    """
    if cfg.run is None:
        raise UserError(f"task={cfg.task} needs a run directory. Type run={cfg.run_dir or 'DIR'}.")
    changes = {
        "run_dir": str(cfg.run),
        "resume": "auto",
        "device": cfg.device,
        "strategy": "single",
        "compile": False,
    }
    with naming_run(cfg.run):
        config = changed(cfg, changes)
        adapt_dataset(config["dataset"])
        for group in ("dataset", "model", "loss", "metrics", "callbacks", "trainer"):
            without_downloads(group, config[group])
        check_parts(config)
    for name, node in list(config["callbacks"].items()):
        if not is_on(node) or is_logger(node):
            del config["callbacks"][name]
    return OmegaConf.create(config)


def to_train_again(cfg: DictConfig, run_dir: str) -> DictConfig:
    """Return the config of the run directory `run`, to train again in the folder `run_dir`.

    Nothing is written outside `run_dir`, and all loggers except metrics.jsonl are removed.
    """
    changes: Config = {"task": "train", "run_dir": run_dir, "overwrite": False, "profile": False}
    if "device" in arguments.typed_keys():
        changes["device"] = cfg.device
    with naming_run(cfg.run):
        config = changed(cfg, changes)
        if config["resume"] == "never":
            config["resume"] = "auto"
        config["sweep"] = {}  # the run is not a job of a sweep
        check.check_keys(config, defaults.defaults())
        check_parts(config)
        adapt_downloads(config["dataset"])
        for name, node in list(config["callbacks"].items()):
            if is_logger(node) and node["_target_"] != ROWS:
                del config["callbacks"][name]
            elif is_on(node):
                check_inside(f"callbacks.{name}", node, run_dir)
    return OmegaConf.create(config)


def changed(cfg: DictConfig, changes: Config) -> Config:
    """Return the config of the run directory `run`, updated with `changes` and typed settings."""
    saved = load_config("run", cfg.run)
    check_buildable(cfg.run, saved)
    check_typed(cfg, saved)
    config = resolved(merged(cfg, saved, changes))
    check.check_types("", config, resolved(defaults.defaults()))
    return config


def check_inside(key: str, node: Any, run_dir: str) -> None:
    """Raise UserError for a callback that would write outside the run directory."""
    check_node(key, node)
    if "_args_" in node:
        raise UserError(f"{key}._args_: pass these arguments by name.")
    for name in ("path", "folder"):
        value = node.get(name)
        place = Path(str(value)).resolve()
        if value is not None and not place.is_relative_to(Path(run_dir).resolve()):
            raise UserError(f"{key}.{name}={value}: this path is outside the run directory.")


def check_typed(cfg: DictConfig, saved: Config) -> None:
    """Raise UserError if you typed settings that the task takes from the run.

    A value that the run took from the environment has to be typed again. A prediction for a split
    of the run's data accepts the same settings as an evaluation.
    """
    tasks = {cfg.task}
    if cfg.task == "predict" and cfg.split is not None:
        tasks.add("evaluate")
    before = dotted.flat(saved)
    wrong = []
    for key in sorted(arguments.typed_keys()):
        is_used = not tasks.isdisjoint(settings.record(key).tasks)
        if not is_used and "${" not in str(before.get(key)):
            wrong.append(key)
    if wrong:
        settings_typed = "this setting" if len(wrong) == 1 else "these settings"
        raise UserError(
            f"{', '.join(wrong)}: task={cfg.task} uses the run's settings. Remove {settings_typed}."
        )


def merged(cfg: DictConfig, saved: Config, changes: Config) -> Config:
    """Return a saved config with the changes for a task and the settings typed for the task."""
    typed = arguments.typed_keys()
    config = {**defaults.defaults(), **saved}
    for key, setting in settings.SETTINGS.items():
        if "train" not in setting.tasks:  # a key of another task, such as `split`
            config[key] = None
    config |= changes
    if {"dataset", "dataset._target_"} & typed:
        config["dataset"] = OmegaConf.to_container(cfg.dataset, resolve=True)
        typed = {key for key in typed if not key.startswith("dataset")}
    for key in typed - changes.keys():
        tasks = settings.record(key).tasks
        if "train" in tasks and tasks != settings.TASKS:
            dotted.put(config, {key: OmegaConf.select(cfg, key)})
    return config


def adapt_dataset(dataset: Config) -> None:
    """Remove loader settings that were not typed for this task, except for resident=false."""
    typed = arguments.typed_keys()
    for name in settings.LOADER_KEYS:
        is_streamed = name == "resident" and dataset.get(name) is False
        if f"dataset.{name}" not in typed and not is_streamed:
            dataset.pop(name, None)
    adapt_downloads(dataset)


def adapt_downloads(dataset: Config) -> None:
    """Turn off downloads, and use the cache folder of this machine."""
    if "download" in dataset:
        dataset["download"] = False
    if dataset.get("cache") and "dataset.cache" not in arguments.typed_keys():
        dataset["cache"] = "auto"


def check_parts(config: Config) -> None:
    """Raise UserError for invalid settings, and for nodes that could build untrusted objects."""
    settings.check_all(config)
    for group in ("dataset", "optimizer", "scheduler", "trainer"):
        check_nested(group, config[group])
    for group in ("metrics", "callbacks"):
        for name, node in config[group].items():
            check_nested(f"{group}.{name}", node)


@contextlib.contextmanager
def naming_run(folder: str | Path) -> Iterator[None]:
    """Begin the message of each UserError with `run=FOLDER`."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if not text.startswith("run="):
            text = f"run={folder}: {text}"
        raise UserError(text) from None


def is_logger(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("_target_")).startswith(LOGGERS)


def load_config(key: str, folder: str | Path) -> Config:
    """Return the config that a run was started with, as plain data.

    Only a small mapping without tags and aliases is accepted. Any ${...} in it is left unchanged.
    Raises UserError if `folder` is not a run directory.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise UserError(
            f"{key}={folder}: not a run directory, because {path} does not exist. Type {key}=DIR."
        )
    try:
        text = files.read(path, MOST_YAML).decode()
        if not is_plain(text):
            raise ValueError
        config: Config = typed(yaml.load(text, Loader=LOADER), Config)
        str(config)  # raises ValueError for a hexadecimal number with too many digits to print
        return config
    except (OSError, ValueError, TypeError, OverflowError, RecursionError, yaml.YAMLError):
        raise UserError(
            f"{key}={folder}: its config.yaml is damaged or unreadable, or was not written by a "
            "run."
        ) from None


def script_of(config: Config) -> str | None:
    """Return the command line of the script that started a run, or None for other runs."""
    script = config.get(SCRIPT)
    return printable(script) if isinstance(script, str) else None


def check_buildable(folder: str | Path, config: Config) -> None:
    """Raise UserError if a script started the run: such a run's config cannot build anything."""
    script = script_of(config)
    if script is not None:
        raise UserError(
            f"run={folder}: this run was started by a script ({script}), so only the script can "
            "build the model.\n"
            f"In Python, stoker.init_from(model, {str(folder)!r}) loads the run's weights into a "
            "model that you build."
        )


def is_plain(text: str) -> bool:
    """Return whether a YAML text is safe to load: it builds no objects, and needs little memory.

    The parser's events are checked one by one, before anything is built.
    """
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        # An alias also has an anchor, so this rejects aliases.
        has_more = getattr(event, "anchor", None) or getattr(event, "tag", None)
        if depth > MOST_LEVELS or has_more:
            return False
    return True


def resolved(config: Config, parts: Iterable[str] | None = None) -> Config:
    """Return a saved config, or `parts` of it, with each ${key.path} replaced by the key's value.

    Raises UserError for any other ${...}, because a resolver such as ${oc.env:NAME} would copy data
    from this machine into somebody else's config. The exceptions are the settings of a data set
    that a config file on this machine contains too, such as ${oc.env:DATA_ROOT,datasets}. OmegaConf
    is not used, because it follows chains of any length.
    """
    values = dotted.flat(config)
    allowed = references_of_datasets()

    def resolve(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {part: resolve(f"{name}.{part}", item) for part, item in value.items()}
        if isinstance(value, list):
            return [resolve(name, item) for item in value]
        if not dotted.is_interpolation(value) or (name, value) in allowed:
            return value
        result = expanded(value, values)
        # "$" and "{" can come from different keys; the next reader would then resolve the result.
        if "${" in str(result) or len(str(result)) > MOST_TEXT:
            raise UserError(
                f"{name} in its config.yaml is {value[:MOST_TEXT]}, which is not resolved here: a "
                f"run may come from somebody else.\nType {name}=VALUE."
            )
        return result

    return {part: resolve(part, config.get(part)) for part in parts or config}


def references_of_datasets() -> set[tuple[str, str]]:
    """Return (key, value) for each data set's ${...} in the config files on this machine."""
    pairs: set[tuple[str, str]] = set()
    for path in itertools.chain(*(folder.glob("*/*.yaml") for folder in configs.folders())):
        # An unreadable file, or one that is not a mapping, is none of this run's business.
        with contextlib.suppress(OSError, yaml.YAMLError, AttributeError, ValueError):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "${oc." not in text:
                continue
            prefix = "" if "# @package _global_" in text else f"{path.parent.name}."
            for key, value in dotted.flat(yaml.load(text, Loader=LOADER)).items():
                if f"{prefix}{key}".startswith("dataset.") and dotted.is_interpolation(value):
                    pairs.add((f"{prefix}{key}", value))
    return pairs


def expanded(value: Any, values: Config) -> Any:
    """Return a value with each ${key} in its text replaced by the key's value.

    A ${key} that is unknown is left unchanged, and the text is not expanded beyond `MOST_TEXT`.
    """
    for _ in range(MOST_LEVELS):  # a key in an untrusted config can refer to itself
        if not dotted.is_interpolation(value) or len(value) > MOST_TEXT:
            break
        key = check.followed_key(value)
        if key is not None:
            value = values.get(key, value)
        else:
            value = re.sub(
                KEY_PATH,
                lambda match: str(values.get(match[1], match[0]))[: MOST_TEXT + 1],
                value,
            )
    return value


def for_reading(config: Any) -> Config:
    """Return {dotted key: value} of a config, with each ${key} replaced by the key's value.

    Any other ${...}, such as one that reads the environment, is left unchanged.
    """
    values = dotted.flat(config)
    return {name: expanded(value, values) for name, value in values.items()}
