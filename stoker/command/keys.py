"""Dotted keys of nested mappings."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def flat(config: Mapping[str, Any] | DictConfig, prefix: str = "") -> dict[str, Any]:
    """Return {"dotted.key": value} of nested mappings, with interpolations as they are written."""
    if isinstance(config, DictConfig):
        config = plain(config)
    values: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def plain(config: DictConfig, *, resolve: bool = False) -> dict[str, Any]:
    """Return a config as dicts and lists."""
    values: Any = OmegaConf.to_container(config, resolve=resolve)
    return values


def put(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put {dotted key: value} into nested dicts."""
    for key, value in values.items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            if not isinstance(place.get(group), dict):
                place[group] = {}
            place = place[group]
        place[last] = value
