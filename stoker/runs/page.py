"""HTML pages that stand alone, from templates/: no script, no network, light and dark."""

import functools
from html import escape
from pathlib import Path

from stoker.trainer.errors import printable


def render(template, **facts):
    """A whole document from a file in templates/: whatever is in the facts is text there, but for what is Markup."""
    return templates().get_template(template).render(facts)


@functools.cache
def templates():
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    options = {
        "autoescape": True,
        "trim_blocks": True,
        "lstrip_blocks": True,
        "undefined": jinja2.StrictUndefined,
    }
    return jinja2.Environment(loader=loader, finalize=plain, **options)


def plain(value):
    """What becomes of a value in a template before it is escaped: no control characters."""
    return value if hasattr(value, "__html__") else printable(value)


def safe(text):
    """The text as HTML shows it, whatever is in it."""
    return escape(printable(text))
