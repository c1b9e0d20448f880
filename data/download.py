"""Download the standard data sets, and check the SHA-256 of each file before writing it."""

import errno
import gzip
import hashlib
import io
import tarfile
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from stoker.trainer.errors import TrainingError, UserError, printable
from stoker.trainer.files import replacing

SILENCE = 30  # seconds to wait for more data


class File(NamedTuple):
    """A file to fetch, packed as .gz or .tar.gz."""

    name: str
    size: int
    sha256: str


class Source(NamedTuple):
    """Where files come from, and the folder under the root to unpack them into."""

    url: str
    folder: str
    files: tuple[File, ...]


def mnist_files(*sizes_and_sums: tuple[int, str]) -> tuple[File, ...]:
    """List the four files of MNIST, or of a data set in the same format."""
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        File(f"{name}-ubyte.gz", size, sha256)
        for name, (size, sha256) in zip(names, sizes_and_sums, strict=True)
    )


# The folder names are torchvision's. The sizes and checksums of MNIST, Fashion-MNIST and KMNIST
# are from tensorflow/datasets (url_checksums) and pytorch/vision's prototype; those of CIFAR are
# from keras and pytorch/vision's prototype.
SOURCES = {
    "mnist": Source(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        mnist_files(
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    ),
    "fashion_mnist": Source(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "FashionMNIST/raw",
        mnist_files(
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
    ),
    "kmnist": Source(
        "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
        "KMNIST/raw",
        mnist_files(
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
    """Download a data set and unpack it under `root`.

    Raises:
        UserError: A file cannot be downloaded, or its checksum is wrong.
        TrainingError: The disk is full.
    """
    source = SOURCES[name]
    folder = Path(root, source.folder)
    try:
        for file in source.files:
            print(f"download {source.url}{file.name} ({file.size / 1e6:.1f} MB)", flush=True)
            unpack(file.name, get(source.url, file), folder)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        kind = TrainingError if is_full else UserError
        raise kind(
            f"{name} could not be downloaded to {printable(root)} ({printable(reason)}).\n"
            "If you already have it, type dataset.root=DIR."
        ) from None


def get(url: str, file: File) -> bytes:
    """Return the contents of a file under `url`; raise ValueError if its SHA-256 is wrong."""
    with urllib.request.urlopen(url + file.name, timeout=SILENCE) as response:
        content: bytes = response.read(file.size + 1)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise ValueError(
            f"got {len(content):,} bytes with the wrong SHA-256; expected {file.size:,} bytes"
        )
    return content


def unpack(name: str, packed: bytes, folder: Path) -> None:
    """Unpack a .gz or .tar.gz into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not name.endswith(".tar.gz"):
        with replacing(folder / name.removesuffix(".gz")) as partial:
            Path(partial).write_bytes(gzip.decompress(packed))
        return
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None:
                with replacing(folder / Path(member.name).name) as partial:
                    Path(partial).write_bytes(content.read())


def megabytes(name: str) -> int:
    """Return the size of a download in MB."""
    return round(sum(file.size for file in SOURCES[name].files) / 1e6)
