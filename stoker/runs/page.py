"""Render pages and cards from templates/.

The HTML pages need no network, have a light and a dark mode, and contain one inline script, which
their content security policy allows by its hash. NAME.html includes script.js, chart.js and
style.css, and NAME.js and NAME.css if they exist.
"""

import base64
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runs.readable import duration, seconds
from stoker.trainer.errors import printable
from stoker.trainer.number_format import brief, counted, number

if TYPE_CHECKING:
    import jinja2
    import markupsafe

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **facts: Any) -> str:
    """Render a template from templates/. HTML pages escape all facts except Markup."""
    if template.endswith(".html"):
        facts |= inline(template.removesuffix(".html"))
    return templates().get_template(template).render(facts)


@functools.cache
def inline(name: str) -> dict[str, "markupsafe.Markup"]:
    """Return the script of a page, its hash for the content security policy, and the CSS."""
    from markupsafe import Markup

    script = source("script.js", "chart.js", f"{name}.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {
        "script": Markup(script),
        "script_hash": Markup(f"sha256-{digest}"),
        "style": Markup(source("style.css", f"{name}.css")),
    }


def source(*names: str) -> str:
    """Return the text of these files in templates/, skipping missing ones."""
    paths = [TEMPLATES / name for name in names]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths if path.exists())


@functools.cache
def templates() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        finalize=plain,
        autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"brief": brief, "counted": counted, "number": number}
    environment.globals |= {"duration": duration, "seconds": seconds}
    return environment


def plain(value: Any) -> Any:
    """Remove control characters from a value, before the template escapes it."""
    return value if hasattr(value, "__html__") else printable(value)
