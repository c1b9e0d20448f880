"""Downloads: over https alone, each file of a known size and SHA-256, in place whole or not at
all.
"""

import errno
import gzip
import hashlib
import io
import shutil
import tarfile
import tempfile
import time
import urllib.request
import zlib
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from stoker.trainer.errors import TrainingError, UserError, printable
from stoker.trainer.files import replacing

SILENCE = 30  # seconds without a byte
SLOWEST = 20_000  # bytes a second, of a whole file
CHUNK = 2**20
MOST_UNPACKED = 200_000_000  # bytes of an archive: CIFAR's have 186 MB in 8 files
MOST_MEMBERS = 20
# All that `get` can speak: https alone.
HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
)
# What a server or an archive can do wrong. RecursionError: headers in headers of a tar file.
FAILURES = (
    OSError,
    ValueError,
    EOFError,
    HTTPException,
    RecursionError,
    tarfile.TarError,
    zlib.error,
)


# Names and unpacked sizes.
IDX = {
    "train-images-idx3": 16 + 60000 * 784,
    "train-labels-idx1": 8 + 60000,
    "t10k-images-idx3": 16 + 10000 * 784,
    "t10k-labels-idx1": 8 + 10000,
}


class File(NamedTuple):
    """A file to fetch; `unpacked` are the bytes of what is in a .gz, None for an archive."""

    name: str
    size: int
    sha256: str
    unpacked: int | None = None


class Source(NamedTuple):
    """Where files come from, and the folder below the root that they, or their archive's members,
    go to.
    """

    url: str
    folder: str
    files: tuple[File, ...]


def idx(*sizes_and_sums: tuple[int, str]) -> tuple[File, ...]:
    """List the four files of MNIST and of those that took its form, whose contents have the same
    sizes.
    """
    files = []
    for (name, unpacked), (size, sha256) in zip(IDX.items(), sizes_and_sums, strict=True):
        files.append(File(f"{name}-ubyte.gz", size, sha256, unpacked))
    return tuple(files)


# The folders are torchvision's. Sizes and sums: MNIST, Fashion-MNIST and KMNIST as in
# tensorflow/datasets (url_checksums) and pytorch/vision's prototype; the CIFARs as in keras and
# pytorch/vision's prototype.
SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        idx(
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "fashion_mnist": Source(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "FashionMNIST/raw",
        idx(
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    "kmnist": Source(
        "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        "KMNIST/raw",
        idx(
            (18165135, "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4"),
            (29497, "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17"),
            (3041136, "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5"),
            (5120, "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c"),
        ),
    ),
    "cifar10": Source(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-10-batches-py",
        (
            File(
                "cifar-10-python.tar.gz",
                170498071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
        ),
    ),
    "cifar100": Source(
        "https://www.cs.toronto.edu/~kriz/",
        "cifar-100-python",
        (
            File(
                "cifar-100-python.tar.gz",
                169001437,
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
        ),
    ),
}


def fetch(name: str, root: str | Path) -> None:
    """Fetch a data set and unpack it below `root`; if that fails, no file is left half-written.

    UserError for any other file than the known one, and if it cannot be had; TrainingError if the
    disk is full.
    """
    source = SOURCES[name]
    target = Path(root, source.folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=target.parent) as temporary:
            for file in source.files:
                print(f"download {source.url}{file.name} ({file.size / 1e6:.1f} MB)", flush=True)
                packed = Path(temporary, file.name)
                get(source.url + file.name, file.size, file.sha256, packed)
                if file.unpacked is None:
                    archive = packed.with_suffix("")
                    gunzip(packed, archive, MOST_UNPACKED)
                    untar(archive, target)
                else:
                    target.mkdir(exist_ok=True)
                    with replacing(target / file.name.removesuffix(".gz")) as partial:
                        gunzip(packed, partial, file.unpacked)
    except FAILURES as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        kind = TrainingError if full else UserError
        raise kind(
            f"{name} could not be downloaded to {printable(root)} ({printable(reason)}).\n"
            "Type dataset.root=DIR for where it lies, if you have it."
        ) from None


def get(url: str, size: int, sha256: str, path: str | Path) -> None:
    """Write what `url` gives to `path`; OSError or ValueError unless it is exactly these bytes.

    Redirections too are followed to https only, since there is no other handler.
    """
    opener = urllib.request.OpenerDirector()
    for handler in HANDLERS:
        opener.add_handler(handler())
    end = time.monotonic() + SILENCE + size / SLOWEST
    done = 0
    digest = hashlib.sha256()
    with opener.open(url, timeout=SILENCE) as response, open(path, "wb") as file:
        while chunk := response.read1(CHUNK):
            done += len(chunk)
            if done > size:
                raise ValueError(f"it has more than the {size:,} bytes that it should have")
            if time.monotonic() > end:
                raise ValueError(f"only {done:,} of {size:,} bytes came in time")
            digest.update(chunk)
            file.write(chunk)
    if done < size:
        raise ValueError(f"it ended after {done:,} of {size:,} bytes")
    if digest.hexdigest() != sha256:
        raise ValueError(f"its SHA-256 is {digest.hexdigest()}, not {sha256}")


def gunzip(path: str | Path, target: str | Path, most: int) -> None:
    """Decompress `path` into `target`; ValueError for more than `most` bytes."""
    with gzip.open(path) as source, open(target, "wb") as file:
        while chunk := source.read(CHUNK):
            most -= len(chunk)
            if most < 0:
                raise ValueError("more is packed in it than there should be")
            file.write(chunk)


def untar(path: str | Path, folder: str | Path) -> None:
    """Write the files of an uncompressed tar archive into `folder`; they all have to be in one of
    that name.

    ValueError for a link, a device, another folder or too much, before anything is written.
    """
    folder = Path(folder)
    with tarfile.open(path, "r:") as archive:
        files: dict[str, tarfile.TarInfo] = {}
        total = 0
        for member in archive:
            total += member.size
            if total > MOST_UNPACKED or len(files) == MOST_MEMBERS:
                raise ValueError("more is packed in it than there should be")
            top, _, name = member.name.partition("/")
            is_itself = member.isdir() and name == ""
            is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
            is_plain = name not in ("", ".", "..") and not set(name) & set("/\\:\0")
            if top != folder.name or not (is_itself or (is_file and is_plain)):
                raise ValueError(f"{member.name!r} should not be in it")
            if is_file:
                files[name] = member
        folder.mkdir(exist_ok=True)
        for name, member in files.items():
            content = archive.extractfile(member)
            with replacing(folder / name) as partial, open(partial, "wb") as file:
                shutil.copyfileobj(content or io.BytesIO(), file, CHUNK)


def megabytes(name: str) -> int:
    """Return how many MB a download has."""
    return round(sum(file.size for file in SOURCES[name].files) / 1e6)
