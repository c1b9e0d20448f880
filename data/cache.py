"""Decoded images on disk: one memory-mapped file with each image's CRC32 and uint8 pixels."""

import contextlib
import mmap
import os
import shutil
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from stoker.trainer.errors import UserError
from stoker.trainer.files import open_plain, replacing
from stoker.trainer.memory import MIB
from stoker.trainer.number_format import size_of

VERSION = 4  # file format version, part of every file name
# Maximum number of mapped bytes. Without a limit, the whole file would count toward the memory of
# this process.
MAPPED = 64 * MIB
# A page fault maps this many bytes around the address.
FAULT = 64 * 1024


def open_cache(
    place: str | bool, source: str, state: str, images: int, shape: Sequence[int]
) -> "tuple[PixelCache | None, str]":
    """Open or create a cache, and return it with a phrase that says where it is.

    `place` is "auto" (under ~/.cache), a folder, or False for no cache. `source` identifies the
    image folder and size, and `state` the current files; caches with the same source but a
    different state are deleted. If the cache cannot be created, for example because there is too
    little disk space, return None and the reason; if `place` is a folder, raise UserError instead.
    """
    if isinstance(place, bool):
        return None, ""
    base = Path(place).expanduser().absolute()
    if place == "auto":
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stoker/images"
    path = base / f"{source}-{state}.pixels"
    try:
        base.mkdir(parents=True, exist_ok=True)
        for older in base.glob(f"{source}-*.pixels"):
            if older != path:
                with contextlib.suppress(OSError):
                    older.unlink()
        try:
            cache = PixelCache(path, images, shape)
        except (FileNotFoundError, ValueError):  # there is no file, or it is too short to map
            create(path, images * (4 + prod(shape)))
            cache = PixelCache(path, images, shape)
    except (OSError, ValueError) as error:
        if place == "auto":
            return None, f"not cached ({error})"
        raise UserError(
            f"dataset.cache={place}: decoded images cannot be cached there ({error}).\n"
            "Type dataset.cache=DIR for another folder, or dataset.cache=false."
        ) from None
    return cache, f"decoded pixels in {path} ({size_of(len(cache.map))})"


class PixelCache:
    """A file with a slot for each of `images` uint8 images (C, H, W), shared by all processes.

    A slot's CRC32 is written after its pixels, and 0 means that the slot is empty. Reading a slot
    therefore detects a flipped bit, or a write that a killed process left unfinished. No lock is
    needed, because all processes write the same bytes to a slot. A forked worker inherits the file,
    and a spawned worker reopens it. Raises OSError for a link or a pipe, and ValueError for a file
    that is too short.
    """

    def __init__(self, path: Path, images: int, shape: Sequence[int]) -> None:
        self.path = path
        self.shape = tuple(shape)
        self.size = prod(shape)
        with open_plain(path, os.O_RDWR) as file:
            self.map = mmap.mmap(file.fileno(), images * (4 + self.size))
        self.sums = numpy.frombuffer(self.map, dtype=numpy.uint32, count=images)
        pixels = torch.frombuffer(self.map, dtype=torch.uint8, offset=4 * images)
        self.pixels = pixels.view(images, self.size)
        self.touched = 0  # upper bound on the mapped bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (self.path, len(self.pixels), self.shape)

    def missing(self, slots: Tensor) -> Tensor:
        """Return a bool tensor that is true for the empty slots."""
        return torch.from_numpy(self.sums[slots.numpy()] == 0)

    def read(self, slots: list[int]) -> tuple[Tensor, list[int]]:
        """Return pixels (N, C, H, W), and the positions that are empty or damaged."""
        pixels = self.pixels.index_select(0, torch.tensor(slots))
        rows = pixels.numpy()
        sums = self.sums[slots].tolist()
        # No checksum is 0, so this includes the empty slots.
        todo = [i for i, known in enumerate(sums) if checksum(rows[i]) != known]
        self._release(len(slots))
        return pixels.view(-1, *self.shape), todo

    def write(self, slot: int, image: Tensor) -> None:
        """Put an image into its slot."""
        self.pixels[slot] = image.flatten()
        self.sums[slot] = checksum(self.pixels[slot].numpy())
        self._release(1)

    def _release(self, count: int) -> None:
        """Count `count` more slots as mapped, and unmap everything once the limit is reached. The
        pages stay in the system's page cache.
        """
        self.touched += count * (self.size + FAULT)
        if self.touched > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self.touched = 0


def checksum(data: Any) -> int:
    """Return the CRC32 of `data`, or 1 if it is 0, because 0 marks an empty slot."""
    return zlib.crc32(data) or 1


def reopen(path: Path, images: int, shape: Sequence[int]) -> PixelCache | None:
    """Open a cache in a worker process. If it was deleted, return None: the worker then decodes
    the images itself.
    """
    try:
        return PixelCache(path, images, shape)
    except (OSError, ValueError):
        return None


def create(path: Path, size: int) -> None:
    """Create a file of `size` zero bytes, with all of its disk space reserved.

    In a sparse file, a write to the mapping would raise SIGBUS once the disk is full.
    """
    free = shutil.disk_usage(path.parent).free
    if size > free / 2:
        raise OSError(
            f"{size_of(size)} is more than half of the {size_of(free)} free in {path.parent}"
        )
    with replacing(path) as partial, open(partial, "r+b", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(size)
