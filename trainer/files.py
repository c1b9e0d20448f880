"""Files that may be anybody's: read if they are regular and small enough, written whole or not at all."""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

UMASK = os.umask(0o077)  # which can only be read by setting it
os.umask(UMASK)


def open_plain(path, flags=os.O_RDONLY, *, links=False):
    """Opens a regular file without buffer; OSError for a pipe, a device, and a link unless `links`.

    A pipe would wait for ever, a device might never end, and a link leads anywhere; so does a second name of a file
    that is to be written.
    """
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY") + ("O_NOFOLLOW",) * (not links):
        flags |= getattr(os, name, 0)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(
            (os.stat if links else os.lstat)(path).st_mode
        ):  # Windows has no O_NOFOLLOW
            raise OSError(errno.EINVAL, "no regular file", str(path))
    file = os.fdopen(os.open(path, flags, 0o666), "r+b" if flags & os.O_RDWR else "rb", buffering=0)
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or (flags & os.O_RDWR and status.st_nlink > 1):
        file.close()
        if stat.S_ISREG(status.st_mode):
            raise OSError(errno.EMLINK, "a file that has other names (hard links)", str(path))
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return file


def read(path, most):
    """The bytes of a regular file; OSError where there are more than `most`, or it is a link, a pipe and the like."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
        return file.read(most)


def remove_partial(folder, names=("*",)):
    """Removes what a killed `replacing` of these names has left there, and safetensors' own temporary files."""
    for pattern in [*(f".{name}.*.part" for name in names), ".tmp??????"]:
        for path in Path(folder).glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def replacing(path):
    """Gives a temporary path; what was written there is `path` afterwards, flushed to the disk, or nothing has changed.

    The temporary file lies in the same folder, since a rename is atomic only within a file system, and is new, since
    somebody's link may lie at any name that can be guessed.
    """
    path = Path(path)
    try:
        descriptor, partial = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".part", dir=path.parent
        )
    except OSError as error:
        error.filename = str(path)  # of which alone anybody knows
        raise
    os.close(descriptor)
    try:
        yield partial
        with open(partial, "rb+") as file:
            if hasattr(os, "fchmod"):  # mkstemp's 0600 is for secrets
                os.fchmod(file.fileno(), 0o666 & ~UMASK)
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself has to reach the disk
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path, text):
    """Writes a text file in UTF-8, whole or not at all."""
    with replacing(path) as partial:
        Path(partial).write_text(text, encoding="utf-8")
