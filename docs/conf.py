"""The settings of the site, which documents the installed package.

Build it with `sphinx-build -W -n docs build/docs`, then open build/docs/index.html.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Stoker"
extensions = [
    "myst_parser",
    "settings_reference",  # beside this file
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_heading_anchors = 3  # a link to a heading is made of its text, as on GitHub

autodoc_default_options = {"member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch are about torch
maximum_signature_line_length = 100
# Nothing is fetched, so other projects are not linked; nor are names that are not public.
MODULES = "|".join(
    ["hydra", "numpy", "omegaconf", "optuna", "stoker", "torch", *sys.stdlib_module_names]
)
UNIMPORTED = "DTensor|Image|MicroBatches|NotFinite|Store"  # for type checkers only
nitpick_ignore_regex = [("py:.*", rf"({MODULES})\..*|{UNIMPORTED}")]
default_role = "code"  # for single backticks
highlight_language = "none"

html_theme = "furo"
html_title = "Stoker"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_copy_source = False
html_show_search_summary = False  # it fetches pages, which a browser refuses for a site on the disk
html_show_copyright = html_show_sphinx = False


def as_plain_text(app, what, name, obj, options, lines):
    """Escape stars: docstrings are plain sentences, in which a star starts no emphasis."""
    for i, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[i] = "".join(
            part if part.startswith("`") else part.replace("*", r"\*") for part in parts
        )


def without_factories(app, what, name, obj, options, signature, returns):
    """Show the default factory of a dataclass's field as `...`, which Sphinx can parse."""
    if signature is None:
        return None
    return signature.replace("<factory>", "..."), returns


def setup(app):
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", without_factories)
