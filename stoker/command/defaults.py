"""The default config, before any setting is typed."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from stoker.command import arguments, settings
from stoker.command.dotted import plain


def defaults() -> dict[str, Any]:
    """Return the defaults for the options that this job chose, interpolations unresolved."""
    chosen = []
    for group, option in HydraConfig.get().runtime.choices.items():
        if option is not None and not group.startswith("hydra/"):
            chosen.append(f"{group}={option}")
    lists = tuple(f"{group}=[" for group in settings.GROUPS_OF_MANY)
    chosen += [override for override in arguments.typed() if override.startswith(lists)]
    return of_choices(chosen)


def of_choices(choices: Sequence[str]) -> dict[str, Any]:
    """Return the defaults for options such as ["model=cnn"], interpolations unresolved."""
    return copy.deepcopy(composed(*choices, *arguments.search_path()))


@functools.cache  # the jobs of a sweep have the same choices, and Hydra takes 50 ms
def composed(*overrides: str) -> dict[str, Any]:
    """Compose the config with these overrides, with the command's Hydra if it runs."""
    if GlobalHydra.instance().is_initialized():
        return plain(hydra.compose("train", list(overrides)))
    with hydra.initialize_config_module("stoker.configs"):
        return plain(hydra.compose("train", list(overrides)))
