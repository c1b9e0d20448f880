"""Names -> data: each function gives the parts of one data set, with the shapes that a model needs."""

import contextlib
import functools
import gzip
import hashlib
import io
import math
import os
import struct
import warnings
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from csv import Error as CSVError
from csv import reader as read_csv
from dataclasses import dataclass
from pathlib import Path

import torch

from data.cache import VERSION, open_cache
from trainer.device import MIB, free_memory, mix_seed
from trainer.errors import UserError, check_choice, check_number, did_you_mean, log, printable
from trainer.files import open_plain

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif")
# What a file may hold, whatever its name says: Pillow knows many more, and starts a program for some of them.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
MOST_NUMBERS = 2**28  # that a table may become
LARGE = 8 * 2**30  # bytes of training pixels from which on they are read by blocks of neighbours
BLOCK = MIB  # bytes of such a block
CHUNK = 16 * MIB  # bytes that are decoded at once where all are wanted
MISSING = {"", "?", "na", "n/a", "nan", "null", "none"}


@dataclass
class Data:
    """The parts of a data set, and what models, losses and metrics have to know of it.

    A part that there is not is None. `mean` and `std` (one number a channel, for pixels in 0..1) belong to uint8
    images; None: uint8 is only brought to 0..1. Floats stay as they are. The targets of a regression are
    (value - target_mean) / target_scale, so that errors can be told in the user's units. What can be wrong with sizes,
    labels and numbers is checked here, once.
    """

    name: str
    train: object
    val: object
    test: object
    in_shape: tuple
    num_classes: int  # a regression's number of targets
    kind: str = "classification"
    classes: list | None = None
    mean: list | None = None
    std: list | None = None
    target_mean: float = 0.0
    target_scale: float = 1.0

    def __post_init__(self):
        self.name, self.in_shape = printable(self.name), tuple(self.in_shape)
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values is not None and (isinstance(values, (str, float, int)) or len(values) != self.in_shape[0]):
                raise UserError(f"dataset.{key}={values}: give a list of {self.in_shape[0]} numbers, one a channel.")
            above = 0 if key == "std" else None
            checked = values and [float(check_number(f"dataset.{key}", value, above=above)) for value in values]
            setattr(self, key, checked)
        if self.train is None:
            raise UserError(f"{self.name}: there is no training part.")
        parts = {name: getattr(self, name) for name in ("train", "val", "test") if getattr(self, name) is not None}
        for name, part in parts.items():
            check_part(f"{self.name}, {name} part", part, self.in_shape)
        if self.kind == "classification":
            counts = {name: self.count_labels(name, part.targets) for name, part in parts.items()}
            self.check_classes(counts)

    def count_labels(self, name, labels):
        """How many samples of each class a part has; UserError for what is no class number."""
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise UserError(
                f"{self.name}, {name} part: labels are a vector of int64, "
                f"and these are {labels.dtype} of shape {tuple(labels.shape)}."
            )
        wrong = (labels < 0) | (labels >= self.num_classes)
        if wrong.any():
            number = wrong.nonzero()[0].item()
            raise UserError(
                f"{self.name}, {name} part: the label {labels[number].item()} of sample {number} is not one of "
                f"the {self.num_classes} classes 0 to {self.num_classes - 1}."
            )
        return torch.bincount(labels, minlength=self.num_classes)

    def check_classes(self, counts):
        """UserError where there is one class only, or another part has a class that the training part lacks."""
        named = (lambda label: repr(printable(self.classes[label]))) if self.classes else str
        there = counts["train"].nonzero().view(-1).tolist()
        if len(there) == 1:
            raise UserError(
                f"{self.name}: all {counts['train'].sum()} training samples are of one class, {named(there[0])}. "
                "There is nothing to learn."
            )
        for name, count in counts.items():
            if other := ((counts["train"] == 0) & (count > 0)).nonzero().view(-1).tolist():
                raise UserError(
                    f"{self.name}: the {name} part has the class {named(other[0])}, and the training part has not.\n"
                    "Add training samples of it, or type another dataset.split_seed or smaller fractions."
                )


def check_part(where, part, in_shape):
    """UserError for a part that is empty, or whose samples in memory do not fit together or are not finite."""
    if not len(part):
        raise UserError(f"{where}: it is empty.")
    inputs, targets = getattr(part, "inputs", None), getattr(part, "targets", None)
    if targets is not None and len(targets) != len(part):
        raise UserError(f"{where}: there are {len(part)} inputs and {len(targets)} targets.")
    if isinstance(inputs, torch.Tensor) and tuple(inputs.shape[1:]) != in_shape:
        raise UserError(f"{where}: inputs have the shape {tuple(inputs.shape[1:])}, and should have {in_shape}.")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        low, high = tensor.aminmax()  # nan where there is one; one pass over it, and no memory
        if not (low.isfinite() and high.isfinite()):
            place = (~tensor.isfinite()).nonzero()[0].tolist()
            raise UserError(f"{where}: {name}{place} is {tensor[tuple(place)].item()}. Give finite numbers.")


def fingerprint(data):
    """A short hex string of what a training depends on: another one, and a resumed run would see other samples.

    The values of splits in memory, the names below the root, sizes and labels of image files, the number and labels of
    a user's own samples. No times and no root, so a copy of a folder has the fingerprint of the original.
    """
    state = hashlib.blake2b(repr((tuple(data.in_shape), data.num_classes, data.kind)).encode(), digest_size=16)
    for part in (data.train, data.val):
        state.update(f"{0 if part is None else len(part)} ".encode())
        for tensor in (getattr(part, "inputs", None), getattr(part, "targets", None)):
            if isinstance(tensor, torch.Tensor):
                state.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
                # As bytes without a copy: MNIST takes 0.05 s.
                state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        if isinstance(paths := getattr(part, "files", None), Paths):
            state.update(f"{part.shape} ".encode())
            for numbers in (paths.names, paths.ends.tobytes(), paths.sizes.tobytes()):
                state.update(numbers)
    return state.hexdigest()


class TensorSplit:
    """Samples that lie in memory. An index is a number, or a list of them for a whole batch."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets
        self.nbytes = inputs.nbytes

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if isinstance(index, int):
            return self.inputs[index], self.targets[index]
        index = torch.as_tensor(index)
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def tensors(self):
        """All of it: (inputs, targets)."""
        return self.inputs, self.targets


class Paths:
    """File paths below a root, as one string of bytes, and the sizes of the files.

    A path takes 16 bytes more than its letters below the root, and reading one writes to no object: worker processes
    share a list's strings only until they count a reference to them.
    """

    def __init__(self, root):
        self.root, self.names, self.ends, self.sizes = root, bytearray(), array("q"), array("q")

    def add(self, name, size):
        self.names += name
        self.ends.append(len(self.names))
        self.sizes.append(size)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, i):
        start = self.ends[i - 1] if i else 0
        return os.path.join(self.root, os.fsdecode(bytes(self.names[start : self.ends[i]])))

    def take(self, indices):
        """The Paths of these indices."""
        taken = Paths(self.root)
        for i in indices:
            taken.add(self.names[self.ends[i - 1] if i else 0 : self.ends[i]], self.sizes[i])
        return taken


class ImageSplit:
    """Image files as uint8 (channels, H, W): read from `cache` where they are in it, decoded and put there otherwise.

    `size`: the whole number to which both sides are resized, or the (H, W) of all. `slots`: the samples' places in
    the cache. `place` says where that is.
    """

    def __init__(self, files, targets, size, channels, cache=None, slots=None, place=""):
        self.files, self.targets, self.size, self.channels = files, targets, size, channels
        self.cache, self.slots, self.place = cache, torch.arange(len(files)) if slots is None else slots, place
        self.shape = (channels, size, size) if isinstance(size, int) else (channels, *size)
        self.nbytes = len(files) * math.prod(self.shape)
        # Small images are decoded faster than threads can hand the GIL over:
        # of 32x32 one thread does 8,600 a second, two do 5,600.
        large = isinstance(size, int) or math.prod(size) >= 256 * 256
        self.threads = min(os.cpu_count() or 1, 16) if large else 1
        # How many neighbours in the cache stay together in the order of an epoch: it is a function of the data alone,
        # so that no weight depends on the machine, its memory, or whether there is a cache.
        self.block = max(1, BLOCK * len(files) // self.nbytes) if self.nbytes > LARGE else 1

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        if isinstance(index, int):
            return self.read([index])[0], self.targets[index]
        return self.read(index), self.targets[index]

    def take(self, indices):
        """The ImageSplit of these samples, or None for none."""
        if not len(indices):
            return None
        files, targets, slots = self.files.take(indices.tolist()), self.targets[indices], self.slots[indices]
        return ImageSplit(files, targets, self.size, self.channels, self.cache, slots, self.place)

    def broken(self):
        """The indices of the images that cannot be read; all that were not in the cache are tried."""

        def fails(i):
            try:
                self.read([i])
            except BrokenImage:
                return True
            return False

        found = []
        with ThreadPoolExecutor(self.threads) as pool:
            for part in self.missing().split(1024):
                part = part.tolist()
                found += [i for i, failed in zip(part, pool.map(fails, part), strict=True) if failed]
        return found

    def tensors(self):
        """All of it: (inputs, targets)."""
        inputs, order = torch.empty(len(self), *self.shape, dtype=torch.uint8), self.neighbours()
        done = 0
        for pixels in self.chunks(order):
            inputs[order[done : done + len(pixels)]] = pixels
            done += len(pixels)
        return inputs, self.targets

    def chunks(self, indices):
        """Yields the pixels of these samples, some MiB at a time, decoded by several threads where that is faster."""
        with ThreadPoolExecutor(self.threads) as pool:
            for part in indices.split(max(self.threads, CHUNK * len(self) // self.nbytes)):
                yield self.read(part.tolist(), pool.map)

    def missing(self):
        """The indices of the samples that are still to be decoded."""
        if self.cache is None:
            return torch.arange(len(self))
        return self.cache.missing(self.slots).nonzero().view(-1)

    def neighbours(self):
        """The indices in the order of the slots."""
        return self.slots.argsort()

    def read(self, index, map=map):
        """The pixels of a list of samples, (N, channels, H, W); `map` is called with what decodes one of them."""
        if self.cache is None:
            pixels, todo = torch.empty(len(index), *self.shape, dtype=torch.uint8), range(len(index))
        else:
            slots = self.slots[index].tolist()
            if self.block > 1:
                self.cache.read_ahead(slots)
            pixels, missing, damaged = self.cache.read(slots)
            todo = missing + damaged
            if damaged:
                self._warn(self.files[index[damaged[0]]])

        def decode(i):
            pixels[i] = decode_image(self.files[index[i]], self.size, self.channels)

        for _ in map(decode, todo):
            pass
        if self.cache is not None:
            for i in todo:
                self.cache.write(slots[i], pixels[i])
        return pixels

    def _warn(self, file):
        if not self.cache.warned:
            log.warning("%s: its pixels in %s are damaged; decoded again.", printable(file), self.cache.folder)
        self.cache.warned = True


class BrokenImage(UserError):
    """An image file that cannot be read."""


def decode_image(file, size, channels):
    """A uint8 tensor (channels, H, W): grey for one channel, RGB for three.

    BrokenImage naming a file that cannot be read, UserError for one of another size.
    """
    from PIL import Image

    with open_image(file) as image:
        if isinstance(size, int):
            image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at the nearest scale above
        image = image.convert("L" if channels == 1 else "RGB")
        if isinstance(size, int) and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(image.height, image.width, channels)
    if not isinstance(size, int) and pixels.shape[:2] != tuple(size):
        raise UserError(
            f"{printable(file)}: this image has {pixels.shape[0]}x{pixels.shape[1]} pixels, "
            f"and the first one {size[0]}x{size[1]}.\n"
            f"Type dataset.size={min(size)} (any whole number) to resize all of them."
        )
    return pixels.permute(2, 0, 1)


@contextlib.contextmanager
def open_image(file):
    """The PIL image of a file, its pixels not yet decoded; BrokenImage for all that goes wrong with it."""
    from PIL import Image, UnidentifiedImageError

    ignore_bomb_warnings()
    try:
        with open_plain(file, links=True) as raw, Image.open(io.BufferedReader(raw), formats=IMAGE_FORMATS) as image:
            pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
            if most is not None and pixels > most:
                raise ValueError(f"its {pixels:,} pixels are more than the {most:,} that Pillow thinks safe")
            yield image
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise broken(file, f"it is none of {', '.join(IMAGE_FORMATS)}, or damaged") from None
    except Exception as error:  # Pillow's decoders raise what they like for what they do not understand
        raise broken(file, str(error) or type(error).__name__) from None


def broken(file, reason):
    return BrokenImage(
        f"{printable(file)}: this image cannot be read ({printable(reason)}).\nReplace or remove the file."
    )


@functools.cache
def ignore_bomb_warnings():
    """Pillow warns of large images and refuses twice as large ones; to us these are errors too, without a warning."""
    from PIL.Image import DecompressionBombWarning

    warnings.simplefilter("ignore", DecompressionBombWarning)


def split_indices(targets, fractions, seed, stratified=True):
    """[rest, part, part, ...]: sorted indices, one part for each of `fractions` of the samples, disjoint and complete.

    `targets` are the samples' labels, or just their number. Stratified: the same shares of each class, with at least
    one sample of it in every part where the class has enough for that. A part that is asked for and gets nothing is a
    UserError.
    """
    n = targets if isinstance(targets, int) else len(targets)
    generator = torch.Generator().manual_seed(mix_seed(seed, "split"))
    if stratified and not isinstance(targets, int):
        groups = [(targets == label).nonzero().view(-1) for label in targets.unique()] or [torch.arange(0)]
    else:
        groups = [torch.arange(n)]
    parts = [[] for _ in range(len(fractions) + 1)]
    asked = sum(fraction > 0 for fraction in fractions)
    for group in groups:
        counts = [round(len(group) * fraction) for fraction in fractions]
        if len(group) > asked:
            counts = [max(count, int(fraction > 0)) for count, fraction in zip(counts, fractions, strict=True)]
            while sum(counts) >= len(group):
                counts[counts.index(max(counts))] -= 1
        cuts = group[torch.randperm(len(group), generator=generator)].split([len(group) - sum(counts), *counts])
        for part, cut in zip(parts, cuts, strict=True):
            part.append(cut)
    parts = [torch.cat(part).sort().values for part in parts]
    for part, fraction in zip(parts, [1.0, *fractions], strict=True):
        if fraction and not len(part):
            shares = " and ".join(f"{fraction:g}" for fraction in fractions)
            raise UserError(
                f"{n} samples cannot be cut by the fractions {shares}: a part would be empty.\n"
                "Type another dataset.val_fraction or dataset.test_fraction (0: no such part)."
            )
    return parts


def _check_fractions(**fractions):
    """The values of `val_fraction=` and `test_fraction=`, after a look at their ranges."""
    for key, value in fractions.items():
        check_number(f"dataset.{key}", value, least=0, most=0.95)
    if sum(fractions.values()) > 0.95:
        given = " + ".join(f"dataset.{key}={value}" for key, value in fractions.items())
        raise UserError(f"{given}: that leaves too little to train on.")
    return list(fractions.values())


def _cut(inputs, targets, fractions, seed, stratified=True):
    """A TensorSplit, or None for a fraction of 0, of each part."""
    parts = split_indices(targets if stratified else len(targets), fractions, seed, stratified)
    return [TensorSplit(inputs[part], targets[part]) if len(part) else None for part in parts]


def digits(val_fraction=0.1, test_fraction=0.2, split_seed=0, mean=(0.3053,), std=(0.3759,)):
    """1,797 real handwritten digits of 8x8 pixels, shipped with this package; source and licence in digits.md."""
    fractions = _check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as lines:
        rows = torch.tensor([int(value) for line in lines for value in line.split(",")]).view(-1, 65)
    images = (rows[:, :64] * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    train, val, test = _cut(images, rows[:, 64].contiguous(), fractions, split_seed)
    return Data("digits", train, val, test, (1, 8, 8), 10, classes=[str(i) for i in range(10)], mean=mean, std=std)


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = [f"{i} - {name}" for i, name in enumerate(NUMBERS)]
CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
CHARACTERS = ["o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"]


def mnist(root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.1307,), std=(0.3081,)):
    """60,000 + 10,000 handwritten digits, 1x28x28 (LeCun, Cortes, Burges), from root/MNIST/raw."""
    return _idx("mnist", "MNIST", DIGITS, root, download, val_fraction, split_seed, mean, std)


def fashion_mnist(root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.2860,), std=(0.3530,)):
    """60,000 + 10,000 pieces of clothing, 1x28x28 (Xiao 2017, arXiv 1708.07747), from root/FashionMNIST/raw."""
    return _idx("fashion_mnist", "FashionMNIST", CLOTHES, root, download, val_fraction, split_seed, mean, std)


def kmnist(root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.1918,), std=(0.3483,)):
    """60,000 + 10,000 cursive Japanese characters, 1x28x28 (Clanuwat 2018, arXiv 1812.01718), from root/KMNIST/raw."""
    return _idx("kmnist", "KMNIST", CHARACTERS, root, download, val_fraction, split_seed, mean, std)


def cifar10(
    root="datasets",
    download=False,
    val_fraction=0.1,
    split_seed=0,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
):
    """50,000 + 10,000 photographs of 10 kinds, 3x32x32 (Krizhevsky 2009), from root/cifar-10-batches-py."""
    return _cifar("cifar10", "CIFAR10", root, download, val_fraction, split_seed, mean, std)


def cifar100(
    root="datasets",
    download=False,
    val_fraction=0.1,
    split_seed=0,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
):
    """50,000 + 10,000 photographs of 100 kinds, 3x32x32 (Krizhevsky 2009), from root/cifar-100-python."""
    return _cifar("cifar100", "CIFAR100", root, download, val_fraction, split_seed, mean, std)


def _idx(name, kind, classes, root, download, val_fraction, split_seed, mean, std):
    fractions = _check_fractions(val_fraction=val_fraction)
    folder = os.path.join(os.path.expanduser(root), kind, "raw")

    def read():
        parts = []
        for part in ("train", "t10k"):
            images = read_idx(os.path.join(folder, f"{part}-images-idx3-ubyte"), 3).unsqueeze(1)
            labels = read_idx(os.path.join(folder, f"{part}-labels-idx1-ubyte"), 1).long()
            if len(images) != len(labels):
                raise ValueError(f"{len(images)} images and {len(labels)} labels in the {part} files")
            parts.append(TensorSplit(images, labels))
        return parts

    train, test = _read_or_download(name, kind, root, download, read)
    train, val = _cut(train.inputs, train.targets, fractions, split_seed)
    return Data(name, train, val, test, train.inputs.shape[1:], len(classes), classes=classes, mean=mean, std=std)


def _cifar(name, kind, root, download, val_fraction, split_seed, mean, std):
    fractions = _check_fractions(val_fraction=val_fraction)
    import torchvision

    def read():
        # The files are pickles. torchvision compares the MD5 of each with the original's before it unpickles any.
        parts = [getattr(torchvision.datasets, kind)(os.path.expanduser(root), train) for train in (True, False)]
        images = [torch.as_tensor(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
        labels = [torch.as_tensor(part.targets, dtype=torch.int64) for part in parts]
        return *map(TensorSplit, images, labels), list(parts[0].classes)

    train, test, classes = _read_or_download(name, kind, root, download, read)
    train, val = _cut(train.inputs, train.targets, fractions, split_seed)
    return Data(name, train, val, test, (3, 32, 32), len(classes), classes=classes, mean=mean, std=std)


def _read_or_download(name, kind, root, download, read):
    """What `read` gives; where it cannot, and `download` says so, the files are fetched first."""
    root = os.path.expanduser(root)
    for fetched in (False, True):
        try:
            return read()
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            from data import download as downloads  # and with it urllib and ssl, only where they are wanted

            if download and not fetched:
                downloads.fetch(name, root)
                continue
            megabytes, reason = downloads.megabytes(name), printable(error)
            there = os.path.join(root, downloads.SOURCES[name].folder)
            if not os.path.isdir(there) or isinstance(error, FileNotFoundError):
                what = (
                    f"Type dataset.download=true to fetch it ({megabytes} MB), or dataset.root=DIR for where it lies."
                )
                raise UserError(f"{kind} is not in {printable(root)}.\n{what}") from None
            what = f"Type dataset.download=true to fetch it again ({megabytes} MB)."
            raise UserError(f"{kind} in {printable(there)} cannot be read ({reason}).\n{what}") from None


def read_idx(path, dimensions):
    """The uint8 tensor in a file of LeCun's IDX form; OSError or ValueError for anything else.

    The header: 0, 0, 8 (for uint8), the number of dimensions, and each of their sizes as a big-endian int32.
    """
    with open_plain(path, links=True) as raw:
        file, there = io.BufferedReader(raw), os.fstat(raw.fileno()).st_size
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions or header[:4] != bytes((0, 0, 8, dimensions)):
            raise ValueError(f"{os.path.basename(path)} is no IDX file of {dimensions} dimensions")
        sizes = struct.unpack(f">{dimensions}i", header[4:])
        if min(sizes) < 1 or there != len(header) + math.prod(sizes):
            raise ValueError(f"{os.path.basename(path)} has {there:,} bytes, which do not fit its sizes {sizes}")
        contents = bytearray(math.prod(sizes))
        if file.readinto(contents) != len(contents):
            raise ValueError(f"{os.path.basename(path)} became shorter")
    return torch.frombuffer(contents, dtype=torch.uint8).view(sizes)


def image_folder(
    root,
    size=None,
    channels=3,
    val_fraction=0.1,
    test_fraction=0.1,
    split_seed=0,
    mean=None,
    std=None,
    cache="auto",
    on_bad_sample="error",
):
    """Images in one folder a class: root/{train,val,test}/CLASS/*, or root/CLASS/*.

    A part that has no folder is cut from the training images. `size` null asks all images to have the size of the
    first, a whole number resizes them to size x size. `mean` and `std` null are measured on (at most 5,000 of) the
    training images. What is decoded is kept in `cache`: auto (below ~/.cache), false, or a folder; see data/cache.py.
    `on_bad_sample`: skip tries every image once, and leaves out those that cannot be read; error meets them later.
    """
    check_choice("dataset.on_bad_sample", on_bad_sample, ("error", "skip"))
    if cache not in ("auto", False) and not (isinstance(cache, str) and cache):
        raise UserError(f"dataset.cache={cache}: give auto, false or a folder.")
    check_number("dataset.size", size, whole=True, least=1, optional=True)
    if check_number("dataset.channels", channels, whole=True) not in (1, 3):
        raise UserError(f"dataset.channels={channels}: give 3 (colour) or 1 (grey).")
    root = os.path.expanduser(root)
    if not os.path.isdir(root):
        raise UserError(
            f"dataset.root={printable(root)}: there is no such folder.\n"
            "Type dataset.root=DIR with one folder a class in it."
        )
    top = os.path.join(root, "train") if os.path.isdir(os.path.join(root, "train")) else root
    classes = _folders(top)
    if len(classes) < 2:
        here = f"only {printable(classes[0])}" if classes else "no folder"
        raise UserError(
            f"{printable(top)}: images lie in one folder a class, and here is {here}.\n"
            "Type dataset.root=DIR with at least two classes."
        )
    state = hashlib.blake2b(digest_size=8)
    listed = {"train": _list_images(top, classes, state)}
    for label in set(range(len(classes))).difference(listed["train"][1].unique().tolist()):
        raise UserError(
            f"{printable(os.path.join(top, classes[label]))}: "
            f"there is no image in this folder ({', '.join(IMAGE_ENDINGS)}).\n"
            "Add some, or remove it; or type dataset.root=DIR for a folder with one folder a class in it."
        )
    if size is None:
        size = _first_size(listed["train"][0], on_bad_sample == "skip")
    for name in ("val", "test") if top != root else ():
        folder = os.path.join(root, name)
        if os.path.isdir(folder):
            listed[name] = _list_images(folder, classes, state)
            if not len(listed[name][0]):
                raise UserError(f"{printable(folder)}: there is no image in this folder.\nAdd some, or remove it.")
    fractions = _check_fractions(
        val_fraction=0 if "val" in listed else val_fraction, test_fraction=0 if "test" in listed else test_fraction
    )
    count = sum(len(files) for files, _ in listed.values())
    pixels, place = _open_cache(cache, root, size, channels, count, state)
    given, used = {}, 0
    for name, (files, targets) in listed.items():
        slots = torch.arange(used, used + len(files))
        if name == "train":
            # Files come class by class: neighbours in the cache are to be strangers, so that a block is a fair sample.
            slots = torch.randperm(len(files), generator=torch.Generator().manual_seed(mix_seed("slots")))
        given[name] = ImageSplit(files, targets, size, channels, pixels, slots, place)
        used += len(files)
    if on_bad_sample == "skip":
        given = _without_broken(given, classes)
    parts = split_indices(given["train"].targets, fractions, split_seed)
    train, val, test = map(given["train"].take, parts)
    val, test = given.get("val", val), given.get("test", test)
    if mean is None or std is None:
        measured = _mean_and_std(train, split_seed)
        mean, std = (measured[0] if mean is None else mean), (measured[1] if std is None else std)
    name = os.path.basename(os.path.abspath(root))
    return Data(name, train, val, test, train.shape, len(classes), classes=classes, mean=mean, std=std)


def _folders(top):
    """The names of the class folders, sorted; UserError where they may not be read."""
    with _readable(top), os.scandir(top) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


@contextlib.contextmanager
def _readable(top):
    """UserError where a folder below `top` cannot be listed."""
    try:
        yield
    except PermissionError as error:
        what = f"this folder may not be read. Type chmod -R u+rX {printable(top)}."
        raise UserError(f"{printable(error.filename)}: {what}") from None
    except OSError as error:
        raise UserError(f"{printable(error.filename or top)}: this cannot be read ({error.strerror}).") from None


def _first_size(files, skip):
    """(height, width) of the first image, or with `skip` of the first that can be opened."""
    for file in files:
        try:
            with open_image(file) as image:
                return image.height, image.width
        except BrokenImage:
            if not skip:
                raise
    raise UserError(f"{printable(files.root)}: none of its {len(files)} images can be read.")


def _without_broken(given, classes):
    """The splits without the images that cannot be read, and a warning that names some; UserError if one is left empty.

    Whether an image is left out depends on nothing but its file, so all that is made of the splits stays as it is.
    """
    broken, left = {name: split.broken() for name, split in given.items()}, {}
    count, total = sum(map(len, broken.values())), sum(map(len, given.values()))
    if not count:
        return given
    names = [printable(given[name].files[i]) for name, indices in broken.items() for i in indices[:3]][:3]
    shown = ", ".join(names) + ", ..." * (count > len(names))
    for name, split in given.items():
        keep = torch.ones(len(split), dtype=torch.bool)
        keep[broken[name]] = False
        left[name] = split.take(keep.nonzero().view(-1))
        missing = set(range(len(classes))).difference(left[name].targets.tolist() if left[name] else ())
        if left[name] is None or (name == "train" and missing):
            what = f"the {name} images" if left[name] is None else f"the class {printable(classes[min(missing)])}"
            raise UserError(
                f"dataset.on_bad_sample=skip: all of {what} cannot be read ({shown}).\nReplace or remove these files."
            )
    log.warning("%d of %d images cannot be read and are left out: %s", count, total, shown)
    return left


def _open_cache(setting, root, size, channels, images, state):
    """(cache or None, phrase) for so many images; the key is `state` and all else that the pixels depend on."""
    import PIL

    resized = isinstance(size, int)
    shape = [channels, *((size, size) if resized else size)]
    about = {"root": os.path.realpath(root), "images": images, "shape": shape, "resized": resized}
    state.update(f"{shape} {resized} {images} {VERSION} {PIL.__version__}".encode())
    return open_cache(setting, state.hexdigest(), about)


def _list_images(top, classes, state):
    """(Paths, labels) of the images in top/CLASS/, in order of their names; UserError for a class not in `classes`.

    The hash `state` is fed all names, sizes and times.
    """
    files, labels, numbers = Paths(top), [], {name: label for label, name in enumerate(classes)}
    state.update(os.path.basename(top).encode(errors="surrogateescape"))
    for name in _folders(top):
        if name not in numbers:
            shown = list(map(printable, classes[:10]))
            raise UserError(
                f"{printable(os.path.join(top, name))}: the training images have no class {name!r}."
                f"{did_you_mean(name, classes)}\n"
                f"Rename or remove the folder; they have {', '.join(shown)}{', ...' * (len(classes) > 10)}."
            )
        with _readable(top), os.scandir(os.path.join(top, name)) as entries:
            # One string a file, and no tuple: no name has a zero in it, and it sorts before every letter.
            found = sorted(
                f"{e.name}\0{e.stat().st_size}\0{e.stat().st_mtime_ns}"
                for e in entries
                if e.name.lower().endswith(IMAGE_ENDINGS) and not e.name.startswith(".") and e.is_file()
            )
        state.update(os.fsencode("\0".join([name, *found])))
        for line in found:
            file, size, _ = line.split("\0")
            files.add(os.fsencode(f"{name}/{file}"), int(size))
        labels.append(torch.full((len(found),), numbers[name]))
    return files, torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64)


def _mean_and_std(split, seed, most=5000):
    """Each channel's mean and standard deviation, as lists, in units of 0..1, of at most `most` images or 256 MiB."""
    generator = torch.Generator().manual_seed(mix_seed(seed, "mean and std"))
    most = min(most, max(1, 256 * MIB * len(split) // split.nbytes))
    chosen = torch.randperm(len(split), generator=generator)[:most].sort().values
    # From histograms: 256 counts a channel are exact, and need no float copy of the images.
    counts = torch.zeros(split.channels, 256, dtype=torch.float64)
    for images in split.chunks(chosen):
        for c in range(split.channels):
            counts[c] += torch.bincount(images[:, c].flatten(), minlength=256)
    levels = torch.arange(256).double() / 255
    mean = (counts * levels).sum(1) / counts.sum(1)
    std = ((counts * levels.square()).sum(1) / counts.sum(1) - mean.square()).clamp_min(0).sqrt()
    return mean.tolist(), std.clamp_min(1 / 255).tolist()


def synthetic(
    kind="classification",
    n=10000,
    in_shape=(20,),
    num_classes=10,
    noise=1.0,
    val_fraction=0.1,
    test_fraction=0.1,
    split_seed=0,
):
    """Data of any size that can be learnt: random patterns, and noise of `noise` times their deviation.

    A sample of a class is its pattern plus noise; a regression's targets (standard normal, `num_classes` of them) are
    the amounts in which all patterns are added up. Shapes (C, H, W) become uint8 images, flat ones float32.
    """
    check_choice("dataset.kind", kind, ("classification", "regression"))
    check_number("dataset.n", n, whole=True, least=1)
    check_number("dataset.num_classes", num_classes, whole=True, least=2 if kind == "classification" else 1)
    check_number("dataset.noise", noise, least=0)
    in_shape = tuple(
        check_number("dataset.in_shape", size, whole=True, least=1)
        for size in ([in_shape] if isinstance(in_shape, int) else in_shape)
    )
    if len(in_shape) not in (1, 3):
        raise UserError(f"dataset.in_shape={list(in_shape)}: give [features] or [channels,height,width].")
    fractions = _check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    generator = torch.Generator().manual_seed(mix_seed(split_seed, "synthetic"))
    image, classes = len(in_shape) == 3, kind == "classification"
    # The samples, and the patterns and a chunk of samples as float32, each more than once.
    size = math.prod(in_shape) * ((1 if image else 4) * n + 16 * num_classes + 16 * min(n, 4096))
    free = free_memory(torch.device("cpu"))
    if size > free:
        raise UserError(
            f"dataset.n={n}: this takes {size / MIB:,.0f} MiB of memory, and {free / MIB:,.0f} are free.\n"
            "Type a lower dataset.n, dataset.in_shape or dataset.num_classes."
        )
    patterns = torch.randn(num_classes, *in_shape, generator=generator)
    if image:  # coarse ones, which convolutions and pooling do not wash out
        coarse = torch.randn(num_classes, in_shape[0], 4, 4, generator=generator)
        patterns = torch.nn.functional.interpolate(coarse, in_shape[1:], mode="nearest")
    targets = torch.arange(n) % num_classes if classes else torch.randn(n, num_classes, generator=generator)
    inputs = torch.empty(n, *in_shape, dtype=torch.uint8 if image else torch.float32)
    for start in range(0, n, 4096):  # in pieces, so that large sets of images never exist as floats
        part = targets[start : start + 4096]
        values = (
            patterns[part] if classes else (part @ patterns.flatten(1) / math.sqrt(num_classes)).view(-1, *in_shape)
        )
        values = values + noise * torch.randn(values.shape, generator=generator)
        inputs[start : start + 4096] = (values * 40 + 128).round().clamp(0, 255) if image else values
    train, val, test = _cut(inputs, targets, fractions, split_seed, stratified=classes)
    scale = {}
    if image:
        scale = {"mean": [128 / 255] * in_shape[0], "std": [40 * math.sqrt(1 + noise**2) / 255] * in_shape[0]}
    return Data("synthetic", train, val, test, in_shape, num_classes, kind, **scale)


def csv(
    path,
    target,
    kind="auto",
    categorical=(),
    ignore=(),
    missing="error",
    delimiter=",",
    val_fraction=0.1,
    test_fraction=0.2,
    split_seed=0,
):
    """A table with a header line; one column is the target.

    Numbers are standardised, categories one-hot, both by the training part alone. A column in which every value is a
    finite number is numeric, unless named in `categorical`. A category that the training part lacks is all zeros.
    `missing`: error, drop (the rows), or mean (the training part's; a missing category is all zeros). `kind` auto:
    text, or at most 20 different whole numbers that are fewer than a tenth of the rows, are classes; other targets are
    a regression.
    """
    check_choice("dataset.kind", kind, ("auto", "classification", "regression"))
    check_choice("dataset.missing", missing, ("error", "mean", "drop"))
    fractions = _check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    path, target = str(path), str(target)  # a bare 2024 on the command line is a number
    columns = _read_table(os.path.expanduser(path), "\t" if delimiter == "tab" else delimiter)
    for key, names in (("target", [target]), ("categorical", categorical), ("ignore", ignore)):
        for name in [names] if isinstance(names, str) else names:
            if name not in columns:
                raise UserError(
                    f"dataset.{key}={name}: {printable(path)} has no such column.{did_you_mean(name, columns)}\n"
                    f"It has {', '.join(map(printable, list(columns)[:20]))}{', ...' * (len(columns) > 20)}."
                )
    ignore = {ignore} if isinstance(ignore, str) else set(ignore)
    columns = {name: values for name, values in columns.items() if name not in ignore or name == target}
    columns = _without_missing(columns, target, missing)
    answers = columns.pop(target)
    if not columns:
        raise UserError(f"{printable(path)} has no column besides the target {target}.")

    kind, classes, targets = _read_target(target, answers, kind)
    parts = split_indices(targets if classes else len(targets), fractions, split_seed, stratified=classes is not None)
    categorical, blocks = {categorical} if isinstance(categorical, str) else set(categorical), []
    for name, values in columns.items():
        room = MOST_NUMBERS - sum(map(torch.numel, blocks))
        blocks.append(_features(name, values, parts[0], name in categorical, room))
    inputs = torch.cat(blocks, 1)
    center, scale = 0.0, 1.0
    if not classes:
        center, scale = targets[parts[0]].mean().item(), targets[parts[0]].std(correction=0).item() or 1.0
        targets = ((targets - center) / scale).float()
    train, val, test = (TensorSplit(inputs[part], targets[part]) if len(part) else None for part in parts)
    name, shape, outputs = Path(path).stem, inputs.shape[1:], len(classes) if classes else 1
    return Data(name, train, val, test, shape, outputs, kind, classes, target_mean=center, target_scale=scale)


def _read_table(path, delimiter):
    """{column: list of stripped strings}; UserError for what is not a table."""
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise UserError(f"dataset.delimiter={delimiter!r}: give one character, such as ',' or ';', or tab.")
    shown = printable(path)
    try:
        with open_plain(path, links=True) as raw, io.BufferedReader(raw) as buffered:
            lines = io.TextIOWrapper(buffered, newline="", encoding="utf-8-sig")
            lines = read_csv(lines, delimiter=delimiter, skipinitialspace=True)
            header, rows = [name.strip() for name in next(lines, [])], []
            if len(header) == 1:
                raise UserError(
                    f"{shown} has one column only, {header[0][:50]!r}.\n"
                    "Type dataset.delimiter=';' (or tab) if its columns are separated by another character."
                )
            for row in lines:
                if len(row) != len(header) and row:
                    number = lines.line_num
                    raise UserError(
                        f"{shown}, line {number}: {len(row)} values for the {len(header)} columns of the header."
                    )
                if row:  # a blank line is no row
                    rows.append(row)
    except FileNotFoundError:
        raise UserError(f"dataset.path={shown}: there is no such file.") from None
    except UserError:
        raise
    except (OSError, ValueError, CSVError) as error:
        raise UserError(f"dataset.path={shown}: this is no table that can be read ({printable(error)}).") from None
    if not rows:
        raise UserError(f"{shown} is empty: it needs a header line and at least one row.")
    for name, count in Counter(header).items():
        if count > 1 or not name:
            what = f"the column {name!r} {count} times" if name else "a column without a name"
            raise UserError(f"{shown}: the header has {what}.")
    return {
        name: [value.strip() for value in values] for name, values in zip(header, zip(*rows, strict=True), strict=True)
    }


def _without_missing(columns, target, missing):
    """The columns with None for each missing value, or without the rows that have one."""
    columns = {
        name: [None if value.lower() in MISSING else value for value in values] for name, values in columns.items()
    }
    counts = {name: values.count(None) for name, values in columns.items() if None in values}
    rows = len(columns[target])
    if counts and missing == "error":
        found = ", ".join(f"{name!r} in {count}" for name, count in list(counts.items())[:3])
        found += f" and {len(counts) - 3} more" * (len(counts) > 3)
        fill = "" if target in counts else "dataset.missing=mean to fill them in, or "
        raise UserError(
            f"Values are missing in these columns: {found} of {rows} rows.\n"
            f"Type {fill}dataset.missing=drop to leave those rows out."
        )
    if target in counts and missing == "mean":
        raise UserError(
            f"The target {target!r} is missing in {counts[target]} of {rows} rows, and cannot be filled in.\n"
            "Type dataset.missing=drop."
        )
    if counts and missing == "drop":
        keep = [i for i, row in enumerate(zip(*columns.values(), strict=True)) if None not in row]
        if not keep:
            raise UserError(
                "dataset.missing=drop leaves no row: each has a missing value. "
                "Type dataset.missing=mean, or dataset.ignore=[COLUMN]."
            )
        columns = {name: [values[i] for i in keep] for name, values in columns.items()}
    return columns


def _numbers(values):
    """The values as floats, NaN where one is missing; None if one is not a finite number, or none is there."""
    try:
        numbers = [math.nan if value is None else float(value) for value in values]
    except ValueError:
        return None
    usable = all(math.isfinite(number) or value is None for number, value in zip(numbers, values, strict=True))
    return numbers if usable and any(value is not None for value in values) else None


def _read_target(name, values, kind):
    """(kind, class names or None, targets): int64 (N,), or float64 (N, 1) for a regression."""
    numbers = _numbers(values)
    distinct = sorted(set(values if numbers is None else numbers))
    if len(distinct) < 2:
        raise UserError(
            f"dataset.target={name}: all {len(values)} rows have the same value, {values[0]!r}. "
            "There is nothing to learn."
        )
    if kind == "auto":
        few = (
            numbers is not None
            and len(distinct) <= 20
            and len(distinct) < len(values) / 10
            and all(value.is_integer() for value in distinct)
        )
        kind = "classification" if numbers is None or few else "regression"
    if kind == "regression":
        if numbers is None:
            wrong = next(value for value in values if _numbers([value]) is None)
            raise UserError(
                f"dataset.target={name}: {wrong!r} is not a number.\n"
                "Type dataset.kind=classification, or choose another column."
            )
        return kind, None, torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
    labels = {value: label for label, value in enumerate(distinct)}
    targets = torch.tensor([labels[value] for value in (values if numbers is None else numbers)])
    return kind, [value if isinstance(value, str) else f"{value:g}" for value in distinct], targets


def _features(name, values, train, categorical, room):
    """float32 (N, 1) of a numeric column, (N, categories) of another one; both by what the rows of `train` hold.

    UserError where that would be more than `room` numbers, which a small file can ask for.
    """
    kinds = sorted({values[i] for i in train.tolist()} - {None})
    if not kinds:
        raise UserError(f"Column {name!r} has no value in the training part. Type dataset.ignore=[{name}].")
    numbers = None if categorical else _numbers(values)
    if numbers is not None:
        column = torch.tensor(numbers, dtype=torch.float64)
        known = column[train][~column[train].isnan()]
        column = (column - known.mean()) / (known.std(correction=0).item() or 1.0)
        return column.nan_to_num(0.0).float().unsqueeze(1)
    if not categorical and len(kinds) > max(20, len(train) / 2):
        odd = next(value for value in values if value is not None and _numbers([value]) is None)
        raise UserError(
            f"Column {name!r} has {len(kinds)} different values that are not all numbers ({odd!r}).\n"
            f"Correct it, or type dataset.ignore=[{name}] or dataset.categorical=[{name}]."
        )
    if len(values) * len(kinds) > room:
        raise UserError(
            f"Column {name!r} has {len(kinds)} categories in {len(values)} rows, which is more than fits in memory.\n"
            f"Type dataset.ignore=[{name}]."
        )
    places = {value: place for place, value in enumerate(kinds)}
    column = torch.zeros(len(values), len(kinds))
    for row, value in enumerate(values):
        if value in places:
            column[row, places[value]] = 1
    return column
