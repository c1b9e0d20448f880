"""The user's project: its folder, and the project file that may be in it.

The project file is `stoker.toml`, or `[tool.stoker]` in `pyproject.toml`. Its folder is the root of
the project: the nearest one upwards from where the command is typed. Without such a file the root
is the working directory.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from stoker.trainer.errors import UserError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "stoker.toml"
SHARED_FILE = "pyproject.toml"  # its table [tool.stoker]


@dataclasses.dataclass(frozen=True)
class Project:
    """The folder of a project, and what its project file says."""

    root: Path
    file: Path | None = None
    trusted: tuple[str, ...] = ()  # packages that a _target_ in a config may name
    experiment: str | None = None  # the one of a training that names none
    runs: str = "runs"  # where runs go, relative to the root

    @property
    def runs_folder(self) -> str:
        """Where runs go, as a path from the working directory."""
        return os.path.relpath(self.root / self.runs)

    def import_folders(self) -> list[str]:
        """Return the folders whose modules a run may import: the root, and `src` in it."""
        source = self.root / "src"
        return [str(self.root), str(source)] if source.is_dir() else [str(self.root)]

    def enter(self) -> None:
        """Have the project's modules found; UserError for a trusted package that is not there."""
        for folder in reversed(self.import_folders()):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        for package in self.trusted:
            name = package.partition(".")[0]
            if importlib.util.find_spec(name) is None:
                raise UserError(
                    f"{self.file}: trusted names {package}, and {self.root} has no such package. "
                    f"Correct the name, or add the folder {name}."
                )


def current() -> Project:
    """Return the project of the working directory; UserError for a mistake in its file."""
    return of_folder(Path.cwd())


@functools.cache
def of_folder(folder: Path) -> Project:
    """Return the project that a folder belongs to.

    A file further up counts only if it has the same owner as the folder: `/tmp/stoker.toml` may be
    anybody's, and trusts code.
    """
    owner = folder.stat().st_uid
    for root in (folder, *folder.parents):
        for name in (FILE, SHARED_FILE):
            file = root / name
            if not file.is_file() or (root != folder and file.stat().st_uid != owner):
                continue
            table = table_in(file)
            if table is not None:
                return Project(root, file, **checked(file, table))
    return Project(folder)


def table_in(file: Path) -> dict[str, Any] | None:
    """Return the project's table in a file; None if the file has none."""
    contents = file.read_bytes()
    if file.name == SHARED_FILE and b"stoker" not in contents:
        return None
    try:
        values: Any = tomllib.loads(contents.decode())
    except ValueError as error:  # also if it is not UTF-8
        raise UserError(f"{file}: this is not valid TOML ({error}).") from None
    if file.name == FILE:
        return dict(values)
    tools = values.get("tool")
    table = tools.get("stoker") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UserError(f"{file}: tool.stoker is not a table. Type [tool.stoker] above its keys.")
    return table


def checked(file: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a project file; UserError for an unknown one or a wrong value."""
    keys = ("trusted", "experiment", "runs")
    for key in table:
        if key not in keys:
            raise UserError(
                f"{file}: there is no key {key}.{did_you_mean(key, keys)} "
                f"The keys are {', '.join(keys)}."
            )
    packages = table.get("trusted", [])
    if not isinstance(packages, list) or not all(map(is_dotted_name, packages)):
        raise UserError(
            f'{file}: trusted is a list of package names. Type trusted = ["mypackage"].'
        )
    for key in ("experiment", "runs"):
        value = table.get(key)
        if key in table and (not isinstance(value, str) or not value):
            raise UserError(f'{file}: {key} is a string. Type {key} = "NAME".')
    return {**table, "trusted": tuple(packages)}


def is_dotted_name(value: Any) -> bool:
    """Return whether a value is the name of a package, such as mypackage.models."""
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
