"""The text of `--help`: examples, tasks, groups and keys; with `group=option`, its keys instead."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker import configs
from stoker.command import arguments, invocation

WIDTH = 80  # columns
INDENT = 29  # of the text beside a name
EXAMPLES = {
    "": "the default: an MLP on handwritten digits, in seconds",
    "model=cnn device=cuda epochs=3": "set any key",
    "-m model=linear,mlp seed=0,1,2": "a sweep: every combination, and a table of the results",
    "-m sweep=optuna": "a search: each trial follows from the results before it",
    "run_dir=runs/mine": "a named run; type it again to resume",
    "plan model=cnn": "what a run would take, from a few steps",
    "evaluate run=runs/mine": "test the best weights of a run",
    "reproduce run=runs/mine": "train a run again, and compare the two bit for bit",
    "model=cnn --cfg job": "show the whole config and train nothing",
    "new my_project": "write a small project of your own",
}


def help_text(typed: Sequence[str] = ()) -> str:
    """Return the help text, or that of the options among the arguments that were typed."""
    chosen = [choice.partition("=")[::2] for choice in arguments.choices(typed)]
    files = [
        path for group, option in chosen for path in configs.options(group) if path.stem == option
    ]
    if files:
        return "\n\n".join("\n".join(lines_of(path)) for path in files)
    command = " ".join(invocation.program())
    lines = [f"{command} [key=value ...] [group=option ...]", "", "Examples:"]
    for example, meaning in EXAMPLES.items():
        lines += [f"  {command} {example}".rstrip(), f"      {meaning}"]
    lines += ["", f"Groups (for the keys of an option: {command} model=cnn --help):"]
    for group in groups():
        lines += beside(group, ", ".join(path.stem for path in configs.options(group)))
    return "\n".join([*lines, *lines_of(configs.FOLDER / "train.yaml")])


def groups() -> list[str]:
    """Return the names of the groups, sorted."""
    names = set()
    for folder in configs.folders():
        for path in folder.rglob("*/*.yaml"):
            names.add(path.parent.relative_to(folder).as_posix())
    return sorted(names)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a config: each key with its default, and its comment beside it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    group = "" if "# @package _global_" in text else f"{path.parent.name}."
    if path == configs.FOLDER / "train.yaml":  # its head and the block for Hydra are no settings
        group = ""
        text = text[text.index("\n\n") + 1 : text.index("\nhydra:")]
    for line in text.splitlines():
        key, _, comment = line.partition(" # ")
        if line.startswith("# @"):
            continue
        if line.startswith("#"):
            yield from textwrap.wrap(line.removeprefix("# "), WIDTH)
        elif not re.match(r" *_\w+_:", line):
            prefix = group if re.match(r"\w", line) else ""
            yield from beside(prefix + key.rstrip(), comment.strip())


def beside(name: str, text: str) -> list[str]:
    """Return the lines of a name and, from INDENT on, the text beside it."""
    wrapped = textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
    if len(name) > INDENT - 4 or not wrapped:
        wrapped.insert(0, "")
    first, *rest = wrapped
    lines = [f"  {name:<{INDENT - 2}}{first}", *(" " * INDENT + line for line in rest)]
    return [line.rstrip() for line in lines]
