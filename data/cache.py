"""Decoded images on disk: a memory-mapped file of uint8 pixels, and a CRC32 for each image that is
in it.
"""

import contextlib
import errno
import json
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from stoker.trainer.errors import UserError
from stoker.trainer.files import open_plain
from stoker.trainer.memory import MIB

VERSION = 3  # file format version, part of every key
PIXELS = "pixels.u8"
SUMS = "crc32.u32"
ABOUT = "about.json"
FILES = (PIXELS, SUMS, ABOUT)
NOTE = (
    "Images decoded by Stoker, cached so that it need not decode them again. You can delete them "
    "at any time."
)
# Most bytes of the file to map at once. Without a limit, all of it would count as this process's
# memory.
MAPPED = 64 * MIB
# A page fault maps this many bytes around the address.
FAULT = 64 * 1024

# The contents of a cache: {"root", "images", "shape", "resized"}.
About = dict[str, Any]


def open_cache(place: str | bool, key: str, about: About) -> "tuple[PixelCache | None, str]":
    """Open or create the cache `key`; return it and a phrase that says where it is.

    `about` = {"root", "images", "shape", "resized"} says what is in it; `place` is "auto" (below
    ~/.cache), False or a folder. Without enough free space there is no cache: None, and why.
    That is a UserError for a folder that was typed.
    """
    if isinstance(place, bool):
        return None, ""
    base = default_place() if place == "auto" else os.path.abspath(os.path.expanduser(place))
    folder = os.path.join(base, key)
    about = {**about, "key": key}
    try:
        os.makedirs(base, exist_ok=True)
        remove_older(base, about)
        cache = _open_or_create(folder, about)
    except (OSError, ValueError) as error:
        if place != "auto":
            raise UserError(
                f"dataset.cache={place}: decoded images cannot be cached there ({error}).\n"
                "Type dataset.cache=DIR for another folder, or dataset.cache=false."
            ) from None
        return None, f"not cached ({error})"
    return cache, f"decoded pixels in {folder} ({cache.nbytes / MIB:,.0f} MiB)"


def default_place() -> str:
    """Return $XDG_CACHE_HOME/stoker/images, or the same below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "stoker", "images")


def _open_or_create(folder: str, about: About) -> "PixelCache":
    """Open a cache, and recreate it first if a file is missing or has the wrong size."""
    images = about["images"]
    shape = about["shape"]
    try:
        return PixelCache(folder, images, shape)
    except (FileNotFoundError, WrongSize):
        remove(folder)
    create(folder, about)
    return PixelCache(folder, images, shape)


class WrongSize(OSError):
    """A file of a cache is shorter or longer than it should be."""


class PixelCache:
    """`images` slots of one uint8 (C, H, W) each, shared by all processes that open or inherit it.

    A slot's CRC32 is written after its pixels, and 0 means that the slot is empty. So half a write,
    a killed process and a flipped bit are noticed when the slot is read. There is no lock:
    all processes write the same bytes to a slot. A worker that starts afresh opens the files again.
    OSError for links, pipes, and files of other sizes.
    """

    def __init__(self, folder: str, images: int, shape: Sequence[int]) -> None:
        if os.path.islink(folder):
            raise OSError(f"{folder} is a link")
        open_plain(os.path.join(folder, ABOUT)).close()
        self.folder = folder
        self.shape = tuple(shape)
        self.size = prod(shape)
        self.map = map_file(os.path.join(folder, PIXELS), images * self.size)
        sums = map_file(os.path.join(folder, SUMS), images * 4)
        self.pixels = torch.frombuffer(self.map, dtype=torch.uint8).view(images, self.size)
        self.sums = numpy.frombuffer(sums, dtype=numpy.uint32)
        self.nbytes = images * (self.size + 4)
        self.touched = 0  # upper bound on the mapped bytes
        self.warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (self.folder, len(self.pixels), self.shape)

    def missing(self, slots: Tensor) -> Tensor:
        """Return a bool for each slot: whether it is empty."""
        return torch.from_numpy(self.sums[slots.numpy()] == 0)

    def read(self, slots: list[int]) -> tuple[Tensor, list[int], list[int]]:
        """Return pixels (N, C, H, W), and which of the N are missing, and which are damaged."""
        pixels = self.pixels.index_select(0, torch.tensor(slots))
        rows = pixels.numpy()
        missing = []
        damaged = []
        for i, known in enumerate(self.sums[slots].tolist()):
            if known == 0:
                missing.append(i)
            elif checksum(rows[i]) != known:
                damaged.append(i)
        self._release(len(slots))
        return pixels.view(-1, *self.shape), missing, damaged

    def write(self, slot: int, image: Tensor) -> None:
        """Put an image into its slot."""
        self.pixels[slot] = image.flatten()
        self.sums[slot] = checksum(self.pixels[slot].numpy())
        self._release(1)

    def _release(self, count: int) -> None:
        """Count `count` more slots as mapped, and unmap all now and then; the system's cache keeps
        them.
        """
        self.touched += count * (self.size + FAULT)
        if self.touched > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self.touched = 0


def checksum(data: Any) -> int:
    """Return the CRC32 of some bytes, and 1 for a CRC32 of 0."""
    return zlib.crc32(data) or 1


def reopen(folder: str, images: int, shape: Sequence[int]) -> PixelCache | None:
    """Open a cache in a worker process; None if it was removed meanwhile, and the worker has to
    decode.
    """
    try:
        return PixelCache(folder, images, shape)
    except OSError:
        return None


def map_file(path: str, size: int) -> mmap.mmap:
    """Map a file as writable shared memory; OSError unless it is a regular file of this size."""
    with open_plain(path, os.O_RDWR) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise WrongSize(f"{path} does not have the expected {size:,} bytes")
        return mmap.mmap(file.fileno(), size)


def create(folder: str, about: About) -> None:
    """Make an empty cache, complete or not at all.

    If another process was faster, the folder is left to it.
    """
    base, key = os.path.split(folder)
    images = about["images"]
    sizes = {PIXELS: images * prod(about["shape"]), SUMS: images * 4}
    need = sum(sizes.values())
    free = shutil.disk_usage(base).free
    if need > free / 2:
        raise OSError(
            f"{need / MIB:,.0f} MiB are more than half of the {free / MIB:,.0f} MiB free in {base}"
        )
    temporary = tempfile.mkdtemp(prefix=f"{key}.", dir=base)
    try:
        with open(os.path.join(temporary, ABOUT), "x") as file:
            json.dump({"note": NOTE, **about}, file, indent=1)
        for name, size in sizes.items():
            reserve(os.path.join(temporary, name), size)
        os.rename(temporary, folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        if not isinstance(error, OSError) or not os.path.isdir(folder):
            raise


def reserve(path: str, size: int) -> None:
    """Write a file of `size` zeros with its room on the disk.

    In a file with holes, writing to a full disk would be a SIGBUS.
    """
    with open(path, "xb", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        file.truncate(size)


def remove(folder: str) -> None:
    """Remove a cache: its files only, and the folder if nothing else is in it."""
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


def remove_older(base: str, about: About) -> None:
    """Remove the caches of the same root and shape with another key: the images have changed
    since.
    """
    with os.scandir(base) as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        older = read_about(folder)
        alike = all(older.get(name) == about[name] for name in ("root", "shape", "resized"))
        if alike and older.get("key") != about["key"]:
            with contextlib.suppress(OSError):
                remove(folder)


def read_about(folder: str) -> About:
    """Return what about.json says, or {} if it says nothing."""
    try:
        with open_plain(os.path.join(folder, ABOUT)) as file:
            about = json.loads(file.read(2**16))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
