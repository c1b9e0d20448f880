"""What a result depends on besides its config: versions of libraries, and the git revision."""

import dataclasses
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass
class Revision:
    """A commit of a git repository; `dirty` if tracked files differ from it."""

    revision: str
    dirty: bool


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform, torch and Hydra."""
    import hydra
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "hydra": hydra.__version__,
    }


def revision(folder: Path) -> Callable[[], Revision | None]:
    """Ask git for the current revision of a folder; return a function that waits for the answer.

    It returns None if there is no git revision. Untracked files do not make it dirty.
    """
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *describe],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return lambda: None

    def read() -> Revision | None:
        try:
            text = process.communicate(timeout=10)[0].strip()
        except subprocess.TimeoutExpired:
            process.kill()
            return None
        if not text:
            return None
        return Revision(text.removesuffix("-dirty"), text.endswith("-dirty"))

    return read
