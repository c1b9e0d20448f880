"""The lock on a run directory, which lets only one process use the directory at a time."""

import contextlib
import errno
import os
import platform
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from stoker.runs.directory import make
from stoker.trainer import files
from stoker.trainer.errors import RunInUse, UserError, log

LOCK = ".lock"  # the lock file in a run directory
FOLDERS = ("checkpoints", "tensorboard", "wandb", "profile")  # folders that a run writes to
locks: set[FileIO] = set()  # files locked by this process


def close_all() -> None:
    """Close the lock files in a forked worker, which could outlive the run and keep its lock."""
    for file in locks:
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_all)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Create the folder and lock it. Raise RunInUse if another process holds the lock.

    The system releases the lock even if the process is killed, so a leftover lock file is harmless.
    """
    make(folder)
    for name in FOLDERS:
        if (folder / name).is_symlink():
            raise UserError(
                f"run_dir={folder}: its {name} folder is a symbolic link. "
                "Choose a different run_dir."
            )
    file = locked_file(folder)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
    locks.add(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        locks.discard(file)
        file.close()


def locked_file(folder: Path) -> FileIO:
    """Open the lock file of a folder, and lock it."""
    path = folder / LOCK
    while True:
        try:
            file = files.open_plain(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            # In a copy made with hard links, the lock would also lock the original run.
            if error.errno == errno.EMLINK:
                path.unlink()
                continue
            raise UserError(f"run_dir={folder}: {error}. Choose a different run_dir.") from None
        try:
            wait_for(file, 0.2)  # another process might be testing the lock with `is_held`
        except TimeoutError:
            owner = ""
            if os.name == "posix":
                owner = file.read(200).decode(errors="replace").strip()
            file.close()
            raise RunInUse(
                f"run_dir={folder} is in use by another process ({ascii(owner)[1:-1]})."
                " Wait until that process ends, or choose a different run_dir."
            ) from None
        except OSError as error:  # the file system might not support locks
            log.warning(
                "run_dir=%s cannot be locked (%s): do not start a second run in it.",
                folder,
                error.strerror,
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file
        file.close()  # the process that held the lock has just ended and removed the file


def is_held(folder: str | Path) -> bool:
    """Return whether a process, possibly this one, holds the lock on the folder."""
    try:
        with files.open_plain(Path(folder) / LOCK) as file:
            lock(file)  # closing the file releases the lock
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def wait_for(file: FileIO, seconds: float) -> None:
    """Wait until the file can be locked, and lock it. Raise TimeoutError after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            return lock(file)
        time.sleep(0.1)
    raise TimeoutError(f"{file.name} is locked by another process")


def lock(file: FileIO) -> None:
    """Take an exclusive lock on the file. Raise BlockingIOError if another process holds it."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except PermissionError as error:
        raise BlockingIOError(*error.args) from None
