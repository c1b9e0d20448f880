"""The config before any setting is typed: the defaults, and the files that they come from."""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from stoker import configs
from stoker.command import arguments, settings
from stoker.command.dotted import plain, put


def defaults() -> dict[str, Any]:
    """Return the defaults for the options that this job uses, with interpolations unresolved."""
    return of_choices(chosen())


def chosen() -> list[str]:
    """Return the options that this job uses, typed or by default, such as ["model=mlp"]."""
    options = []
    for group, option in HydraConfig.get().runtime.choices.items():
        if configs.is_group(group) and option is not None and not group.startswith("hydra/"):
            options.append(f"{group}={option}")
    several = f"{settings.GROUP_OF_MANY}=["
    return options + [override for override in arguments.typed() if override.startswith(several)]


def of_choices(choices: Sequence[str]) -> dict[str, Any]:
    """Return the defaults for options such as ["model=cnn"], with interpolations unresolved."""
    return copy.deepcopy(composed(*choices, *arguments.search_path()))


@functools.cache  # Hydra takes 50 ms, and the jobs of a sweep mostly use the same options
def composed(*overrides: str) -> dict[str, Any]:
    """Compose the config with these overrides."""
    with hydra_is_ready():
        return plain(hydra.compose("train", list(overrides)))


@functools.cache
def files_of(*overrides: str) -> tuple[dict[str, Any], ...]:
    """Return the contents of these options' files in the order in which Hydra merges them."""
    with hydra_is_ready():
        loader = GlobalHydra.instance().config_loader()
        listed = loader.compute_defaults_list("train", list(overrides), RunMode.RUN).defaults
    result = []
    for default in listed:
        path = configs.file_of(str(default.config_path))
        if path is not None:
            keys = plain(OmegaConf.load(path))
            config: dict[str, Any] = {}
            put(config, {default.package: keys} if default.package else keys)
            result.append(config)
    return tuple(result)


@contextlib.contextmanager
def hydra_is_ready() -> Iterator[None]:
    """Initialize Hydra within this context, unless the command has already done so."""
    if GlobalHydra.instance().is_initialized():
        yield
        return
    with hydra.initialize_config_module("stoker.configs"):
        yield
