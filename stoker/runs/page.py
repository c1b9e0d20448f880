"""Render pages and cards from templates/.

The HTML pages need no network, have a light and a dark mode, and contain one inline script, which
their content security policy allows by its hash. base.html includes the scripts and the CSS.
"""

import base64
import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.runs.readable import duration, seconds
from stoker.trainer.errors import printable
from stoker.trainer.number_format import counted, number, size_of

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **facts: Any) -> str:
    """Render a template from templates/. HTML pages escape all facts except Markup."""
    return templates().get_template(template).render(facts)


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
    environment.globals |= {"counted": counted, "number": number, "size_of": size_of}
    environment.globals |= {"duration": duration, "seconds": seconds}
    environment.filters["sha256"] = sha256
    return environment


def plain(value: Any) -> Any:
    """Remove control characters from a value, before the template escapes it."""
    return value if hasattr(value, "__html__") else printable(value)


def sha256(script: str) -> str:
    """Return the hash of a script for the content security policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
