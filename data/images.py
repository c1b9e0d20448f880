"""A folder of images: what is in it, the splits that decode it, and the mean and deviation of its pixels."""

import contextlib
import functools
import hashlib
import io
import math
import os
import warnings
from array import array
from concurrent.futures import ThreadPoolExecutor

import torch
from stoker.data.cache import VERSION, open_cache
from stoker.data.description import is_description
from stoker.data.record import Data
from stoker.data.splits import check_fractions, split_indices
from stoker.trainer.device import MIB, mix_seed
from stoker.trainer.errors import (
    UserError,
    check_choice,
    check_number,
    did_you_mean,
    log,
    printable,
)
from stoker.trainer.files import open_plain

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif")
# What a file may hold, whatever its name says: Pillow knows many more, and starts a program for some of them.
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF")
LARGE = 8 * 2**30  # bytes of training pixels from which on they are read by blocks of neighbours
BLOCK = MIB  # bytes of such a block
MOST_SIZE = 4096  # pixels of a side that images are resized to: 50 MB a colour image
CHUNK = 16 * MIB  # bytes that are decoded at once where all are wanted


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
    trained=None,
):
    """Images in one folder a class: root/{train,val,test}/CLASS/*, or root/CLASS/*.

    A part that has no folder is cut from the training images. `size` null asks all images to have the size of the
    first, a whole number (at most 4,096) resizes them to size x size. `mean` and `std` null are measured on (at most
    5,000 of) the training images. What is decoded is kept in `cache`: auto (below ~/.cache), false, or a folder; see
    data/cache.py.
    `on_bad_sample`: skip tries every image once, and leaves out those that cannot be read; error meets them later.
    `trained`: what a run's data set said of itself; to be evaluated, one class is enough, and where `size` is null,
    images of another size are resized to the run's, if that is square.
    """
    check_choice("dataset.on_bad_sample", on_bad_sample, ("error", "skip"))
    if cache not in ("auto", False) and not (isinstance(cache, str) and cache):
        raise UserError(f"dataset.cache={cache}: give auto, false or a folder.")
    check_number("dataset.size", size, whole=True, least=1, most=MOST_SIZE, optional=True)
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
    if len(classes) < (2 if trained is None else 1):
        here = f"only {printable(classes[0])}" if classes else "no folder"
        raise UserError(
            f"{printable(top)}: images lie in one folder a class, and here is {here}.\n"
            f"Type dataset.root=DIR with at least {'two classes' if trained is None else 'one of the classes'}."
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
        _, *wanted = trained["in_shape"] if is_description(trained) else (channels, *size)
        if tuple(wanted) != size and len(set(wanted)) == 1 < len(wanted):
            size = wanted[0]  # resized, as task=predict does it
    for name in ("val", "test") if top != root else ():
        folder = os.path.join(root, name)
        if os.path.isdir(folder):
            listed[name] = _list_images(folder, classes, state)
            if not len(listed[name][0]):
                raise UserError(
                    f"{printable(folder)}: there is no image in this folder.\nAdd some, or remove it."
                )
    fractions = check_fractions(
        val_fraction=0 if "val" in listed else val_fraction,
        test_fraction=0 if "test" in listed else test_fraction,
    )
    count = sum(len(files) for files, _ in listed.values())
    pixels, place = _open_cache(cache, root, size, channels, count, state)
    given, used = {}, 0
    for name, (files, targets) in listed.items():
        slots = torch.arange(used, used + len(files))
        if name == "train":
            # Files come class by class: neighbours in the cache are to be strangers, so that a block is a fair sample.
            slots = torch.randperm(
                len(files), generator=torch.Generator().manual_seed(mix_seed("slots"))
            )
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
    return Data(
        name, train, val, test, train.shape, len(classes), classes=classes, mean=mean, std=std
    )


def _folders(top):
    """The names of the class folders, sorted; UserError where they may not be read."""
    with _readable(top), os.scandir(top) as entries:
        return sorted(
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )


@contextlib.contextmanager
def _readable(top):
    """UserError where a folder below `top` cannot be listed."""
    try:
        yield
    except PermissionError as error:
        what = f"this folder may not be read. Type chmod -R u+rX {printable(top)}."
        raise UserError(f"{printable(error.filename)}: {what}") from None
    except OSError as error:
        raise UserError(
            f"{printable(error.filename or top)}: this cannot be read ({error.strerror})."
        ) from None


def _first_size(files, skip):
    """(height, width) of the first image, or with `skip` of the first that can be opened."""
    from PIL import ExifTags

    for file in files:
        try:
            with open_image(file) as image:
                turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
                return (image.width, image.height) if turned else (image.height, image.width)
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
    names = [
        printable(given[name].files[i]) for name, indices in broken.items() for i in indices[:3]
    ][:3]
    shown = ", ".join(names) + ", ..." * (count > len(names))
    for name, split in given.items():
        keep = torch.ones(len(split), dtype=torch.bool)
        keep[broken[name]] = False
        left[name] = split.take(keep.nonzero().view(-1))
        missing = set(range(len(classes))).difference(
            left[name].targets.tolist() if left[name] else ()
        )
        if left[name] is None or (name == "train" and missing):
            what = (
                f"the {name} images"
                if left[name] is None
                else f"the class {printable(classes[min(missing)])}"
            )
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
                if e.name.lower().endswith(IMAGE_ENDINGS)
                and not e.name.startswith(".")
                and e.is_file()
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

    def feed(self, state):
        """Feeds all names and sizes, and no root, to a hash."""
        for numbers in (self.names, self.ends.tobytes(), self.sizes.tobytes()):
            state.update(numbers)


class ImageSplit:
    """Image files as uint8 (channels, H, W): read from `cache` where they are in it, decoded and put there otherwise.

    `size`: the whole number to which both sides are resized, or the (H, W) of all. `slots`: the samples' places in
    the cache. `place` says where that is.
    """

    dtype = torch.uint8

    def __init__(self, files, targets, size, channels, cache=None, slots=None, place=""):
        self.files, self.targets, self.size, self.channels = files, targets, size, channels
        self.cache, self.slots, self.place = (
            cache,
            torch.arange(len(files)) if slots is None else slots,
            place,
        )
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
        files, targets, slots = (
            self.files.take(indices.tolist()),
            self.targets[indices],
            self.slots[indices],
        )
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
                found += [
                    i for i, failed in zip(part, pool.map(fails, part), strict=True) if failed
                ]
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

    def feed(self, state):
        """Feeds a hash what a training depends on: the shape, and the names and sizes of the files."""
        state.update(f"{self.shape} ".encode())
        self.files.feed(state)

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
            pixels, todo = (
                torch.empty(len(index), *self.shape, dtype=torch.uint8),
                range(len(index)),
            )
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
            log.warning(
                "%s: its pixels in %s are damaged; decoded again.",
                printable(file),
                self.cache.folder,
            )
        self.cache.warned = True


class BrokenImage(UserError):
    """An image file that cannot be read."""


def decode_image(file, size, channels, resize=False):
    """A uint8 tensor (channels, H, W): grey for one channel, RGB for three; turned as a camera says it was held.

    `size` is a whole number, to which both sides are resized, or (H, W), which the image has to have unless `resize`.
    BrokenImage naming a file that cannot be read, UserError for one of another size.
    """
    from PIL import Image, ImageOps

    height, width = (size, size) if isinstance(size, int) else size
    resize = resize or isinstance(size, int)
    with open_image(file) as image:
        if resize:
            image.draft(
                None, (2 * width, 2 * height)
            )  # a large JPEG is decoded at the nearest scale above
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith(
            "I"
        ):  # 16 bits, of which `convert` would take all above 255 for white
            image = image.point(lambda level: level * (1 / 256))
        image = image.convert("L" if channels == 1 else "RGB")
        if resize and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(image.height, image.width, channels)
    if tuple(pixels.shape[:2]) != (height, width):
        raise UserError(
            f"{printable(file)}: this image has {pixels.shape[0]}x{pixels.shape[1]} pixels, "
            f"and the first one {height}x{width}.\n"
            f"Type dataset.size={min(height, width)} (any whole number) to resize all of them."
        )
    return pixels.permute(2, 0, 1)


@contextlib.contextmanager
def open_image(file):
    """The PIL image of a file, its pixels not yet decoded; BrokenImage for all that goes wrong with it."""
    from PIL import Image, UnidentifiedImageError

    ignore_bomb_warnings()
    try:
        with (
            open_plain(file, links=True) as raw,
            Image.open(io.BufferedReader(raw), formats=IMAGE_FORMATS) as image,
        ):
            pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
            if most is not None and pixels > most:
                raise ValueError(
                    f"its {pixels:,} pixels are more than the {most:,} that Pillow thinks safe"
                )
            yield image
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise broken(file, f"it is none of {', '.join(IMAGE_FORMATS)}, or damaged") from None
    except (
        Exception
    ) as error:  # Pillow's decoders raise what they like for what they do not understand
        raise broken(file, str(error) or type(error).__name__) from None


def broken(file, reason):
    return BrokenImage(
        f"{printable(file)}: this image cannot be read ({printable(reason)}).\n"
        "Replace or remove the file, or type dataset.on_bad_sample=skip to leave such images out."
    )


@functools.cache
def ignore_bomb_warnings():
    """Pillow warns of large images and refuses twice as large ones; to us these are errors too, without a warning."""
    from PIL.Image import DecompressionBombWarning

    warnings.simplefilter("ignore", DecompressionBombWarning)
