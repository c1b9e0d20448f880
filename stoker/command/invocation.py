"""The command that a user types: `stoker`, `python train.py` in a clone, or torchrun."""

import os
import sys
from pathlib import Path

from stoker.trainer import launch

ROOT = Path(launch.__file__).resolve().parents[1]  # of a clone
ROLE = "stoker"  # torchrun's role of processes that this program has started
SCRIPT = "train.py"  # the command of a clone


def program() -> list[str]:
    """Return `stoker`, or `python train.py` in a clone: the words in front of the settings."""
    started = Path(sys.argv[0]).resolve()
    is_module = (
        started.parts[-2:] == ("stoker", "__main__.py") or ROOT / "stoker" in started.parents
    )
    is_console = started.stem == "stoker" or is_module
    return ["python", SCRIPT] if is_clone() and not is_console else ["stoker"]


def is_clone() -> bool:
    """Return whether this package is a clone of the repository, and not installed."""
    return (ROOT / SCRIPT).is_file()


def pip_install(extra: str) -> str:
    """Return the pip command that installs an extra of this package."""
    package = "-e '.[{}]'" if is_clone() else "'stoker[{}]'"
    return f"pip install {package.format(extra)}"


def command() -> list[str]:
    """Return `program()`, or torchrun's command if torchrun has started this process."""
    if launch.world_size() == 1 or os.environ.get("ROLE_NAME") == ROLE:
        return program()
    nodes = launch.world_size() // launch.local_world_size()
    several = ["--nnodes", str(nodes), "..."] if nodes > 1 else []
    script = ["-m", "stoker"] if program() == ["stoker"] else [SCRIPT]
    return ["torchrun", *several, "--nproc-per-node", str(launch.local_world_size()), *script]
