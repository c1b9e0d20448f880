"""The names of checkpoint files: `step_<number>.ckpt` in a folder. Does not import torch."""

import re
from pathlib import Path

NAME = re.compile(r"step_(\d+)\.ckpt")


def path_of(folder: str | Path, step: int) -> Path:
    """Return the path of the checkpoint after `step`."""
    return Path(folder) / f"step_{step:08d}.ckpt"


def files(folder: str | Path) -> dict[int, Path]:
    """Return {step: path} of the checkpoints in a folder, newest first.

    They are sorted by step number, because names sort 100000000 before 99999999.
    """
    paths: dict[int, Path] = {}
    for path in Path(folder).glob("step_*.ckpt"):
        number = NAME.fullmatch(path.name)
        if number and path.is_file() and not path.is_symlink():
            paths[int(number[1])] = path
    return dict(sorted(paths.items(), reverse=True))
