"""Read untrusted files within limits, and write files atomically."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path


def open_plain(path: str | Path, flags: int = os.O_RDONLY, *, links: bool = False) -> FileIO:
    """Open a regular file without a buffer. With O_RDWR in `flags`, you can also write to it.

    Raises:
        OSError: This is a pipe (which could block), a device (which could be endless), or a link
            (which could point anywhere) unless `links` is True; or a file with several hard links
            is opened for writing.
    """
    writes = bool(flags & os.O_RDWR)
    options = ["O_NONBLOCK", "O_BINARY"]
    if not links:
        options.append("O_NOFOLLOW")
    for name in options:
        flags |= getattr(os, name, 0)
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.stat(path, follow_symlinks=links), path)  # Windows has no O_NOFOLLOW
    file = FileIO(os.open(path, flags, 0o666), "r+b" if writes else "rb")
    try:
        status = os.fstat(file.fileno())
        check_regular(status, path)
        if writes and status.st_nlink > 1:
            raise OSError(errno.EMLINK, "the file has other names (hard links)", str(path))
    except OSError:
        file.close()
        raise
    return file


def check_regular(status: os.stat_result, path: str | Path) -> None:
    """Raise OSError unless this is the status of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read(path: str | Path, most: int) -> bytes:
    """Return the contents of a regular file; raise OSError if it is larger than `most` bytes."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
        return file.read(most)


def remove_partial(folder: str | Path, names: Iterable[str] = ("*",)) -> None:
    """Remove temporary files of `replacing` and safetensors that a killed process left behind."""
    for pattern in [*(f".{name}.*.part" for name in names), ".tmp??????"]:
        for path in Path(folder).glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[str]:
    """Yield the path of a temporary file, which replaces `path` atomically at the end.

    The file is flushed to disk first. It is in the same folder, because a rename is atomic only
    within a file system. Its name is random, because an attacker could create a link with a
    predictable name.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        partial.touch(exist_ok=False)  # does not follow a link
        mode = partial.stat().st_mode
    except OSError as error:
        error.filename = str(path)  # show the target, not the temporary name
        raise
    try:
        yield str(partial)
        partial.chmod(mode)  # safetensors replaces the file with one of mode 0600
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # flush the rename to disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path) as partial:
        Path(partial).write_text(text, encoding="utf-8")
