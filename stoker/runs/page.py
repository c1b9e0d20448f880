"""Pages and cards from templates/.

The HTML pages stand alone: no network, light and dark, and no script but templates/script.js.
"""

import base64
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.trainer.errors import printable

if TYPE_CHECKING:
    import jinja2


# '1,234', '60.6 %', '145.2 (the mean)', '3 of 40', or an empty cell.
NUMBER = r"([-+]?\d[\d.,]*(e[-+]?\d+)?( %| \(the mean\)| of [\d,]+)?)?"


@dataclass
class Table:
    """A table; its cells are texts, or Markup. Columns of numbers are aligned on the right."""

    names: list[str]
    rows: list[list[str]]

    @property
    def are_numbers(self) -> list[bool]:
        """Whether each column has nothing but numbers."""
        return [
            all(re.fullmatch(NUMBER, row[i]) for row in self.rows) for i in range(len(self.names))
        ]


def render(template: str, **facts: Any) -> str:
    """Render a template of templates/. In HTML, all facts are escaped as text, except Markup."""
    return templates().get_template(template).render(facts)


@functools.cache
def templates() -> "jinja2.Environment":
    import jinja2
    from markupsafe import Markup

    folder = Path(__file__).with_name("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        finalize=plain,
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    script = (folder / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals["script"] = Markup(script)
    environment.globals["script_hash"] = f"sha256-{digest}"
    return environment


def plain(value: Any) -> Any:
    """Return a value of a template without control characters, before it is escaped."""
    return value if hasattr(value, "__html__") else printable(value)
