"""The text of `--help`: examples, the options of each group with their keys, and all other keys."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stoker import configs
from stoker.command import invocation, settings
from stoker.command.dotted import flat

WIDTH = 80  # columns
INDENT = 29  # of what stands beside a name
EXAMPLES = {
    "": "the default: an MLP on handwritten digits, in seconds",
    "model=cnn device=cuda epochs=3": "set any key",
    "-m model=linear,mlp seed=0,1,2": "a sweep: every combination, and a table of the results",
    "-m sweep=optuna": "a search: each trial follows from the results before it",
    "run_dir=runs/mine": "a named run; type it again to resume",
    "task=lr_find model=cnn": "find a learning rate",
    "model=cnn --cfg job": "show the whole config and train nothing",
    "reproduce run=runs/mine": "train a run again, and compare the two bit for bit",
    "new my_project": "write a small project of your own",
}


def help_text() -> str:
    """Return the help text."""
    command = " ".join(invocation.program())
    lines = [f"Train a model:  {command} [key=value ...] [group=option ...]", ""]
    for typed, meaning in EXAMPLES.items():
        lines += [f"  {command} {typed}".rstrip(), f"      {meaning}"]
    lines += ["", "Groups (group=option), and the keys of each option:"]
    for group in groups():
        lines += lines_of(group)
    text = (configs.FOLDER / "train.yaml").read_text(encoding="utf-8")
    keys = text[text.index("\ntask:") : text.index("\nhydra:")]
    lines += ["", "Keys (key=value), with their defaults:"]
    for line in keys.splitlines()[1:]:
        key, _, comment = line.partition(" # ")
        lines += beside(key.rstrip(), comment) if line else [""]
    return "\n".join(lines)


def groups() -> list[str]:
    """Return the names of the groups, sorted."""
    names = set()
    for folder in configs.folders():
        for path in folder.rglob("*/*.yaml"):
            names.add(path.parent.relative_to(folder).as_posix())
    return sorted(names)


def lines_of(group: str) -> Iterator[str]:
    """Yield the lines of a group: its options, each with its keys."""
    if group == "dataset":
        every = " ".join(f"{group}.{key}" for key in settings.LOADER_KEYS)
        yield from beside(f"{group}=...", f"(each) {every}")
    for path in configs.options(group):
        yield from beside(f"{group}={path.stem}", " ".join(keys_of(group, path)))


def keys_of(group: str, path: Path) -> list[str]:
    """Return the dotted keys that a file gives its group; none for a recipe or a broken file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.match(r"#\s*@package _global_", text) or group.startswith("hydra"):
        return []
    try:
        values: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        return []
    prefix = f"{group.replace('/', '.')}."
    keys = flat(values, prefix) if isinstance(values, dict) else {}
    every = {f"dataset.{key}" for key in settings.LOADER_KEYS}
    return [
        key
        for key, value in keys.items()
        if key not in every
        and not re.search(r"\._\w+_$|\.defaults$", key)
        and not re.fullmatch(r"\$\{\w+\}", str(value))  # it is another key
    ]


def beside(name: str, text: str) -> list[str]:
    """Return the lines of a name and, from INDENT on, the text beside it."""
    wrapped = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    if len(name) > INDENT - 4 or not wrapped:
        wrapped.insert(0, "")
    first, *rest = wrapped
    lines = [f"  {name:<{INDENT - 2}}{first}", *(" " * INDENT + line for line in rest)]
    return [line.rstrip() for line in lines]
