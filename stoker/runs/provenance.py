"""What a result depends on besides its config: library versions and the project's code.

A run directory stores this information in result.json, in `provenance/packages.txt` (all installed
packages) and, if the project has uncommitted changes, in `provenance/changes.diff`.
"""

import dataclasses
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker import __version__
from stoker.runs.directory import CHANGES, PACKAGES

MOST_CHANGES = 2**20  # maximum characters of a diff
SECONDS = 10  # seconds to wait for git


@dataclasses.dataclass
class Revision:
    """A commit of a git repository; `dirty` if tracked files differ from the commit."""

    revision: str
    dirty: bool


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform, torch, Hydra and this package."""
    import hydra
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "hydra": hydra.__version__,
        "stoker": __version__,
    }


def packages() -> dict[str, str]:
    """Return {name: version} of all installed packages, from the names of .dist-info folders.

    The names are normalized. `importlib.metadata` would take 150 times as long for 200 packages.
    """
    versions: dict[str, str] = {}
    for place in sys.path:
        for path in Path(place).glob("*-*.dist-info"):
            name, _, version = path.stem.partition("-")
            # Python imports the first one on sys.path.
            versions.setdefault(re.sub(r"[_.]+", "-", name).lower(), version)
    return dict(sorted(versions.items()))


class Code:
    """The state of a project's git repository, read by background threads."""

    def __init__(self, folder: Path) -> None:
        pool = ThreadPoolExecutor(2)
        self.commit = pool.submit(git, folder, "rev-parse", "HEAD")
        self.diff = pool.submit(
            git, folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color"
        )
        pool.shutdown(wait=False)

    def revision(self) -> Revision | None:
        """Return the current revision, or None if there is none. Untracked files are ignored."""
        # Wait for both commands, so that neither is still running when training starts.
        diff = self.diff.result()
        commit = self.commit.result().strip()
        return Revision(commit, dirty=diff != "") if commit else None

    def files(self) -> dict[str, str]:
        """Return {name: text} for the files in provenance/."""
        listed = [f"{name}=={version}\n" for name, version in packages().items()]
        texts = {PACKAGES: "".join(listed)}
        revision = self.revision()
        if revision is not None and revision.dirty:
            texts[CHANGES] = (
                f"# changes since {revision.revision}: without binary and untracked files, "
                f"at most {MOST_CHANGES:,} characters\n{self.diff.result()[:MOST_CHANGES]}"
            )
        return texts


def git(folder: Path, *words: str) -> str:
    """Return the output of a git command, or "" if it fails."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")
