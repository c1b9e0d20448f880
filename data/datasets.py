"""The built-in data sets, and the public types for your own: Data, TensorSplit and DatasetSplit."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from stoker.data.record import Data
from stoker.data.splits import DatasetSplit, TensorSplit, check_fractions, cut
from stoker.trainer.errors import UserError, check_choice, check_number, printable
from stoker.trainer.files import open_plain
from stoker.trainer.seeding import mix_seed

__all__ = [
    "Data",
    "DatasetSplit",
    "TensorSplit",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "mnist",
    "synthetic",
]

# Class names of MNIST and of the data sets in its format.
CLASSES = {
    "MNIST": [
        "0 - zero",
        "1 - one",
        "2 - two",
        "3 - three",
        "4 - four",
        "5 - five",
        "6 - six",
        "7 - seven",
        "8 - eight",
        "9 - nine",
    ],
    "FashionMNIST": [
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ],
}
# `synthetic` generates this many samples at a time, so that it never holds all images as floats.
PIECE = 4096

# (training samples, test samples, class names)
Known = tuple[TensorSplit, TensorSplit, list[str]]


def digits(
    val_fraction: float = 0.1,
    test_fraction: float = 0.2,
    split_seed: int = 0,
    mean: Sequence[float] = (0.3053,),
    std: Sequence[float] = (0.3759,),
) -> Data:
    """1,797 real handwritten digits, 1x8x8, included in the package; see digits.md for their source
    and license.
    """
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    path = Path(__file__).with_name("digits.csv.gz")
    rows = torch.from_numpy(numpy.loadtxt(path, numpy.int64, delimiter=","))
    levels = rows[:, :64]  # values from 0 to 16
    images = (levels * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    labels = rows[:, 64].contiguous()
    train, val, test = cut(images, labels, fractions, split_seed)
    classes = list("0123456789")
    return Data("digits", train, val, test, (1, 8, 8), 10, classes=classes, mean=mean, std=std)


def mnist(
    root: str = "datasets",
    download: bool = False,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] = (0.1307,),
    std: Sequence[float] = (0.3081,),
) -> Data:
    """60,000 training and 10,000 test images of handwritten digits, 1x28x28 (LeCun, Cortes,
    Burges), from root/MNIST/raw.
    """
    return _known("mnist", root, download, val_fraction, split_seed, mean, std)


def fashion_mnist(
    root: str = "datasets",
    download: bool = False,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] = (0.2860,),
    std: Sequence[float] = (0.3530,),
) -> Data:
    """60,000 training and 10,000 test images of clothing, 1x28x28 (Xiao 2017, arXiv 1708.07747),
    from root/FashionMNIST/raw.
    """
    return _known("fashion_mnist", root, download, val_fraction, split_seed, mean, std)


def cifar10(
    root: str = "datasets",
    download: bool = False,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] = (0.4914, 0.4822, 0.4465),
    std: Sequence[float] = (0.2470, 0.2435, 0.2616),
) -> Data:
    """50,000 training and 10,000 test photographs in 10 classes, 3x32x32 (Krizhevsky 2009), from
    root/cifar-10-batches-py.
    """
    return _known("cifar10", root, download, val_fraction, split_seed, mean, std)


def cifar100(
    root: str = "datasets",
    download: bool = False,
    val_fraction: float = 0.1,
    split_seed: int = 0,
    mean: Sequence[float] = (0.5071, 0.4865, 0.4409),
    std: Sequence[float] = (0.2673, 0.2564, 0.2762),
) -> Data:
    """50,000 training and 10,000 test photographs in 100 classes, 3x32x32 (Krizhevsky 2009), from
    root/cifar-100-python.
    """
    return _known("cifar100", root, download, val_fraction, split_seed, mean, std)


def _known(
    name: str,
    root: str,
    download: bool,
    val_fraction: float,
    split_seed: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Data:
    """Make the Data for a standard data set. Its test split is fixed; its validation split is taken
    from the training samples.
    """
    fractions = check_fractions(val_fraction=val_fraction)
    train, test, classes = _read_or_download(name, os.path.expanduser(root), download)
    train, val = cut(train.inputs, train.targets, fractions, split_seed)
    shape = train.inputs.shape[1:]
    return Data(name, train, val, test, shape, len(classes), classes=classes, mean=mean, std=std)


def _read_or_download(name: str, root: str, download: bool) -> Known:
    """Read the samples under `root`; with `download`, let torchvision fetch the files if they
    cannot be read.
    """
    read, title, folder = READERS[name]
    try:
        return read(title, root)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        reason: Exception = error
    if download:
        import torchvision

        try:
            getattr(torchvision.datasets, title)(root, download=True)
            return read(title, root)
        except Exception as error:
            reason = error
    raise UserError(
        f"{title} cannot be read from {printable(os.path.join(root, folder))} "
        f"({printable(' '.join(str(reason).split()))[:300]}).\n"
        "Type dataset.download=true to fetch it (delete damaged files first), or type "
        "dataset.root=DIR if it is elsewhere."
    )


def _read_cifar(title: str, root: str) -> Known:
    """Read the CIFAR files. They are pickles, but torchvision unpickles them only if their MD5 sums
    match.
    """
    import torchvision

    dataset = getattr(torchvision.datasets, title)
    splits = []
    for train in (True, False):
        samples = dataset(root, train)
        images = torch.as_tensor(samples.data).permute(0, 3, 1, 2).contiguous()
        splits.append(TensorSplit(images, torch.as_tensor(samples.targets, dtype=torch.int64)))
    return splits[0], splits[1], list(samples.classes)


def _read_mnist(title: str, root: str) -> Known:
    """Read the four files of MNIST, or of a data set in the same format.

    torchvision is not used: it takes half a second to import, and it trusts the sizes in the files.
    """
    splits = []
    for part in ("train", "t10k"):
        path = os.path.join(root, title, "raw", part)
        images = _values_after(16, f"{path}-images-idx3-ubyte").view(-1, 1, 28, 28)
        labels = _values_after(8, f"{path}-labels-idx1-ubyte").long()
        if len(images) != len(labels):
            raise ValueError(
                f"the {part} files contain {len(images)} images but {len(labels)} labels"
            )
        splits.append(TensorSplit(images, labels))
    return splits[0], splits[1], CLASSES[title]


def _values_after(header: int, path: str) -> Tensor:
    """Read a file as a uint8 tensor, without the first `header` bytes."""
    with open_plain(path, links=True) as file:
        return torch.frombuffer(bytearray(file.readall()), dtype=torch.uint8, offset=header)


# The function that reads each data set, the data set's name in torchvision, and its folder.
READERS: dict[str, tuple[Callable[[str, str], Known], str, str]] = {
    "mnist": (_read_mnist, "MNIST", "MNIST/raw"),
    "fashion_mnist": (_read_mnist, "FashionMNIST", "FashionMNIST/raw"),
    "cifar10": (_read_cifar, "CIFAR10", "cifar-10-batches-py"),
    "cifar100": (_read_cifar, "CIFAR100", "cifar-100-python"),
}


def synthetic(
    kind: str = "classification",
    n: int = 10000,
    in_shape: int | Sequence[int] = (20,),
    num_classes: int = 10,
    noise: float = 1.0,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    split_seed: int = 0,
) -> Data:
    """Make learnable data of any size: random patterns plus noise. `noise` is relative to the
    standard deviation of the patterns.

    For classification, a sample is the pattern of its class plus noise. For regression, it is the
    sum of all patterns, weighted by the sample's `num_classes` targets (standard normal), plus
    noise. Shapes (C, H, W) give uint8 images; flat shapes give float32 vectors.
    """
    check_choice("dataset.kind", kind, ("classification", "regression"))
    has_classes = kind == "classification"
    check_number("dataset.n", n, whole=True, least=1)
    check_number("dataset.num_classes", num_classes, whole=True, least=2 if has_classes else 1)
    check_number("dataset.noise", noise, least=0)
    shape = (in_shape,) if isinstance(in_shape, int) else tuple(in_shape)
    for size in shape:
        check_number("dataset.in_shape", size, whole=True, least=1)
    if len(shape) not in (1, 3):
        raise UserError(
            f"dataset.in_shape={in_shape}: expected [features] or [channels,height,width]."
        )
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    is_image = len(shape) == 3
    generator = torch.Generator().manual_seed(mix_seed(split_seed, "synthetic"))
    patterns = torch.randn(num_classes, *shape, generator=generator)
    if is_image:  # coarse patterns, which survive convolutions and pooling
        coarse = torch.randn(num_classes, shape[0], 4, 4, generator=generator)
        patterns = torch.nn.functional.interpolate(coarse, shape[1:], mode="nearest")
    targets = torch.arange(n) % num_classes
    if not has_classes:
        targets = torch.randn(n, num_classes, generator=generator)
    flat = patterns.flatten(1)
    inputs = torch.empty(n, *shape, dtype=torch.uint8 if is_image else torch.float32)
    for piece, wanted in zip(inputs.split(PIECE), targets.split(PIECE), strict=True):
        values = flat[wanted] if has_classes else wanted @ flat / math.sqrt(num_classes)
        noises = torch.randn(piece.shape, generator=generator)
        values = values.view(piece.shape) + noise * noises
        if is_image:
            values = (values * 40 + 128).round().clamp(0, 255)
        piece.copy_(values)
    train, val, test = cut(inputs, targets, fractions, split_seed)
    data = Data("synthetic", train, val, test, shape, num_classes, kind)
    if is_image:
        data.mean = [128 / 255] * shape[0]
        data.std = [40 * math.sqrt(1 + noise**2) / 255] * shape[0]
    return data
