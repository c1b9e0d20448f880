"""The user's project: the working directory, and its project file if there is one.

The project file is `stoker.toml`, or `[tool.stoker]` in `pyproject.toml`.
"""

import dataclasses
import functools
import sys
from pathlib import Path

from stoker.data.typed import typed
from stoker.trainer.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS = 'The valid keys are trusted = ["mypackage"], experiment = "NAME" and runs = "FOLDER".'


@dataclasses.dataclass(frozen=True)
class Project:
    """The contents of the project file."""

    trusted: tuple[str, ...] = ()  # packages that a config's _target_ may name
    experiment: str | None = None  # the experiment to use if none is typed
    runs: str = "runs"  # folder for runs


def current() -> Project:
    """Return the project of the working directory; raise UserError if its file is invalid."""
    return of_folder(Path.cwd())


@functools.cache
def of_folder(folder: Path) -> Project:
    for file in (folder / "stoker.toml", folder / "pyproject.toml"):
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
            if file.name == "pyproject.toml":
                table = table.get("tool", {}).get("stoker")
            if table is None:
                continue
            for key in table:
                if not hasattr(Project, key):
                    raise UserError(f"{file}: unknown key {key}. {KEYS}")
            project: Project = typed(table, Project, str(file))
        except TypeError as error:
            raise UserError(f"{error} {KEYS}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{file}: this is not valid TOML ({error}).") from None
        return project
    return Project()


def import_folders() -> list[str]:
    """Return the folders whose modules a run may import: the project folder and its `src`."""
    return [str(folder) for folder in (Path.cwd(), Path.cwd() / "src") if folder.is_dir()]


def enter() -> None:
    """Put the project's modules on the import path."""
    for folder in reversed(import_folders()):
        if folder not in sys.path:
            sys.path.insert(0, folder)
