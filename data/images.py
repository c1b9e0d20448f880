"""Folders of images: list the files, decode them, and measure the mean and standard deviation of
the pixels.
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from stoker.data.cache import VERSION, PixelCache, open_cache
from stoker.data.description import Description
from stoker.data.record import Data
from stoker.data.splits import check_fractions, shuffled, split_indices
from stoker.trainer.errors import (
    UserError,
    check_choice,
    check_number,
    did_you_mean,
    first_few,
    log,
    printable,
)
from stoker.trainer.files import open_plain
from stoker.trainer.memory import MIB

if TYPE_CHECKING:
    from PIL.Image import Image

# The file extensions of torchvision's ImageFolder, plus .gif.
IMAGE_ENDINGS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
    ".gif",
)
# Allowed file formats, whatever the extension. Pillow reads many more, but for some of them it
# starts another program.
IMAGE_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
# folder name -> split, in the order in which splits are listed
PARTS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
MOST_SIZE = 4096  # maximum side length of resized images, in pixels: 50 MB per color image
CHUNK = 16 * MIB  # bytes of pixels per chunk, when all images are decoded
MOST_MEASURED = 5000  # images used to compute the mean and standard deviation


def image_folder(
    root: str,
    size: int | None = None,
    resize: int | None = None,
    channels: int = 3,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    cache: str | bool = "auto",
    on_bad_sample: str = "error",
    trained: Description | None = None,
) -> Data:
    """Images in one folder per class (subfolders included): root/{train,val,test}/CLASS/ or
    root/CLASS/.

    The val folder can also be named valid or validation. A split that has no folder is taken from
    the training images. The file extensions are those of torchvision's ImageFolder, plus .gif; a
    warning counts the files that are skipped.

    `size`: null means that all images already have the same size; a whole number up to 4,096
    resizes them to size x size. With `resize`, the shorter side is resized to that many pixels and
    the center is cropped to `size`, as torchvision's Resize and CenterCrop do.
    `mean` and `std`: null measures them on at most 5,000 training images.
    `cache`: where to cache decoded images: auto (under ~/.cache), a folder, or false for no cache;
    see data/cache.py.
    `on_bad_sample`: "skip" tries every image first and skips unreadable ones; "error" raises
    an error at the first unreadable one.
    `trained`: for an evaluation, the description of the data that the run was trained on. The
    images may then belong to a single class.
    """
    check_choice("dataset.on_bad_sample", on_bad_sample, ("error", "skip"))
    check_number("dataset.size", size, whole=True, least=1, most=MOST_SIZE, optional=True)
    if resize is not None:
        if size is None:
            raise UserError(
                f"dataset.resize={resize} also needs dataset.size, the size of the center crop."
            )
        check_number("dataset.resize", resize, whole=True, least=size, most=MOST_SIZE)
    check_choice("dataset.channels", channels, (1, 3))
    if cache is not False and (not isinstance(cache, str) or cache == ""):
        raise UserError(f"dataset.cache={cache}: expected auto, false or a folder.")
    skip = on_bad_sample == "skip"
    root = os.path.expanduser(root)
    classes, listed = _list_parts(root, fewest=2 if trained is None else 1)
    fractions = check_fractions(
        val_fraction=0 if "val" in listed else val_fraction,
        test_fraction=0 if "test" in listed else test_fraction,
    )
    shape = (size, size) if size is not None else _first_size(listed["train"][0], skip)
    form = resize or size is not None
    if size is None and trained is not None:
        _, *wanted = trained["in_shape"] or (channels,)
        if len(wanted) == 2 and tuple(wanted) != shape:
            shape = (wanted[0], wanted[1])
            form = True  # resize the images, as task=predict does
    splits = {
        name: ImageSplit(files, targets, shape, channels, form)
        for name, (files, targets) in listed.items()
    }
    for split in splits.values():
        if len(split) > 0:
            _add_cache(split, cache)
    if skip:
        splits = _without_broken(splits)
        _check_classes(splits["train"].files, splits["train"].targets, classes)
    undivided = splits["train"]
    parts = split_indices(undivided.targets, fractions, split_seed)
    for name, indices in zip(("train", "val", "test"), parts, strict=True):
        if len(indices) > 0:
            splits[name] = undivided.take(indices)
    train = splits["train"]
    if mean is None or std is None:
        measured_mean, measured_std = _mean_and_std(train, split_seed)
        mean = measured_mean if mean is None else mean
        std = measured_std if std is None else std
    return Data(
        os.path.basename(os.path.abspath(root)),
        train,
        splits.get("val"),
        splits.get("test"),
        train.shape,
        len(classes),
        classes=classes,
        mean=mean,
        std=std,
    )


def _add_cache(split: "ImageSplit", place: str | bool) -> None:
    """Open the cache of decoded images for the files of a split."""
    import PIL

    root = os.path.realpath(split.files.root)
    source = os.fsencode(f"{root}\0{list(split.shape)} {split.resize}")
    state = hashlib.blake2b(f"{VERSION} {PIL.__version__}".encode(), digest_size=8)
    split.files.feed(state)
    state.update(split.files.files["time"].tobytes())
    name = hashlib.blake2b(source, digest_size=8).hexdigest()
    split.cache, split.place = open_cache(place, name, state.hexdigest(), len(split), split.shape)


def _list_parts(root: str, fewest: int) -> "tuple[list[str], dict[str, Files]]":
    """List the classes, and the images of each split that has a folder. If there are no such
    folders, all of `root` is the training split.

    Raises:
        UserError: There are fewer classes than `fewest`, or a class has no images.
    """
    if not os.path.isdir(root):
        raise UserError(
            f"dataset.root={printable(root)}: there is no folder "
            f"{printable(os.path.abspath(root))}.\n"
            "Type dataset.root=DIR, where DIR contains one folder per class."
        )
    left_out: Counter[str] = Counter()
    try:
        tops = _find_parts(root, left_out)
        classes = _folders(tops["train"])
        if len(classes) < fewest:
            raise UserError(
                f"{printable(tops['train'])}: this folder needs at least {fewest} class folders, "
                f"but has {len(classes)}.\n"
                "Type dataset.root=DIR, where DIR contains one folder per class."
            )
        listed = {part: _list_images(top, classes, left_out) for part, top in tops.items()}
    except OSError as error:
        raise UserError(
            f"{printable(error.filename or root)}: cannot be read ({error.strerror})."
        ) from None
    _check_classes(*listed["train"], classes)
    warn_of_skipped(root, left_out)
    return classes, listed


def warn_of_skipped(root: str, left_out: "Counter[str]") -> None:
    """Log how many files and folders below `root` were skipped, by reason."""
    if left_out:
        reasons = [f"{count} {reason}" for reason, count in left_out.most_common()]
        log.warning(
            "%s: some files or folders were skipped: %s", printable(root), first_few(reasons, 8)
        )


def _check_classes(files: "Paths", targets: Tensor, classes: list[str]) -> None:
    """Raise UserError for a class without training images."""
    counts = torch.bincount(targets, minlength=len(classes)).tolist()
    if 0 in counts:
        empty = os.path.join(files.root, classes[counts.index(0)])
        raise UserError(
            f"{printable(empty)}: this folder has no images that can be read "
            f"({', '.join(IMAGE_ENDINGS)}).\nAdd some, or remove the folder."
        )


def _find_parts(root: str, left_out: "Counter[str]") -> dict[str, str]:
    """Return the folder of each split; without a train folder, `root` is the training split."""
    names = _folders(root)
    if "train" not in names:
        if names and all(name.lower() in PARTS for name in names):
            raise UserError(
                f"{printable(root)}: this folder contains {first_few(names, 3)}, but no train "
                "folder.\n"
                "Name the folders train, val and test, in lower case."
            )
        return {"train": root}
    tops: dict[str, str] = {}
    for name, part in PARTS.items():
        if name in names:
            top = os.path.join(root, name)
            if part in tops:
                raise UserError(
                    f"{printable(top)}: {printable(tops[part])} is already the {part} split.\n"
                    "Remove one of the two folders, or merge them."
                )
            tops[part] = top
    for name in names:
        if name not in PARTS:
            left_out[f"folder next to train ({printable(name)})"] += 1
    return tops


def _folders(top: str) -> list[str]:
    """Return the sorted names of the folders in `top`, except hidden ones."""
    with os.scandir(top) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


def _list_images(top: str, classes: list[str], left_out: "Counter[str]") -> "Files":
    """List the images in top/CLASS/ in the order of torchvision's ImageFolder, with their labels.

    Raises UserError for a class that is not in `classes`.
    """
    images: list[tuple[str, int, int]] = []
    labels: list[int] = []
    for name in os.listdir(top):
        if name.lower().endswith(IMAGE_ENDINGS):
            left_out["outside the class folders"] += 1
    for name in _folders(top):
        folder = os.path.join(top, name)
        if name not in classes:
            raise UserError(
                f"{printable(folder)}: the training images have no class {name!r}."
                f"{did_you_mean(name, classes)}\n"
                f"Rename or remove the folder. The classes are {first_few(classes, 10)}."
            )
        below = sorted(images_below(folder, left_out), key=lambda image: os.path.split(image[0]))
        images += below
        labels += [classes.index(name)] * len(below)
    start = len(os.path.join(top, ""))
    rows = [(os.fsencode(path[start:]), size, time) for path, size, time in images]
    longest = max((len(name) for name, _, _ in rows), default=1)
    form = [("name", f"S{longest}"), ("size", numpy.int64), ("time", numpy.int64)]
    return Paths(top, numpy.array(rows, form)), torch.tensor(labels, dtype=torch.int64)


def images_below(
    folder: str, left_out: "Counter[str]", around: tuple[str, ...] = ()
) -> Iterator[tuple[str, int, int]]:
    """Yield (path, size, modification time) of the images in a folder and its subfolders.

    Links are followed, except those to an enclosing folder (`around`), which would loop forever.
    """
    here = os.path.join(os.path.realpath(folder), "")
    if any(outer.startswith(here) for outer in around):
        left_out["linking to a parent folder"] += 1
        return
    with os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in visible:
        ending = os.path.splitext(entry.name)[1].lower()
        if entry.is_dir():
            yield from images_below(entry.path, left_out, (*around, here))
        elif ending in IMAGE_ENDINGS and entry.is_file():
            status = entry.stat()
            yield entry.path, status.st_size, status.st_mtime_ns
        else:
            left_out[f"of type {printable(ending)!r}"] += 1


def _first_size(files: "Paths", skip: bool) -> tuple[int, int]:
    """Return (height, width) of the first image; with `skip`, of the first readable image."""
    from PIL import ImageOps

    for i in range(len(files)):
        try:
            with open_image(files[i]) as image:
                turned = ImageOps.exif_transpose(image)
                return turned.height, turned.width
        except BrokenImage:
            if not skip:
                raise
    raise UserError(f"{printable(files.root)}: none of the images in this folder can be read.")


def _without_broken(splits: "dict[str, ImageSplit]") -> "dict[str, ImageSplit]":
    """Drop unreadable images, and name some of them in a warning.

    Whether an image is dropped depends only on its file, so the splits are reproducible.
    """
    broken: list[str] = []
    readable = {}
    for name, split in splits.items():
        is_readable = split.are_readable()
        broken += [split.files[int(i)] for i in (~is_readable).nonzero()]
        readable[name] = split.take(is_readable.nonzero().view(-1))
    if broken:
        log.warning(
            "Skipped %d of %d images that cannot be read: %s",
            len(broken),
            sum(map(len, splits.values())),
            first_few(broken, 3),
        )
    return readable


def _mean_and_std(split: "ImageSplit", seed: int) -> tuple[list[float], list[float]]:
    """Measure each channel's mean and standard deviation on a sample of the images, with pixels
    scaled to 0..1.
    """
    most = min(MOST_MEASURED, max(1, 256 * MIB * len(split) // split.nbytes))
    chosen = shuffled(len(split), seed, "mean and std")[:most].sort().values
    # Use histograms: 256 counts per channel are exact, and avoid a float copy of the images.
    counts = torch.zeros(split.channels, 256, dtype=torch.float64)
    for images in split.chunks(chosen):
        for c in range(split.channels):
            counts[c] += torch.bincount(images[:, c].flatten(), minlength=256)
    levels = torch.arange(256).double() / 255
    total = counts.sum(1)
    mean = (counts * levels).sum(1) / total
    square = (counts * levels.square()).sum(1) / total
    std = (square - mean.square()).clamp_min(0).sqrt()
    return mean.tolist(), std.clamp_min(1 / 255).tolist()


@dataclasses.dataclass(eq=False)
class Paths:
    """File paths below a root. `files` has the name, size and modification time of each file.

    The names are in one array of bytes, so that worker processes can share its memory. With a list
    of strings, each access would copy the memory page that holds the string's reference count.
    """

    root: str
    files: Any

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> str:
        return os.path.join(self.root, os.fsdecode(self.files["name"][i]))

    def take(self, indices: Tensor) -> "Paths":
        """Return the paths at these indices."""
        return Paths(self.root, self.files[indices.numpy()])

    def feed(self, state: "hashlib.blake2b") -> None:
        """Add all names and sizes to a hash, but not the root or the times."""
        names = self.files["name"]
        state.update(b"".join(names.tolist()))
        state.update(numpy.strings.str_len(names).cumsum().tobytes())
        state.update(self.files["size"].tobytes())


# (paths of the images, labels)
Files = tuple[Paths, Tensor]


@dataclasses.dataclass(eq=False)
class ImageSplit:
    """A split of image files, read as uint8 (channels, H, W). Images that are not in `cache` yet
    or are damaged there are decoded and added to the cache.

    `size`: the (H, W) that all images have or are resized to; see `decode_image`. `slots`: the
    slot of each sample in the cache. `place`: a phrase that says where the cache is.
    """

    dtype = torch.uint8

    files: Paths
    targets: Tensor
    size: tuple[int, int]
    channels: int
    resize: bool | int = False
    cache: PixelCache | None = None
    slots: Any = None
    place: str = ""

    def __post_init__(self) -> None:
        if self.slots is None:
            self.slots = torch.arange(len(self.files))
        self.shape = (self.channels, *self.size)
        self.nbytes = len(self) * math.prod(self.shape)
        self.threads = decoding_threads(None if self.resize else self.size)
        self.at_once = max(self.threads, CHUNK // math.prod(self.shape))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.read(indices), self.targets[indices]

    def originals(self, indices: list[int]) -> tuple[list[Tensor], Tensor]:
        """Return these images at their original size, and their targets."""
        images = [decode_image(self.files[i], None, self.channels) for i in indices]
        return images, self.targets[indices]

    def take(self, indices: Tensor) -> "ImageSplit":
        """Return an ImageSplit with only these samples."""
        return dataclasses.replace(
            self,
            files=self.files.take(indices),
            targets=self.targets[indices],
            slots=self.slots[indices],
        )

    def feed(self, state: "hashlib.blake2b") -> None:
        """Add the shape of the images and the names and sizes of the files to a fingerprint."""
        state.update(f"{self.shape} ".encode())
        self.files.feed(state)

    def are_readable(self) -> Tensor:
        """Return which images can be read. Images in the cache are not tried again."""
        result = torch.ones(len(self), dtype=torch.bool)
        with ThreadPoolExecutor(self.threads) as pool:
            for part in self.missing().split(1024):
                readable = list(pool.map(self._is_readable, part.tolist()))
                result[part] = torch.tensor(readable, dtype=torch.bool)
        return result

    def _is_readable(self, index: int) -> bool:
        try:
            self.read([index])
        except BrokenImage:
            return False
        return True

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all inputs and targets."""
        inputs = torch.empty(len(self), *self.shape, dtype=torch.uint8)
        pieces = self.chunks(torch.arange(len(self)))
        for place, pixels in zip(inputs.split(self.at_once), pieces, strict=True):
            place.copy_(pixels)
        return inputs, self.targets

    def chunks(self, indices: Tensor) -> Iterator[Tensor]:
        """Yield the pixels of these samples, a few MiB at a time. Several threads decode them if
        that is faster.
        """
        with ThreadPoolExecutor(self.threads) as pool:
            for part in indices.split(self.at_once):
                yield self.read(part.tolist(), pool.map)

    def missing(self) -> Tensor:
        """Return the indices of the samples that have not been decoded yet."""
        if self.cache is None:
            return torch.arange(len(self))
        return self.cache.missing(self.slots).nonzero().view(-1)

    @property
    def undecoded(self) -> int:
        """The number of bytes of pixels that are missing from the cache; 0 without a cache."""
        return 0 if self.cache is None else math.prod(self.shape) * len(self.missing())

    def read(self, indices: list[int], map: Callable[..., Iterator[Any]] = map) -> Tensor:
        """Return the pixels of these samples, (N, channels, H, W).

        To decode in threads, pass the `map` of a thread pool.
        """
        if self.cache is None:
            return torch.stack(list(map(self._decode, indices)))
        slots = self.slots[indices].tolist()
        pixels, todo = self.cache.read(slots)
        for i, image in zip(todo, map(self._decode, [indices[i] for i in todo]), strict=True):
            pixels[i] = image
            self.cache.write(slots[i], image)
        return pixels

    def _decode(self, index: int) -> Tensor:
        return decode_image(self.files[index], self.size, self.channels, self.resize)


def decoding_threads(size: Sequence[int] | None) -> int:
    """Return how many threads to use to decode images of size (H, W); None means any size."""
    # Decoding a small image takes less time than passing the GIL to another thread: at 32x32, one
    # thread decodes 8,600 images per second, and two threads decode 5,600.
    is_small = size is not None and math.prod(size) < 256 * 256
    return 1 if is_small else min(os.cpu_count() or 1, 16)


class BrokenImage(UserError):
    """An image file that cannot be read."""


def decode_image(
    file: str, size: Sequence[int] | None, channels: int, resize: bool | int = False
) -> Tensor:
    """Decode an image to uint8 (channels, H, W): grayscale for 1 channel, RGB for 3. The image is
    rotated according to its EXIF data.

    `size` is the (H, W) that the image must have, or None for any. With `resize=True`, the image is
    resized to `size`. If `resize` is a number, the shorter side is resized to that many pixels, and
    the center is cropped to `size`. Raises BrokenImage for a file that cannot be read, and
    UserError for an image of a different size.
    """
    from PIL import Image, ImageOps

    with open_image(file) as image:
        height, width = size or (image.height, image.width)
        if resize is True:
            # Decode a large JPEG at a reduced scale, but no smaller than twice the target size.
            image.draft(None, (2 * width, 2 * height))
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode == "F":
            raise ValueError("its pixels are floats with an unknown range")
        if image.mode.startswith("I"):
            # 16-bit pixels: `convert` would make all values above 255 white.
            image = image.point(lambda level: level * (1 / 256))
        image = image.convert("L" if channels == 1 else "RGB")
        if size is None:
            width, height = image.size
        elif resize is not True and resize:
            image = _middle(image, resize, height, width)
        elif resize and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
    if image.size != (width, height):
        raise UserError(
            f"{printable(file)}: this image is {image.height}x{image.width} pixels, "
            f"but the first is {height}x{width}.\n"
            f"Type dataset.size={min(height, width)}, or any other size, to resize all images."
        )
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).permute(2, 0, 1)


def _middle(image: "Image", shorter: int, height: int, width: int) -> "Image":
    """Resize the shorter side, then crop the center."""
    from torchvision.transforms.v2 import functional

    if shorter * max(image.size) > 4 * MOST_SIZE * min(image.size):
        raise ValueError(
            f"{image.width} pixels wide and {image.height} high is too extreme a shape"
        )
    resized = functional.resize(image, [shorter])
    middle: Image = functional.center_crop(resized, [height, width])
    return middle


@contextlib.contextmanager
def open_image(file: str) -> "Iterator[Image]":
    """Open an image with Pillow without decoding its pixels; any error becomes a BrokenImage."""
    from PIL import Image, UnidentifiedImageError

    try:
        with (
            open_plain(file, links=True) as raw,
            Image.open(io.BufferedReader(raw), formats=IMAGE_FORMATS) as image,
        ):
            yield image
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):
            reason = f"it is damaged, or its format is not one of {', '.join(IMAGE_FORMATS)}"
        raise BrokenImage(
            f"{printable(file)}: this image cannot be read ({printable(reason)}).\n"
            "Replace or remove the file, or type dataset.on_bad_sample=skip to skip such images."
        ) from None
