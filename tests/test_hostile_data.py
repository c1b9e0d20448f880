"""Data sets that mean harm: no code of theirs runs, nothing waits for ever, nothing outside is
touched.
"""

import gzip
import os
import pickle
import signal
import struct
import zlib

import pytest
import torch
from PIL import Image

from stoker.data import datasets, images
from stoker.data.datasets import Data
from stoker.trainer.errors import UserError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX, and an alarm")
ESCAPES = "\x1b[2J\x1b]0;mine\x07\nroot#"  # clears the screen, names the window, begins a line


class Boom:
    """Unpickled, it makes the file `canary`."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return open, (self.canary, "w")


@pytest.fixture
def place(tmp_path):
    """A folder for a hostile data set; beside it nothing may appear or change, and it all takes a
    few seconds.
    """
    folder, keep = tmp_path / "data", tmp_path / "keep.txt"
    folder.mkdir()
    keep.write_text("mine")

    def late(*_):
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield folder
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert sorted(os.listdir(tmp_path)) == ["data", "keep.txt"] and keep.read_text() == "mine"


def refused(words, call):
    """Whether the call is a UserError of one to three lines that no terminal could take for
    commands.
    """
    with pytest.raises(UserError, match=words) as caught:
        call()
    message = str(caught.value)
    assert (
        message.count("\n") <= 2 and message.replace("\n", "").isprintable() and len(message) < 2000
    )


# ---- tables ----

ROWS = "\n".join(f"{i},{'ab'[i % 2]},{'yes' if i % 3 else 'no'}" for i in range(60))
TABLES = {
    "pipe": (os.mkfifo, "not a regular file"),
    "folder": (os.mkdir, "not a regular file"),
    "endless": (lambda path: os.symlink("/dev/zero", path), "not a regular file"),
    "link to itself": (lambda path: os.symlink(path, path), "cannot be read as a table"),
    "link to nothing": (lambda path: os.symlink("nowhere", path), "no such file"),
    "utf-16": ("a,b,y\n1,2,3\n".encode("utf-16"), "cannot be read as a table"),
    "gzip": (gzip.compress(ROWS.encode()), "cannot be read as a table"),
    "zeros": (bytes(100_000), "cannot be read as a table"),
    "long field": (f"a,b,y\n1,{'x' * 200_000},no\n", "1 samples or groups cannot be split"),
    "long line": (b"x" * 5_000_000, "cannot be read as a table"),
    "open quote": ('a,b,y\n1,"2,3\n' + ROWS, "values for the 3 columns|cannot be read as a table"),
    "escapes in the header": (f'a,"{ESCAPES}",z\n{ROWS}\n', "no such column"),
    "escapes in a value": (
        f'a,b,y\n{ROWS}\n"{ESCAPES}",a,no\n',
        "1 of 61 values cannot be read as numbers",
    ),
    "many columns": (
        ",".join(f"c{i}" for i in range(100_000)) + "\n" + ",".join("1" for _ in range(100_000)),
        "no such",
    ),
    "one name 100,000 times": (
        ",".join("y" for _ in range(100_000)) + "\n" + ",".join("1" * 100_000),
        "the same name twice",
    ),
}


def test_parquet_files(place, tables, monkeypatch):
    """Damaged anywhere, or of few bytes and many rows."""
    import pyarrow
    from pyarrow import parquet

    path = place / "table.parquet"
    parquet.write_table(pyarrow.table({"a": [1] * 10_000, "y": [0, 1] * 5_000}), path)
    whole = path.read_bytes()
    for start in (4, len(whole) // 2, len(whole) - 12):
        path.write_bytes(whole[:start] + b"\xff" * 8 + whole[start + 8 :])
        refused("cannot be read as a table", lambda: tables.csv(str(path), "y"))
    path.write_bytes(whole[: len(whole) // 2])
    refused("cannot be read as a table", lambda: tables.csv(str(path), "y"))
    path.write_bytes(whole)
    monkeypatch.setattr(tables, "MOST_NUMBERS", 19_999)
    refused("more than 19,999 values", lambda: tables.csv(str(path), "y"))


@pytest.fixture
def tables():
    pytest.importorskip("pyarrow")
    from stoker.data import tables

    return tables


@pytest.mark.parametrize("name", TABLES)
def test_tables(name, place, tables):
    content, words = TABLES[name]
    path = place / "table.csv"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(f"(?s){words}", lambda: tables.csv(str(path), "y"))


def test_a_small_table_cannot_become_gigabytes(place, tables, monkeypatch):
    """Each of many columns of text with many values is one number a row and value."""
    monkeypatch.setattr(tables, "MOST_NUMBERS", 9_000)
    header, rows = "a,b,c,y\n", [f"x{i % 30},x{i % 31},x{i % 32},{i % 2}" for i in range(100)]
    (place / "table.csv").write_text(header + "\n".join(rows))
    refused(
        r"one per category\) .*\n.*dataset.ignore=",
        lambda: tables.csv(str(place / "table.csv"), "y"),
    )


def test_a_path_with_escapes(place, tables):
    refused("no such file", lambda: tables.csv(str(place / ESCAPES), "y"))
    refused("there is no folder", lambda: images.image_folder(str(place / ESCAPES)))
    refused(
        "CIFAR10 cannot be read from",
        lambda: pytest.importorskip("torchvision") and datasets.cifar10(str(place / ESCAPES)),
    )
    refused("MNIST cannot be read from", lambda: datasets.mnist(str(place / ESCAPES)))


# ---- images ----


def chunk(kind, content):
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(width, height, *more, pixels=b"\0" * 100):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + data + chunk(b"IEND", b"")


def saved(kind, size=(6, 5), **options):
    import io

    buffer = io.BytesIO()
    Image.new("RGB", size, (10, 20, 30)).save(buffer, kind, **options)
    return buffer.getvalue()


def floats():
    import io

    buffer = io.BytesIO()
    Image.new("F", (6, 5), 0.5).save(buffer, "TIFF")
    return buffer.getvalue()


IMAGES = {
    "empty": b"",
    "text": b"no image",
    "bomb": png(20_000, 20_000),
    "large bomb": png(2**31 - 1, 2**31 - 1),
    "text bomb": png(6, 5, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))),
    "no pixels": png(0, 5),
    "cut short": saved("PNG")[:-30],
    "cut short jpeg": saved("JPEG", (64, 64))[:300],
    "wrong crc": saved("PNG").replace(b"IDAT", b"IDAU"),
    "bmp of negative size": saved("BMP")[:18]
    + struct.pack("<ii", -6, -(2**31))
    + saved("BMP")[26:],
    "gif of no size": b"GIF89a\0\0\0\0\0\0\0,\0\0\0\0\0\0\0\0\0\x02\x02L\x01\0;",
    "gif bomb": b"GIF89a" + struct.pack("<HH", 65535, 65535) + bytes(20),
    "webp garbage": b"RIFF\xff\xff\xff\x7fWEBPVP8 " + bytes(50),
    # Pillow would hand it to Ghostscript, which is a programming language.
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 5\n(../keep.txt) (w) file closefile\nshowpage\n",
    "cut short tiff": saved("TIFF")[:-60],
    "tiff of floats": floats(),
    "icon": saved("ICO", (16, 16)),
    "ppm bomb": b"P6 20000 20000 255 " + bytes(100),
}


def write_folder(place):
    for name in ("cat", "dog"):
        (place / "images" / name).mkdir(parents=True)
        for i in range(6):
            (place / "images" / name / f"{i}.png").write_bytes(saved("PNG"))
    return place / "images"


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.filterwarnings("error")
def test_images(name, place):
    folder = write_folder(place)

    def decode(**options):
        data = images.image_folder(
            str(folder), cache=str(place / "cache"), mean=[0] * 3, std=[1] * 3, **options
        )
        return [part.tensors() for part in (data.train, data.val, data.test)]

    for file in ("dog/3.png", "cat/0.png"):  # read for its pixels, and for its size
        (folder / file).write_bytes(IMAGES[name])
        for options in ({}, {"size": 4}):
            refused(
                r"(dog/3|cat/0).png: this image cannot be read",
                lambda options=options: decode(**options),
            )
    assert sum(len(inputs) for inputs, _ in decode(on_bad_sample="skip")) == 10


def test_an_image_above_the_limit_of_pillow_is_a_warning_and_above_twice_the_limit_an_error(
    place, monkeypatch
):
    file = place / "large.png"
    file.write_bytes(saved("PNG", (6, 5)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15)
    with pytest.warns(Image.DecompressionBombWarning, match="30 pixels"):
        assert images.decode_image(str(file), None, 3).shape == (3, 5, 6)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 14)
    refused("large.png: this image cannot be read", lambda: images.decode_image(str(file), None, 3))


def test_what_is_no_file_among_the_images(place):
    folder = write_folder(place)
    os.mkfifo(folder / "cat" / "pipe.png")
    os.symlink("/dev/zero", folder / "cat" / "zero.png")
    os.symlink("loop.png", folder / "cat" / "loop.png")
    os.symlink("nothing", folder / "cat" / "nothing.png")
    os.mkdir(folder / "cat" / "folder.png")
    os.mkfifo(folder / "train.png")
    try:
        data = images.image_folder(str(folder), cache=False)
    except UserError as error:  # a link to itself cannot be looked at
        assert "cannot be read" in str(error)
        (folder / "cat" / "loop.png").unlink()
        data = images.image_folder(str(folder), cache=False)
    assert len(data.train) + len(data.val) + len(data.test) == 12


def test_a_pipe_that_takes_the_place_of_an_image(place):
    folder = write_folder(place)
    data = images.image_folder(str(folder), cache=False, mean=[0] * 3, std=[1] * 3)
    for file in data.train.files:
        os.unlink(file)
        os.mkfifo(file)
    refused("this image cannot be read .*not a regular file", data.train.tensors)


def test_a_linked_class_folder_is_read(place):
    folder = write_folder(place)
    (folder / "dog").rename(place / "elsewhere")
    (folder / "dog").symlink_to(place / "elsewhere")
    assert images.image_folder(str(folder), cache=False).classes == ["cat", "dog"]


@pytest.mark.parametrize(
    "name", [ESCAPES.replace("/", ""), os.fsdecode(b"\xff\xfe"), "\u202e\u200b", "a" * 200]
)
def test_names_that_are_no_text(name, place, capfd):
    folder = write_folder(place)
    (folder / "dog").rename(folder / name)
    (folder / name / "3.png").rename(folder / name / f"{name}.png")
    (folder / name / f"{name}.png").write_bytes(b"broken")

    def load(**options):
        data = images.image_folder(
            str(folder), cache=str(place / "cache"), mean=[0] * 3, std=[1] * 3, **options
        )
        [part.tensors() for part in (data.train, data.val, data.test)]

    refused("this image cannot be read", load)
    load(on_bad_sample="skip")
    for file in (folder / name).iterdir():
        file.write_bytes(b"broken")
    refused(
        "this folder has no images that can be read",
        lambda: load(on_bad_sample="skip"),
    )
    for file in (folder / name).iterdir():
        file.unlink()
    refused("this folder has no images", load)
    (folder / name / "a.png").write_bytes(saved("PNG", (7, 7)))
    refused(
        "this image is 5x6 pixels, but the first is 7x7|this image is 7x7 pixels",
        lambda: load(val_fraction=0, test_fraction=0),
    )
    os.mkdir(place / "images2")
    folder.rename(place / "images2" / "train")
    os.makedirs(place / "images2" / "val" / f"{name[:100]}x")
    refused(
        "the training images have no class|this folder has no images",
        lambda: images.image_folder(str(place / "images2"), cache=False),
    )


# ---- MNIST and CIFAR ----


def idx(sizes, content=b""):
    return bytes((0, 0, 8, len(sizes))) + struct.pack(f">{len(sizes)}i", *sizes) + content


IMAGES_IDX = idx((40, 28, 28), bytes(range(256)) * 122 + bytes(128))
LABELS_IDX = idx((40,), bytes(i % 10 for i in range(40)))
IDX = {
    "empty": b"",
    "half a header": IMAGES_IDX[:9],
    "other dimensions": LABELS_IDX,
    "2**62 bytes": idx((2**31 - 1, 2**31 - 1, 1)),
    "no images": idx((0, 28, 28)),
    "one byte less": IMAGES_IDX[:-1],
    "one byte more": IMAGES_IDX + b"x",
    "gzip": gzip.compress(IMAGES_IDX),
    "corrupt gzip": gzip.compress(IMAGES_IDX)[:-20],
    "more images than labels": idx((41, 28, 28), IMAGES_IDX[16:] + bytes(784)),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "endless": lambda path: os.symlink("/dev/zero", path),
}


def write_mnist(place):
    raw = place / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(IMAGES_IDX)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(LABELS_IDX)
    return raw


@pytest.mark.parametrize("name", IDX)
def test_idx_files(name, place):
    raw = write_mnist(place)
    assert len(datasets.mnist(str(place)).test) == 40
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").unlink()
        if callable(IDX[name]):
            IDX[name](raw / f"{part}-images-idx3-ubyte")
        else:
            (raw / f"{part}-images-idx3-ubyte").write_bytes(IDX[name])
    refused(
        r"MNIST cannot be read from .* \(.*\)\.\nType dataset.download=true",
        lambda: datasets.mnist(str(place)),
    )


def test_labels_that_are_no_digits(place):
    raw = write_mnist(place)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(idx((40,), bytes(39) + b"\xff"))
    refused(
        "test split: the label 255 of sample 39 is not one of the 10 classes",
        lambda: datasets.mnist(str(place)),
    )


def test_a_pickle_beside_mnist_is_not_looked_at(place):
    """torchvision reads processed/*.pt of old versions instead of the files."""
    write_mnist(place)
    (place / "MNIST" / "processed").mkdir()
    for name in ("training.pt", "test.pt"):
        (place / "MNIST" / "processed" / name).write_bytes(
            pickle.dumps(Boom(place.parent / "canary"))
        )
    assert len(datasets.mnist(str(place)).test) == 40


CIFARS = [
    ("cifar10", "cifar-10-batches-py", "data_batch_1"),
    ("cifar10", "cifar-10-batches-py", "batches.meta"),
]
CIFARS += [("cifar100", "cifar-100-python", "train"), ("cifar100", "cifar-100-python", "meta")]


@pytest.mark.parametrize(("name", "folder", "file"), CIFARS)
@pytest.mark.parametrize("others", ["missing", "hostile", "pipes"])
def test_a_pickle_that_is_not_the_originals_is_not_unpickled(name, folder, file, others, place):
    pytest.importorskip("torchvision")
    (place / folder).mkdir()
    boom = pickle.dumps(Boom(place.parent / "canary"))
    names = [f"data_batch_{i}" for i in range(1, 6)] + [
        "test_batch",
        "batches.meta",
        "train",
        "test",
        "meta",
    ]
    for other in names if others != "missing" else ():
        if others == "pipes":
            os.mkfifo(place / folder / other)
        else:
            (place / folder / other).write_bytes(boom)
    (place / folder / file).unlink(missing_ok=True)
    (place / folder / file).write_bytes(boom)
    refused(
        "cannot be read .*\nType dataset.download=true", lambda: getattr(datasets, name)(str(place))
    )


def test_the_canary_would_sing(tmp_path):
    pickle.loads(pickle.dumps(Boom(tmp_path / "canary"))).close()
    assert (tmp_path / "canary").exists()


def test_a_name_with_escapes_is_shown_without_them():
    split = datasets.TensorSplit(torch.zeros(4, 2), torch.arange(4) % 2)
    assert Data(ESCAPES, split, None, None, (2,), 2).name == r"\x1b[2J\x1b]0;mine\x07\nroot#"
