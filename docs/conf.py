"""The settings of the site, which documents the installed package.

Build it with `sphinx-build -W -n docs build/docs`, then open build/docs/index.html.
"""

import importlib.util
import re
import sys

project = "Stoker"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3  # a link to a heading is made of its text, as on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of torch are about torch


def is_missing(module):
    """Return whether `module` is not installed; its parent may be missing too."""
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


OPTIONAL = ("optuna", "hydra_plugins.hydra_optuna_sweeper")
autodoc_mock_imports = [module for module in OPTIONAL if is_missing(module)]
maximum_signature_line_length = 100
# Nothing is fetched, so nothing is linked to the references of other projects.
LIBRARIES = ("hydra", "hydra_plugins", "markupsafe", "numpy", "omegaconf", "optuna", "torch")
MODULES = "|".join([*LIBRARIES, *sys.stdlib_module_names])
UNIMPORTED = (
    "Axes|ChildFailedError|DTensor|Figure|Image|MicroBatches|Store"  # for type checkers only
)
TYPE_VARIABLES = r"stoker\.trainer\.(micro_batch\.Result|parallel\.Summable)"
nitpick_ignore_regex = [("py:.*", rf"({MODULES})\..*|{UNIMPORTED}|{TYPE_VARIABLES}")]
default_role = "code"  # for single backticks
highlight_language = "none"  # most blocks are commands and what they print

html_theme = "furo"
html_title = "Stoker"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
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
