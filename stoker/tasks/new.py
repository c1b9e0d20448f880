"""`stoker new NAME`: create a small, complete project."""

import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from stoker.command import invocation, shell
from stoker.trainer.errors import UserError

TEMPLATE = Path(__file__).resolve().parents[1] / "template"
PLACEHOLDER = "my_project"  # replaced in the template's files and file names
TAKEN = ("configs", "tests", "runs", "__main__")  # names that the project uses for other purposes


def new(arguments: Sequence[str]) -> None:
    """Create the project NAME in a new folder of that name, and print what to type next."""
    if len(arguments) != 1:
        raise UserError(
            "new: expected one name, used for both the project and its package. "
            f"Type {shell.command([])} new NAME."
        )
    [name] = arguments
    check_name(name)
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        path = Path(name, str(source.relative_to(TEMPLATE)).replace(PLACEHOLDER, name))
        path.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        path.write_text(text, encoding="utf-8")
    print(f"project  {name}: a model, a data set, configs and a test")
    print(f"         cd {name}")
    print(f"         {shell.command([])}")
    print(f"         {shell.command([], start=[invocation.python(), '-m', 'pytest'])}")


def check_name(name: str) -> None:
    """Raise UserError unless `name` can be the name of a new package in a new folder."""
    is_name = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    is_free = name not in TAKEN and not Path(name).exists()
    if not (is_name and is_free and importlib.util.find_spec(name) is None):
        raise UserError(
            f"new {name}: this name is taken or is not a valid package name.\n"
            "Choose an unused name made of letters, digits and underscores, as in: "
            f"new {PLACEHOLDER}."
        )
