"""Configs for the command line: one folder per group, one file per option."""

from pathlib import Path

FOLDER = Path(__file__).parent


def folders() -> list[Path]:
    """Return the folders to search for options: this one, then the project's `configs/`."""
    here = Path.cwd() / "configs"
    if not here.is_dir() or here.samefile(FOLDER):
        return [FOLDER]
    return [FOLDER, here]


def options(group: str) -> list[str]:
    """Return the names of a group's options, sorted; [] if there is no such group."""
    return sorted({path.stem for folder in folders() for path in (folder / group).glob("*.yaml")})


def file_of(name: str) -> Path | None:
    """Return the file of a config such as `model/mlp`, as Hydra finds it; None if there is none."""
    paths = [folder / f"{name}.yaml" for folder in folders()]
    return next((path for path in paths if path.is_file()), None)


def is_group(name: str) -> bool:
    """Return whether there is a config group with this name, such as `model` or `sweep/pruner`."""
    return bool(name) and (FOLDER / name).is_dir()
