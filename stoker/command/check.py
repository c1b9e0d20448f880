"""Check a composed config before anything is built: keys, types, limits, and combinations."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stoker import configs
from stoker.command import arguments, settings
from stoker.command.build import is_on
from stoker.command.defaults import chosen, of_choices
from stoker.command.dotted import flat, is_interpolation, plain
from stoker.command.messages import no_such_key
from stoker.trainer.errors import UserError, as_typed, first_line

PARTS = ("dataset", "model", "loss", "optimizer", "scheduler", "trainer")
KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a group of keys",
}


def check_config(cfg: DictConfig) -> None:
    """Raise UserError for a config that cannot run.

    Such a config has an unknown key, lacks a value, sets the length of the run with two keys, or
    has a value that is outside its limits or of the wrong type.
    """
    given = plain(cfg)
    typed = arguments.typed_keys()
    has_files = len(configs.folders()) > 1
    usual = of_choices([choice for choice in chosen() if not choice.startswith("experiment=")])
    known = usual
    if has_files:  # the user's own files may contain a misspelled key
        known = of_choices([choice for choice in chosen() if choice.startswith("sweep")])
    for key in given:
        is_variable = f"${{{key}}}" in str(given)  # another key refers to this one
        if key not in known and not is_variable:
            raise UserError(no_such_key(key, known))
    for key in usual:
        if key not in given:
            raise UserError(f"{key}: a run needs a value for this key. Remove ~{key}.")
        removed = f"~trainer.{key}"
        if removed in typed:
            raise UserError(f"{removed}: a Trainer always gets the run's {key}. Remove {removed}.")
    for key in PARTS:
        if not isinstance(given[key], dict):
            raise UserError(
                f"{key}: this must be a mapping with a _target_ key.\n"
                "To select a config file in an experiment, write "
                f"'- override /{key}: NAME' under 'defaults:'."
            )
    if has_files:
        check_choices(given)
    resolved = resolve(cfg)
    try:
        check_types("", resolved, usual)
        check_keys(resolved, known)
        check_length(resolved)
        settings.check_all(resolved)
        settings.check_task(resolved)
        check_callbacks(given, resolved)
    except UserError as error:
        raise UserError(without_secrets(str(error), flat(given), flat(resolved))) from None


def check_choices(given: Mapping[str, Any]) -> None:
    """Raise UserError if one of the user's files replaces the class of a typed option."""
    typed = arguments.typed_keys()
    for choice in arguments.choices(arguments.typed()):
        key = f"{choice.partition('=')[0]}._target_"
        target = settings.value_of(given, key)
        if key in typed or target is None:  # some groups have no _target_
            continue
        chosen_target = settings.value_of(of_choices([choice]), key)
        if target != chosen_target:
            raise UserError(
                f"{choice}: another config file, such as your experiment's, sets {key}={target}.\n"
                f"Remove the key from that file, or also type {key}={chosen_target}."
            )


def check_length(given: Mapping[str, Any]) -> None:
    """Raise UserError if `epochs` was typed but `max_steps` also sets the length of the run."""
    typed = arguments.typed_keys()
    if "epochs" in typed and None not in (given["epochs"], given["max_steps"]):
        raise UserError(
            f"max_steps={as_typed(given['max_steps'])} and epochs={as_typed(given['epochs'])} "
            "both set the length of the run. Type max_steps=null, or remove epochs."
        )


def check_callbacks(given: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Raise UserError for a typed argument of a callback that stays off."""
    typed = arguments.typed_keys()
    for name, node in resolved["callbacks"].items():
        if node is None or is_on(node):
            continue
        prefix = f"callbacks.{name}."
        off = [f"{prefix}{key}" for key, value in node.items() if value is None]
        switches = [followed_key(settings.value_of(given, key)) or key for key in off]
        unused = [key for key in typed if key.startswith(prefix) and key != f"{prefix}_target_"]
        if unused and typed.isdisjoint(switches):
            raise UserError(
                f"{min(unused)}: this callback is off. Also type {switches[0]}=..., or remove this "
                "key."
            )


def followed_key(value: Any) -> str | None:
    """Return the key that a value such as ${patience} refers to; None for any other value."""
    match = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return None if match is None else match[1]


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the config with every ${...} replaced.

    Raises:
        UserError: a ${...} cannot be replaced, or a required value is missing.
    """
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key).partition("[")[0]  # groups[0].lr cannot be typed
        raise UserError(f"{key}: {first_line(error).rstrip('.')}.\nType {key}=VALUE.") from None
    return values


def without_secrets(text: str, given: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """Show ${...} in a message instead of its value, because ${oc.env:...} may be a secret."""
    for key, value in given.items():
        if isinstance(value, str) and "${" in value:
            text = text.replace(f"{key}={as_typed(resolved.get(key))}", f"{key}={value}")
    return text


def check_keys(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown key in the groups that no constructor checks."""
    for group in ("checkpoint", "sweep"):
        for key in given[group]:
            if key not in known[group]:
                raise UserError(no_such_key(f"{group}.{key}", known))


def check_types(prefix: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Raise UserError for a value whose type differs from that of its default.

    If the value or its default refers to another key, the check is left to the constructor.
    """
    for key, default in usual.items():
        value = given.get(key, default)
        if not is_interpolation(default) and not is_interpolation(value):
            check_type(f"{prefix}{key}", value, default)


def check_type(name: str, value: Any, default: Any) -> None:
    """Raise UserError for a value outside its limits, or of the wrong type if it has no limits.

    The right type is the type of the default. If the default is null or auto, any type is allowed
    here, and the constructor checks the value.
    """
    # The keys of `trainer` have the same limits as the top-level keys.
    limit = settings.limit_of(name.removeprefix("trainer."))
    # null is valid for epochs (max_steps can replace it) and for a callback (null turns it off).
    is_off = value is None and re.fullmatch(r"(trainer\.)?epochs|callbacks\.\w+", name)
    if is_off or default in (None, "???", "auto"):
        return
    if limit is not None:
        limit.check(name, value)
    elif isinstance(default, dict) and isinstance(value, dict):
        # A different target has its own keys and types.
        target = default.get("_target_")
        if value.get("_target_", target) == target:
            check_types(f"{name}.", value, default)
    elif not is_like(value, default):
        sample = [value] if default == [] else default
        raise UserError(
            f"{name}={as_typed(value)}: expected {KINDS[type(default)]}, as in "
            f"{shlex.quote(f'{name}={as_typed(sample)}')}."
        )


def is_like(value: Any, default: Any) -> bool:
    """Return whether a value has the type of its default; true and false are not numbers."""
    return type(value) is type(default) or (type(value) is int and type(default) is float)
