"""Build the simulated accelerator, once for each version of torch and of its source."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
SOURCE = Path(__file__).with_name("simulated.cpp")
FLAGS = ("-std=c++20", "-O0", "-w", "-fPIC", "-shared")
# Looked up when this is imported: the tests have a cache of their own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "tests"


def compiler() -> str | None:
    """Return the C++ compiler of this machine, or None."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")


def library(compiler: str) -> Path:
    """Return the built library; where two processes ask for it, one builds and the other waits."""
    parts = (torch.__version__, compiler, *FLAGS, SOURCE.read_text())
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    path = CACHE / f"simulated-{name}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process that holds it
        if not path.exists():
            unfinished = path.with_suffix(".part")
            torch_folders = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
            command = [compiler, *FLAGS, *torch_folders, str(SOURCE), "-lc10", "-ltorch_cpu"]
            subprocess.run([*command, "-o", str(unfinished)], check=True)
            unfinished.replace(path)
    return path


if __name__ == "__main__":
    path = compiler()
    sys.exit("there is no C++ compiler" if path is None else f"{library(path)}")
