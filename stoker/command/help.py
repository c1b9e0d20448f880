"""The text of `--help`: examples, groups and keys; for `group=option`, the keys of that option."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker import configs
from stoker.command import arguments, shell

INDENT = 29  # column where the descriptions start
HEADER = """\
{command} [task] [key=value ...] [group=option ...]

This text lists the groups and the general keys. To list the keys of an option,
such as optimizer.lr, type {command} optimizer=adam --help.

Examples:
  {command}
      the default: an MLP on handwritten digits, in seconds
  {command} model=cnn device=cuda epochs=3
      set any key
  {command} -m model=linear,mlp seed=0,1,2
      a sweep: every combination, and a table of the results
  {command} -m sweep=optuna
      a search: each trial depends on the earlier results
  {command} run_dir=runs/mine
      a named run; repeat the command to resume
  {command} plan model=cnn
      estimate a run's time and memory from a few steps
  {command} evaluate run=runs/mine
      test the best weights of a run
  {command} reproduce run=runs/mine
      repeat a run and compare the two runs bit for bit
  {command} model=cnn --cfg job
      print the whole config without training
  {command} new my_project
      create a small project
  {command} redraw runs/mine
      write the report of a run again, or the page of a sweep or folder

Groups:"""


def help_text(typed: Sequence[str] = ()) -> str:
    """Return the help text; if options were typed, return the text of these options instead."""
    files = [configs.file_of(choice.replace("=", "/")) for choice in arguments.choices(typed)]
    texts = ["\n".join(lines_of(file)) for file in files if file is not None]
    if texts:
        return "\n\n".join(texts)
    lines = [HEADER.format(command=shell.command([]))]
    for group in groups():
        lines += beside(group, ", ".join(configs.options(group)))
    return "\n".join([*lines, *lines_of(configs.FOLDER / "train.yaml")])


def groups() -> list[str]:
    """Return the names of the groups, sorted."""
    return sorted(
        {
            str(path.parent.relative_to(folder))
            for folder in configs.folders()
            for path in folder.rglob("*/*.yaml")
        }
    )


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a config: each key with its default, and its comment beside it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    group = "" if "# @package _global_" in text else f"{path.parent.name}."
    if path == configs.FOLDER / "train.yaml":  # skip the file's header and Hydra's block
        group = ""
        text = text[text.index("\n\n") + 1 : text.index("\nhydra:")]
    for line in text.splitlines():
        key, _, comment = line.partition(" # ")
        if line.startswith("# @"):
            continue
        if line.startswith("#"):
            yield from folded(line.removeprefix("# "))
        elif not re.match(r" *_\w+_:", line):
            prefix = group if re.match(r"\w", line) else ""
            yield from beside(prefix + key.rstrip(), comment.strip())


def folded(text: str, indent: int = 0) -> list[str]:
    """Return the lines of text, indented and wrapped at words."""
    space = " " * indent
    return textwrap.wrap(
        text,
        80,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )


def beside(name: str, text: str) -> list[str]:
    """Return the lines of a name with its text beside it, starting at column INDENT."""
    lines = folded(text, INDENT)
    if len(name) > INDENT - 4 or not lines:
        return [f"  {name}".rstrip(), *lines]
    return [f"  {name:<{INDENT - 2}}{lines[0].lstrip()}", *lines[1:]]
