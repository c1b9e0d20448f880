"""The command that a user types: `stoker`, `python train.py` in a clone, or torchrun."""

import os
import shutil
import sys
from pathlib import Path

from stoker.trainer import launch

ROOT = Path(launch.__file__).resolve().parents[1]  # the root of a clone
PACKAGE = Path(__file__).resolve().parents[1]
ROLE = "stoker"  # torchrun's role name for processes that this program starts
SCRIPT = "train.py"  # the script that starts Stoker in a clone


def program() -> list[str]:
    """Return the part of the command before the settings: ["stoker"] or ["python", "train.py"].

    In the folder where this program was started, the command starts the same program again.
    """
    started = Path(sys.argv[0])
    if started.stem == "stoker":
        return ["stoker"] if shutil.which("stoker") == str(started) else [str(started)]
    if started.name == SCRIPT and started.is_file():
        return [python(), str(started)]
    if PACKAGE in started.resolve().parents:
        return [python(), "-m", "stoker"]
    return [python(), SCRIPT] if is_clone() else ["stoker"]


def script() -> list[str]:
    """Return the Python arguments that start this program again under the same name."""
    started = Path(sys.argv[0])
    if started.stem == "stoker" and started.is_file():
        return [str(started)]
    return program()[1:] or ["-m", "stoker"]


def python() -> str:
    """Return the command that starts this Python from a shell."""
    name = Path(sys.executable).name
    return name if shutil.which(name) == sys.executable else sys.executable


def is_clone() -> bool:
    """Return whether this package runs from a clone of the repository."""
    return (ROOT / SCRIPT).is_file()


def pip_install(extra: str) -> str:
    """Return the pip command that installs an extra of this package."""
    package = "-e '.[{}]'" if is_clone() else "'stoker[{}]'"
    return f"pip install {package.format(extra)}"


def is_started() -> bool:
    """Return whether this process is one of several that this program (not torchrun) started."""
    return os.environ.get("ROLE_NAME") == ROLE


def command(start: list[str] | None = None) -> list[str]:
    """Return `start`, or torchrun's command if torchrun has started this process.

    `start` is the argv of a program, beginning with the Python executable. It defaults to
    `program()`.
    """
    start = start or program()
    if launch.world_size() == 1 or is_started():
        return start
    nodes = launch.world_size() // launch.local_world_size()
    several = ["--nnodes", str(nodes), "..."] if nodes > 1 else []
    script = start[1:] or ["-m", "stoker"]
    return ["torchrun", *several, "--nproc-per-node", str(launch.local_world_size()), *script]
