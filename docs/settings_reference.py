"""A Sphinx extension that generates the tables of docs/settings.md from configs/.

Each row has a key, its type, its default and its meaning. Defaults and meanings are the values and
comments in the files of configs/; types come from `stoker.command.settings.SETTINGS`.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from omegaconf import DictConfig, OmegaConf
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from stoker import configs
from stoker.command import settings
from stoker.command.dotted import flat
from stoker.data.settings import FractionOrCount
from stoker.trainer.errors import as_typed
from stoker.trainer.settings import Choice, Number

CODE = re.compile(r"('[^']*=[^']*'|`[^`]+`|\+?[\w./]+=[^\s,;:)']+)")


@dataclasses.dataclass
class Row:
    """A key, with its default and its meaning in each option of its group."""

    key: str
    value: Any  # the first default
    defaults: dict[str, list[str]]  # {default: options with this default}
    meanings: dict[str, list[str]]  # {comment: options with this comment}


def comments(text: str) -> dict[str, str]:
    """Return {dotted key: comment} for the lines of a YAML file in block style."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = re.match(r"( *)([\w./]+):(.*)", line)
        if match is None:
            continue
        indent = len(match[1])
        path = [(depth, name) for depth, name in path if depth < indent]
        path.append((indent, match[2]))
        _, hash_sign, comment = match[3].partition("# ")
        if hash_sign:
            found[".".join(name for _, name in path)] = comment.strip()
    return found


def keys_of(text: str, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (key, default, comment) for a YAML file, skipping keys that repeat another setting."""
    values = OmegaConf.create(text)  # the command uses OmegaConf too, so 3e-3 is a number
    assert isinstance(values, DictConfig)
    meanings = comments(text)
    targets = {}
    for key, value in flat(values).items():
        if key.endswith("._target_"):
            targets[key.removesuffix("._target_")] = value
        is_other_key = isinstance(value, str) and re.fullmatch(r"\$\{\w+\}", value)
        if key.split(".")[-1].startswith("_") or key.startswith("defaults") or is_other_key:
            continue
        meaning = meanings.get(key, "")
        parent = key.rpartition(".")[0]
        if not meaning and parent in targets:
            meaning = f"an argument of `{targets[parent]}`"
        yield prefix + key, value, meaning


def files_of(group: str) -> list[Path]:
    """Return the files of a group's options, sorted by name."""
    return sorted((configs.FOLDER / group).glob("*.yaml"))


def rows_of(group: str) -> list[Row]:
    """Return the rows of a group. Each key has one row, however many options contain it."""
    rows: dict[str, Row] = {}
    files = files_of(group)
    if group == "callbacks":
        files = [configs.FOLDER / "usual_callbacks.yaml", *files]
    for path in files:
        text = path.read_text(encoding="utf-8")
        is_global = text.startswith("# @package _global_")
        prefix = "" if is_global else group.replace("/", ".") + "."
        for key, value, meaning in keys_of(text, prefix):
            row = rows.setdefault(key, Row(key, value, {}, {}))
            row.defaults.setdefault(as_typed(value), []).append(path.stem)
            row.meanings.setdefault(meaning, []).append(path.stem)
    return list(rows.values())


def rows_from(first: str) -> list[Row]:
    """Return the rows of the block in train.yaml that contains this key."""
    text = (configs.FOLDER / "train.yaml").read_text(encoding="utf-8")
    for block in text.split("\n\n"):
        if re.search(rf"^{first}:", block, re.MULTILINE):
            return [
                Row(key, value, {as_typed(value): []}, {meaning: []})
                for key, value, meaning in keys_of(block)
            ]
    raise ValueError(f"configs/train.yaml has no block with the key {first}")


def type_of(row: Row) -> str:
    """Return the type of a setting in words."""
    default = row.value
    limit = settings.limit_of(row.key)
    words = {bool: "true or false", int: "integer", float: "number", list: "list", dict: "mapping"}
    if isinstance(limit, Choice):
        values = sorted(limit.values, key=lambda value: value is False)  # true before false
        return joined([as_typed(value) for value in values])
    if isinstance(limit, FractionOrCount):
        return "fraction ≤ 1.0 or integer"
    if row.key == "tune":
        return "list of " + joined(list(settings.TUNINGS))
    if isinstance(limit, Number):
        bounds = {"≥": limit.least, ">": limit.above, "≤": limit.most}
        shown = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
        text = " ".join(["integer" if limit.whole else "number", ", ".join(shown)]).strip()
        return text + " or auto" * limit.auto
    if isinstance(limit, settings.Text) or isinstance(default, str):
        return "text"
    if any(f"{row.key}=[" in meaning for meaning in row.meanings):
        return "list"
    return words.get(type(default), "")


def joined(words: list[str]) -> str:
    """Join words as in `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def sentence(comment: str) -> str:
    """Turn a comment into a sentence."""
    is_value = CODE.match(comment) or re.match(r"[\w-]+(:|;| is )", comment)
    text = comment if is_value else comment[:1].upper() + comment[1:]
    return text if not text or text.endswith(".") else f"{text}."


def inline(text: str) -> list[nodes.Node]:
    """Split text into nodes; anything that a user would type is formatted as code."""
    parts: list[nodes.Node] = []
    for i, part in enumerate(CODE.split(text)):
        if part:
            code = part.strip("`").rstrip(".")
            parts.append(nodes.literal(text=code) if i % 2 else nodes.Text(part))
            if i % 2 and part.endswith("."):
                parts.append(nodes.Text("."))
    return parts


def paragraphs(texts: dict[str, list[str]], count: int, *, code: bool) -> list[nodes.Node]:
    """Return a paragraph per text, followed by its options unless all options have this text."""
    result: list[nodes.Node] = []
    for text, names in texts.items():
        children = [nodes.literal(text=text)] if code else inline(sentence(text))
        if names and len(names) < count:
            children += [nodes.Text(" "), nodes.emphasis(text=f"({', '.join(names)})")]
        result.append(nodes.paragraph("", "", *children))
    return result


def table(titles: list[str], widths: list[int], body: list[nodes.row]) -> nodes.table:
    """Return a table with a header."""
    group = nodes.tgroup(cols=len(titles))
    group += [nodes.colspec(colwidth=width) for width in widths]
    heads = [nodes.entry("", nodes.paragraph(text=title)) for title in titles]
    group += nodes.thead("", nodes.row("", *heads))
    group += nodes.tbody("", *body)
    return nodes.table("", group, classes=["settings"])


class Settings(SphinxDirective):
    """The base class of the directives `keys` and `group`, which show a table of keys."""

    required_arguments = 1

    def table_of(self, rows: list[Row], count: int) -> list[nodes.Node]:
        domain: Any = self.env.get_domain("std")
        body = []
        for row in rows:
            anchor = "setting-" + nodes.make_id(row.key)
            domain.anonlabels[row.key] = (self.env.docname, anchor)
            domain.labels[row.key] = (self.env.docname, anchor, row.key)
            names = {alias for alias, key in settings.ALIASES.items() if key == row.key}
            names.add(row.key)
            names |= {re.sub(r"[._]", " ", name) for name in names}
            index = addnodes.index(
                entries=[("single", name, anchor, "main", None) for name in names]
            )
            link = nodes.reference("", "", nodes.literal(text=row.key), refuri=f"#{anchor}")
            name = nodes.paragraph("", "", link, ids=[anchor])
            cells = [
                [index, name],
                [nodes.paragraph(text=type_of(row))],
                paragraphs(row.defaults, count, code=True),
                paragraphs(row.meanings, count, code=False),
            ]
            if len(row.defaults) == len(row.meanings) == 1 < count:
                cells[2] = [nodes.paragraph("", "", nodes.literal(text=next(iter(row.defaults))))]
            body.append(nodes.row("", *[nodes.entry("", *cell) for cell in cells]))
        return [table(["key", "type", "default", "meaning"], [22, 18, 16, 44], body)]


class Keys(Settings):
    """The block of configs/train.yaml that contains a key."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(configs.FOLDER / "train.yaml"))
        return self.table_of(rows_from(self.arguments[0]), 1)


class Group(Settings):
    """The options of a group, and their keys."""

    def run(self) -> list[nodes.Node]:
        group = self.arguments[0]
        files = files_of(group)
        body = []
        for path in files:
            self.env.note_dependency(str(path))
            typed = nodes.literal(text=f"{group}={path.stem}")
            lines = [nodes.paragraph("", "", *inline(line)) for line in header(path)]
            cells = [[nodes.paragraph("", "", typed)], lines]
            body.append(nodes.row("", *[nodes.entry("", *cell) for cell in cells]))
        result: list[nodes.Node] = [table(["option", "what it is"], [30, 70], body)]
        rows = [] if group == "experiment" else rows_of(group)
        return result + (self.table_of(rows, len(files)) if rows else [])


def header(path: Path) -> list[str]:
    """Return the comment lines at the top of a config."""
    lines = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))[0].splitlines()
    return [line.lstrip("# ") for line in lines if "@package" not in line]


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("keys", Keys)
    app.add_directive("group", Group)
    return {"parallel_read_safe": True}
