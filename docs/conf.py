"""The site's settings, for Sphinx: `sphinx-build -W -n docs build/docs`, then open build/docs/index.html."""

import importlib.util
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

project = "Stoker"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 3  # a link to a heading is made of its text, as on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch are about torch


def is_missing(module):
    """Of a plugin too, whose parent is a namespace that other plugins share."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its parent
        return True


OPTIONAL = ("ax", "optuna", "hydra_plugins.hydra_ax_sweeper", "hydra_plugins.hydra_optuna_sweeper")
autodoc_mock_imports = [module for module in OPTIONAL if is_missing(module)]
maximum_signature_line_length = 100
# Nothing is fetched, so nothing is linked to the references of other projects.
nitpick_ignore_regex = [("py:.*", r"(ax|hydra|hydra_plugins|omegaconf|optuna|pathlib|torch)\..*")]
default_role = "code"  # what stands in single backticks
highlight_language = "none"  # of what has no other: commands, and what they print

html_theme = "furo"
html_title = "Stoker"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_search_summary = False  # it fetches pages, which a browser refuses for a site on the disk
html_show_copyright = html_show_sphinx = False


def as_plain_text(app, what, name, obj, options, lines):
    """Docstrings are plain sentences: a star in them is a star, and begins no emphasis."""
    for i, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[i] = "".join(
            part if part.startswith("`") else part.replace("*", r"\*") for part in parts
        )


def setup(app):
    app.connect("autodoc-process-docstring", as_plain_text)
