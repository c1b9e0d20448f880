"""Pages and cards from templates/. The HTML pages stand alone: no script, no network, light and dark."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.trainer.errors import printable

if TYPE_CHECKING:
    import jinja2


@dataclass
class Column:
    """A column of a table; the cells are texts, or Markup. Numbers are aligned on the right."""

    name: str
    cells: list[str] = field(default_factory=list)
    is_number: bool = False


def render(template: str, **facts: Any) -> str:
    """Render a template of templates/. In HTML, all facts are escaped as text, except Markup."""
    return templates().get_template(template).render(facts)


@functools.cache
def templates() -> "jinja2.Environment":
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        finalize=plain,
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def plain(value: Any) -> Any:
    """Return a value of a template without control characters, before it is escaped."""
    return value if hasattr(value, "__html__") else printable(value)
