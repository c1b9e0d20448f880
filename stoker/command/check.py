"""Check a composed config before anything is built: keys, types, limits, and combinations."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from stoker import configs, project
from stoker.command import arguments, settings
from stoker.command.defaults import chosen, defaults, layers, of_choices
from stoker.command.dotted import flat, is_interpolation, plain
from stoker.command.messages import no_such_key
from stoker.command.references import explain_broken, place_of
from stoker.trainer.errors import UserError, as_typed, first_line
from stoker.trainer.settings import Checked, Choice, Number


def keep_texts(cfg: DictConfig) -> None:
    """Keep string settings exactly as typed: run_dir=1e3 names a folder."""
    for override in arguments.typed():
        key, _, value = override.partition("=")
        record = settings.record(key)
        is_text = record.path or isinstance(settings.limit_of(key), settings.Text | Checked)
        number = settings.value_of(plain(cfg), key) if is_text else None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            OmegaConf.update(cfg, key, value)


def place_paths(cfg: DictConfig) -> None:
    """Read a relative path in a config of the project as one from the project's folder."""
    root = project.current().root
    if root == Path.cwd():
        return
    typed = arguments.typed_keys()
    for layer in layers():
        for key in ("dataset.root", "dataset.path", "init_from"):
            value = settings.value_of(layer.config, key)
            is_ours = layer.file.is_relative_to(root) and key not in typed
            if is_ours and isinstance(value, str) and not is_interpolation(value):
                OmegaConf.update(cfg, key, os.path.relpath(root / value))


def check_config(cfg: DictConfig) -> None:
    """Raise UserError for a config that cannot be run.

    It may have an unknown key, lack a part, set the length twice, lack a required value, or have a
    value outside its limits or of a different type from the default.
    """
    given = plain(cfg)
    usual = defaults()
    known = usual
    if len(configs.folders()) > 1:  # a key of yours may be misspelt
        known = of_choices([choice for choice in chosen() if choice.startswith("sweep")])
    for key, value in given.items():
        is_variable = f"${{{key}}}" in str(given)  # another key follows it
        if key not in known and not is_variable:
            raise UserError(no_such_key(key, known, place_of(key, value)))
    typed = arguments.typed_keys()
    for key in (*usual, *flat(usual)):
        has_other_keys = f"{key.partition('.')[0]}._target_" in typed
        is_removed = f"~{key}" in typed and not has_other_keys
        if is_removed or (key in usual and key not in given):
            raise UserError(f"{key}: a run needs a value for this key. Remove ~{key}.")
    for key in ("dataset", "model", "loss", "optimizer", "scheduler", "trainer"):
        if not isinstance(given[key], dict):
            kind = type(given[key]).__name__
            raise UserError(
                f"{key}: its file contains a {kind}, not keys. Write _target_: mypackage.NAME "
                "into it."
            )
    check_choices(given)
    resolved = resolve(cfg)
    try:
        check_types("", resolved, usual)
        check_keys(given, known)
        check_length(resolved)
        settings.check_all(resolved)
        settings.check_task(resolved)
        check_callbacks(usual, resolved)
    except UserError as error:
        raise UserError(without_secrets(str(error), flat(given), flat(resolved))) from None


def check_choices(given: Mapping[str, Any]) -> None:
    """Raise UserError for a typed option whose class is replaced by a file merged later."""
    typed = arguments.typed_keys()
    for choice in arguments.choices(arguments.typed()):
        key = f"{choice.partition('=')[0]}._target_"
        target = settings.value_of(given, key)
        place = place_of(key, target)
        chosen_file = configs.file_of(choice.replace("=", "/"))
        for layer in layers():
            own = settings.value_of(layer.config, key)
            is_replaced = layer.file == chosen_file and own not in (None, target)
            if is_replaced and place and key not in typed:
                raise UserError(
                    f"{choice}: {key}={target}{place} takes precedence. Remove it there."
                )


def check_length(given: Mapping[str, Any]) -> None:
    """Raise UserError if `epochs` was typed, but `max_steps` sets the length."""
    typed = arguments.typed_keys()
    if "epochs" in typed and None not in (given["epochs"], given["max_steps"]):
        advice = "Type one of them." if "max_steps" in typed else "Type max_steps=null as well."
        raise UserError(
            f"max_steps={as_typed(given['max_steps'])} and epochs={as_typed(given['epochs'])} "
            f"both set the length. {advice}"
        )


def check_callbacks(usual: Mapping[str, Any], resolved: Mapping[str, Any]) -> None:
    """Raise UserError for a typed argument of a callback that is off, unless that is typed too."""
    typed = arguments.typed_keys()
    for name, default in usual["callbacks"].items():
        node = resolved["callbacks"].get(name) or {}
        empty = [key for key in default if node.get(key, "") is None]
        for key in default:
            full = f"callbacks.{name}.{key}"
            value = node.get(key)
            if not empty or full not in typed or value is None or key == "_target_":
                continue
            switch = f"callbacks.{name}.{empty[0]}"
            followed = followed_key(default[empty[0]])
            if not typed & {switch, followed}:
                raise UserError(
                    f"{full}={as_typed(value)}: this callback is off. "
                    f"Type {followed or switch}=... as well, or remove this key."
                )


def followed_key(value: Any) -> str | None:
    """Return the key that a value such as ${patience} follows; None for any other value."""
    match = re.fullmatch(r"\$\{([\w.]+)\}", str(value))
    return None if match is None else match[1]


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return the config with every ${...} replaced.

    Raises:
        UserError: one cannot be replaced, or a required value is missing.
    """
    try:
        for key in sorted(OmegaConf.missing_keys(cfg)):
            raise UserError(f"{key}: this has no default. Type {key}=...")
        return plain(cfg, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(explain_broken(cfg) or first_line(error)) from None


def without_secrets(text: str, given: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """Return a message with each value as it was typed, since ${oc.env:...} may be a secret."""
    for key, value in given.items():
        if isinstance(value, str) and "${" in value:
            text = text.replace(f"{key}={as_typed(resolved.get(key))}", f"{key}={value}")
    return text


def check_keys(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise UserError for an unknown key of a group that no constructor checks."""
    for group in ("checkpoint", "sweep"):
        for key, value in given[group].items():
            name = f"{group}.{key}"
            if key not in known[group]:
                raise UserError(no_such_key(name, known, place_of(name, value)))


def check_types(prefix: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Raise UserError for a value of a different type from its default.

    A default that follows another key is not checked: the constructor checks the value.
    """
    for key, default in usual.items():
        if not is_interpolation(default):
            check_type(f"{prefix}{key}", given.get(key, default), default)


def check_type(name: str, value: Any, default: Any) -> None:
    """Raise UserError if a value has a different type from its default, and no limit allows it.

    A default of null or auto allows any type; its limit or its constructor checks the value.
    """
    limit = settings.limit_of(name)
    if default in (None, "???", "auto") or (isinstance(limit, Choice) and limit.has(value)):
        return
    if isinstance(limit, Checked) and type(value) is not type(default):
        limit.check(name, value)
    elif value is None:
        check_null(name, default)
    elif isinstance(default, dict) and isinstance(value, dict):
        # A different target has its own keys and types.
        if value.get("_target_") == default.get("_target_"):
            check_types(f"{name}.", value, default)
    elif isinstance(default, dict):
        example = f"{name}.{next(iter(default), 'KEY')}=..."
        raise UserError(
            f"{name}={as_typed(value)}: give a group of keys, {name}={{...}}, or one key: {example}"
        )
    elif not is_like(value, default):
        sample = [value] if default == [] else default
        raise UserError(
            f"{name}={as_typed(value)}: "
            f"give {KINDS[type(default)]}, as in {name}={as_typed(sample)}."
        )
    elif value == "" and default:
        raise UserError(f"{name}=: type a string after the =, or remove {name}.")


KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
}


def is_like(value: Any, default: Any) -> bool:
    """Return whether a value has its default's type; true is not a number."""
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)


def check_null(name: str, default: Any) -> None:
    """Raise UserError unless this key, which is not null by default, may be null."""
    top = name.removeprefix("trainer.")  # its keys mirror those at the top
    limit = settings.limit_of(top)
    optional = isinstance(limit, Number) and limit.optional
    is_callback = re.fullmatch(r"callbacks\.\w+", name)  # null turns it off
    if top == "epochs" or optional or is_callback:  # max_steps may set the length
        return
    raise UserError(f"{name}=null: give a value, as in {name}={as_typed(default)}.")
