"""Explain a `${...}` that cannot be replaced: its key, the file that it stands in, and why."""

import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stoker.command import settings
from stoker.command.defaults import layers
from stoker.command.dotted import flat, is_interpolation
from stoker.trainer.errors import as_typed, first_line


def explain_broken(cfg: DictConfig) -> str | None:
    """Return what is wrong with the first value that cannot be replaced; None if all can be."""
    for key, value in flat(cfg).items():
        if not is_interpolation(as_typed(value)):
            continue
        try:
            node = OmegaConf.select(cfg, key)
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True)
        except (OmegaConfBaseException, RecursionError) as error:
            place = place_of(key, value)
            return f"{key}={as_typed(value)}{place}: {first_line(error)}.\nType {key}=VALUE."
    return None


def place_of(key: str, value: Any) -> str:
    """Return " in FILE" for a value that stands in one of the config files, else ""."""
    for layer in reversed(layers()):
        if settings.value_of(layer.config, key) == value:
            near = layer.file.is_relative_to(Path.cwd())
            return f" in {os.path.relpath(layer.file) if near else layer.file}"
    return ""
