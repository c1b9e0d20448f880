"""Sphinx settings for the documentation site, which documents the installed package.

Build the site with `sphinx-build -W -n docs build/docs`, then open build/docs/index.html.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Stoker"
extensions = [
    "myst_parser",
    "settings_reference",  # next to this file
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 3  # make anchors from the text of headings, as on GitHub

autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # docstrings inherited from torch describe torch
maximum_signature_line_length = 100
# Do not warn about names without a link: nothing is fetched from other projects' sites, and names
# that are not public have no page.
MODULES = "|".join(
    ["hydra", "numpy", "omegaconf", "optuna", "stoker", "torch", *sys.stdlib_module_names]
)
UNIMPORTED = "DTensor|Image|MicroBatches|NotFinite|Store"  # imported only for type checkers
nitpick_ignore_regex = [("py:.*", rf"({MODULES})\..*|{UNIMPORTED}")]
default_role = "code"  # for single backticks
highlight_language = "none"

html_theme = "furo"
html_title = "Stoker"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_copy_source = False
html_show_search_summary = False  # would fetch pages, which browsers block for local files
html_show_copyright = html_show_sphinx = False


def as_plain_text(app, what, name, obj, options, lines):
    """Escape asterisks, because docstrings are plain text without emphasis."""
    for i, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[i] = "".join(
            part if part.startswith("`") else part.replace("*", r"\*") for part in parts
        )


def without_factories(app, what, name, obj, options, signature, returns):
    """Show the default factory of a dataclass field as `...`, which Sphinx can parse."""
    if signature is None:
        return None
    return signature.replace("<factory>", "..."), returns


def setup(app):
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", without_factories)
