"""Decoded images on disk: one memory-mapped file of uint8 pixels, and a CRC32 for each image that is in it."""

import contextlib
import errno
import json
import mmap
import os
import shutil
import stat
import tempfile
import zlib
from math import prod

import torch
from stoker.trainer.device import MIB
from stoker.trainer.errors import UserError
from stoker.trainer.files import open_plain

VERSION = 2  # of the files; a part of every key
PIXELS, SUMS, ABOUT = FILES = ("pixels.u8", "crc32.u32", "about.json")
MAPPED = (
    64 * MIB
)  # so much of the file is mapped in at most, or all of it would count as this process's memory


def open_cache(place, key, about):
    """(cache, phrase): the PixelCache `key`, and where it lies, for people.

    `about` = {"root", "images", "shape", "resized"} says what is in it; `place` is "auto" (below ~/.cache), false or a
    folder. Without enough room, or where no file can be mapped, there is no cache: None, and why. That is a UserError
    for a folder that was asked for.
    """
    if place is False:
        return None, ""
    base = default_place() if place == "auto" else os.path.abspath(os.path.expanduser(place))
    folder, about = os.path.join(base, key), {**about, "key": key}
    try:
        os.makedirs(base, exist_ok=True)
        remove_older(base, about)
        if not is_whole(folder, about):
            remove(folder)
            create(folder, about)
        cache = PixelCache(folder, about["images"], about["shape"])
    except (OSError, ValueError) as error:
        reason = (
            f"{error.strerror}: {error.filename}"
            if getattr(error, "filename", None)
            else str(error)
        )
        if place != "auto":
            raise UserError(
                f"dataset.cache={place}: no decoded images can be kept there ({reason}).\n"
                "Type dataset.cache=DIR for another folder, or dataset.cache=false."
            ) from None
        return None, f"not cached ({reason})"
    home = os.path.expanduser("~") + os.sep
    shown = folder if not folder.startswith(home) else os.path.join("~", folder[len(home) :])
    return cache, f"decoded pixels in {shown} ({cache.nbytes / MIB:,.0f} MiB)"


def default_place():
    """$XDG_CACHE_HOME/stoker/images, or the same below ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "stoker", "images")


class PixelCache:
    """`images` slots of one uint8 (C, H, W) each, shared by all processes that open or inherit it.

    A slot's CRC32 is written after its pixels, and 0 means that nothing is there yet: so half a write, a killed process
    and a flipped bit are noticed when the slot is read. No lock is needed, since whoever writes a slot writes the same
    bytes. A worker process that is started afresh opens the files again.
    """

    def __init__(self, folder, images, shape):
        self.folder, self.shape, self.size = folder, tuple(shape), prod(shape)
        self.map = map_file(os.path.join(folder, PIXELS), images * self.size)
        sums = map_file(os.path.join(folder, SUMS), images * 4)
        self.bytes, self.sums = memoryview(self.map), memoryview(sums).cast("I")
        self.pixels = torch.frombuffer(self.map, dtype=torch.uint8).view(images, self.size)
        self.present = torch.frombuffer(
            sums, dtype=torch.int32
        )  # the same numbers, for a look at many of them
        self.nbytes = images * (self.size + 4)
        self.touched, self.warned = 0, False

    def __reduce__(self):
        return reopen, (self.folder, len(self.pixels), self.shape)

    def missing(self, slots):
        """A bool for each slot: nothing is there yet."""
        return self.present[slots] == 0

    def read(self, slots):
        """(pixels (N, C, H, W), numbers of those that are missing, of those that are damaged) for a list of slots.

        What is not there is left undefined.
        """
        buffer = bytearray(len(slots) * self.size)
        pixels, rows = (
            torch.frombuffer(buffer, dtype=torch.uint8).view(-1, self.size),
            memoryview(buffer),
        )
        sums = [self.sums[slot] for slot in slots]
        if all(sums):
            torch.index_select(self.pixels, 0, torch.tensor(slots), out=pixels)
        elif any(sums):
            there = torch.tensor([i for i, known in enumerate(sums) if known])
            pixels[there] = self.pixels[torch.tensor(slots)[there]]
        missing, damaged = [], []
        for i, known in enumerate(sums):
            if not known:
                missing.append(i)
            elif checksum(rows[i * self.size : (i + 1) * self.size]) != known:
                damaged.append(i)
        self.release(len(slots))
        return pixels.view(-1, *self.shape), missing, damaged

    def write(self, slot, image):
        self.pixels[slot] = image.flatten()
        self.sums[slot] = checksum(self.bytes[slot * self.size : (slot + 1) * self.size])
        self.release(1)

    def read_ahead(self, slots):
        """Asks the system for the whole MiB around each slot, so that a block of neighbours is one read of the disk."""
        # 256 images of 3x224x224 that are not in memory: 66 and 88 ms with it, 82 without, and 81 and 100 in an order
        # without blocks (2 cores of an Intel Xeon at 2.6 GHz, a virtual disk).
        if hasattr(mmap, "MADV_WILLNEED"):
            for start in sorted({slot * self.size // MIB * MIB for slot in slots}):
                self.map.madvise(mmap.MADV_WILLNEED, start, min(MIB, len(self.map) - start))

    def release(self, count):
        """Notes `count` more slots as touched, and unmaps all pages now and then; they stay in the system's cache."""
        self.touched += count * (self.size + 64 * 1024)  # a fault maps the 64 KiB around it
        if self.touched > MAPPED and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
            self.touched = 0


def checksum(data):
    """The CRC32, where 1 stands for 0 as well."""
    return zlib.crc32(data) or 1


def reopen(folder, images, shape):
    """The PixelCache in a worker process, or None where it has been removed meanwhile: the worker decodes then."""
    try:
        return PixelCache(folder, images, shape)
    except OSError:
        return None


def map_file(path, size):
    """The file as writable shared memory; OSError unless it is a regular file of exactly this size."""
    with open_plain(path, os.O_RDWR) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise OSError(f"{path} has not the {size:,} bytes that it should have")
        return mmap.mmap(file.fileno(), size)


def sizes(about):
    return {PIXELS: about["images"] * prod(about["shape"]), SUMS: about["images"] * 4}


def is_whole(folder, about):
    """Whether the cache is there with files of the right sizes; OSError for what is no folder, or no regular file."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise OSError(f"{folder} is no folder")
        found = {name: os.lstat(os.path.join(folder, name)) for name in FILES}
    except FileNotFoundError:
        return False
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{os.path.join(folder, name)} is no regular file")
    return all(found[name].st_size == size for name, size in sizes(about).items())


def create(folder, about):
    """Makes an empty cache, complete or not at all; another process may have been faster."""
    base, key = os.path.split(folder)
    need, free = sum(sizes(about).values()), shutil.disk_usage(base).free
    if need > free / 2:
        raise OSError(
            f"{need / MIB:,.0f} MiB are more than half of the {free / MIB:,.0f} that are free in {base}"
        )
    temporary = tempfile.mkdtemp(prefix=f"{key}.", dir=base)
    try:
        with open(os.path.join(temporary, ABOUT), "x") as file:
            note = "Decoded images, kept by Stoker so that they need not be decoded again. May be deleted at any time."
            json.dump({"note": note, **about}, file, indent=1)
        for name, size in sizes(about).items():
            reserve(os.path.join(temporary, name), size)
        os.rename(temporary, folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove(temporary)
        if not isinstance(error, OSError) or not is_whole(folder, about):
            raise


def reserve(path, size):
    """A new file of `size` zeros with its room on the disk: a hole would be a SIGBUS when a full disk is written to."""
    descriptor = os.open(
        path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600
    )
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            try:
                return os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        file.truncate(size)


def remove(folder):
    """Removes a cache: its own files only, and the folder if nothing else is in it."""
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


def remove_older(base, about):
    """Removes the caches of the same root and shape with another key: the images are no longer those."""
    with os.scandir(base) as entries:
        folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder in folders:
        other = read_about(folder)
        if (
            all(other.get(name) == about[name] for name in ("root", "shape", "resized"))
            and other.get("key") != about["key"]
        ):
            with contextlib.suppress(OSError):
                remove(folder)


def read_about(folder):
    """What about.json says, or {}."""
    try:
        with open_plain(os.path.join(folder, ABOUT), os.O_RDONLY) as file:
            about = json.loads(file.read(2**16))
    except (OSError, ValueError, RecursionError):
        return {}
    return about if isinstance(about, dict) else {}
