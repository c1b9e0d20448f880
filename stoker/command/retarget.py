"""Leave each node of a config only the arguments that are meant for its target."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from stoker import configs
from stoker.command import arguments, settings
from stoker.command.build import arguments_of
from stoker.command.defaults import layers
from stoker.command.dotted import is_interpolation, plain
from stoker.trainer.errors import UserError


def retarget(cfg: DictConfig) -> None:
    """Drop from each node the arguments that a file sets for a different target.

    Typed arguments stay, and so does an argument that refers to another setting (`${...}`) if the
    new target accepts it.
    """
    is_typed = any("_target_" in override for override in arguments.typed())
    if not is_typed and len(configs.folders()) == 1:
        return  # our files set each target only once
    files = layers()
    typed = arguments.typed_keys()
    for name, target in targets(plain(cfg)):
        if not isinstance(target, str):
            raise UserError(f"{name}._target_: give the dotted name of a class or function.")
        node = OmegaConf.select(cfg, name)
        for key, value in leftovers(files, name, target).items():
            if f"{name}.{key}" in typed or is_for_any_target(name, key):
                continue
            if is_interpolation(value) and takes(name, target, key):
                continue
            with open_dict(cfg):
                node.pop(key, None)
    follow_settings(cfg.trainer)


def follow_settings(trainer: DictConfig) -> None:
    """Pass on a run's settings, such as epochs, to a Trainer whose own file names none of them."""
    usual = OmegaConf.load(configs.FOLDER / "trainer/default.yaml")
    typed = arguments.typed_keys()
    for key, value in plain(usual).items():
        is_removed = f"~trainer.{key}" in typed
        if key not in trainer and not is_removed and takes("trainer", trainer._target_, key):
            with open_dict(trainer):
                trainer[key] = value


def targets(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, `_target_`) of each node that has one."""
    for key, value in node.items():
        if isinstance(value, dict):
            name = f"{prefix}{key}"
            if "_target_" in value:
                yield name, value["_target_"]
            yield from targets(value, f"{name}.")


def leftovers(files: tuple[dict[str, Any], ...], name: str, target: str) -> dict[str, Any]:
    """Return the arguments of a node that only files with a different target set."""
    left: dict[str, Any] = {}
    given: set[str] = set()
    for file in files:
        node = settings.value_of(file, name)
        if not isinstance(node, dict):
            continue
        if node.get("_target_", target) == target:
            given.update(node)
        else:
            left.update(node)
    return {key: value for key, value in left.items() if key not in given}


def is_for_any_target(name: str, key: str) -> bool:
    """Return whether a key is one of Hydra's, or configures the loader of any data set."""
    is_loaders = name == "dataset" and key in settings.LOADER_KEYS
    return is_loaders or key in ("_target_", "_partial_")


def takes(name: str, target: str, key: str) -> bool:
    """Return whether a target has an argument, by name or, for a Trainer, among its **kwargs."""
    known, takes_more = arguments_of(name, target)
    return key in known or (takes_more and name == "trainer")
