"""Read and write nested mappings by dotted keys, such as "optimizer.lr"."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"dotted.key": value} for nested mappings, with interpolations unresolved."""
    items: Mapping[str, Any] = plain(config) if isinstance(config, DictConfig) else config
    values: dict[str, Any] = {}
    for key, value in items.items():
        if isinstance(value, dict) and value:
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


def is_interpolation(value: Any) -> bool:
    """Return whether a value refers to another key, as in ${epochs}."""
    return isinstance(value, str) and "${" in value


def plain(config: Any, *, resolve: bool = False) -> dict[str, Any]:
    """Return a config as plain dicts and lists."""
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def put(config: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the values of dotted keys in nested dicts, and create the dicts that are missing."""
    for key, value in values.items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            if not isinstance(place.get(group), dict):
                place[group] = {}
            place = place[group]
        place[last] = value
