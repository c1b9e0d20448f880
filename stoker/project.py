"""The user's project: its folder, and the project file that may be in it.

The project file is `stoker.toml`, or `[tool.stoker]` in `pyproject.toml`. Its folder is the root of
the project: the nearest one upwards from where the command is typed. Without such a file the root
is the working directory.
"""

import dataclasses
import functools
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
SHARED_FILE = "pyproject.toml"  # in its [tool.stoker] table
EXAMPLES = {"trusted": '["mypackage"]', "experiment": '"NAME"', "runs": '"FOLDER"'}


@dataclasses.dataclass(frozen=True)
class Project:
    """The folder of a project, and what its project file says."""

    root: Path
    file: Path | None = None
    trusted: tuple[str, ...] = ()  # packages that a config's _target_ may name
    experiment: str | None = None  # the experiment used if none is typed
    runs: str = "runs"  # folder for runs, relative to the root

    @property
    def runs_folder(self) -> str:
        """Where runs go, as a path from the working directory."""
        return os.path.relpath(self.root / self.runs)

    def import_folders(self) -> list[str]:
        """Return the folders whose modules a run may import: the root, and `src` in it."""
        source = self.root / "src"
        return [str(self.root), str(source)] if source.is_dir() else [str(self.root)]

    def enter(self) -> None:
        """Have the project's modules found."""
        for folder in reversed(self.import_folders()):
            if folder not in sys.path:
                sys.path.insert(0, folder)


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
    except ValueError as error:  # also raised if it is not UTF-8
        raise UserError(f"{file}: this is not valid TOML ({error}).") from None
    if file.name == FILE:
        return dict(values)
    table: dict[str, Any] | None = values.get("tool", {}).get("stoker")
    return table


def checked(file: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a project file; UserError for an unknown one or a wrong value."""
    for key, value in table.items():
        if key not in EXAMPLES:
            raise UserError(
                f"{file}: there is no key {key}.{did_you_mean(key, EXAMPLES)} "
                f"The keys are {', '.join(EXAMPLES)}."
            )
        is_valid = isinstance(value, str) and value != ""
        if key == "trusted":
            is_valid = isinstance(value, list) and all(map(is_dotted_name, value))
        if not is_valid:
            raise UserError(f"{file}: {key} is not valid. Type {key} = {EXAMPLES[key]}.")
    return {**table, "trusted": tuple(table.get("trusted", ()))}


def is_dotted_name(value: Any) -> bool:
    """Return whether a value is the name of a package, such as mypackage.models."""
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))
