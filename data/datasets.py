"""Names -> data: each function gives the parts of one data set, with the shapes that a model needs."""

import gzip
import hashlib
import io
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from stoker.trainer.device import MIB, free_memory, mix_seed, random_stream
from stoker.trainer.errors import UserError, check_choice, check_number, did_you_mean, printable
from stoker.trainer.files import open_plain

MOST_NUMBERS = 2**28  # of one sample, or one a class


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
    target_mean: float | list = (
        0.0  # or one number a target, in a list or a tensor; so is the scale
    )
    target_scale: float | list = 1.0
    table: dict | None = (
        None  # of a table: its columns as data/tables.py describes them, and how it is read
    )

    def __post_init__(self):
        self.name, self.in_shape = printable(self.name), tuple(self.in_shape)
        check_choice("kind", self.kind, ("classification", "regression"))
        if self.classes is not None and (
            self.kind == "regression" or len(self.classes) != self.num_classes
        ):
            what = (
                "a regression has none"
                if self.kind == "regression"
                else f"num_classes is {self.num_classes}"
            )
            raise UserError(
                f"{self.name}: there are {len(self.classes)} names of classes, and {what}."
            )
        for key in ("mean", "std"):
            values = getattr(self, key)
            if values is not None and (
                isinstance(values, (str, float, int)) or len(values) != self.in_shape[0]
            ):
                raise UserError(
                    f"dataset.{key}={values}: give a list of {self.in_shape[0]} numbers, one a channel."
                )
            above = 0 if key == "std" else None
            checked = values and [
                float(check_number(f"dataset.{key}", value, above=above)) for value in values
            ]
            setattr(self, key, checked)
        if self.train is None:
            raise UserError(f"{self.name}: there is no training part.")
        for name, part in self.parts().items():
            check_part(f"{self.name}, {name} part", part, self.in_shape, self.kind)
        self.check_labels()

    def parts(self):
        """{name: part} of those that there are."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    def description(self):
        """What a trained model has to know of its inputs and outputs, as plain values: its checkpoints keep it."""
        units = {"target_mean": self.target_mean, "target_scale": self.target_scale}
        units = {
            key: torch.as_tensor(value, dtype=torch.float64).tolist()
            for key, value in units.items()
        }
        return {
            "dataset": self.name,
            "kind": self.kind,
            "in_shape": [int(size) for size in self.in_shape],
            "dtype": str(input_type(self.train)).removeprefix("torch."),
            "num_classes": int(self.num_classes),
            "classes": None if self.classes is None else [str(name) for name in self.classes],
            "mean": self.mean,
            "std": self.std,
            **units,
            "table": self.table,
        }

    def prepare_as(self, about):
        """Makes this what a model takes that was trained on `about`, a description: its classes, mean and units.

        Classes are matched by their names. UserError where one of them was unknown, or the inputs have another shape.
        """
        if self.kind != about["kind"]:
            raise UserError(
                f"dataset: {self.name} is a {self.kind}, and the run is a {about['kind']}."
            )
        if list(self.in_shape) != about["in_shape"]:
            here, there = (
                "x".join(map(str, shape)) for shape in (self.in_shape, about["in_shape"])
            )
            channels, *_, side = about["in_shape"]
            sizes = f"\nA folder of images is resized by dataset.channels={channels} dataset.size={side}."
            what = f"dataset: {self.name} has inputs of {here}, and the run was trained on {there}."
            raise UserError(what + sizes * (len(about["in_shape"]) == len(self.in_shape) == 3))
        self.mean, self.std = about["mean"], about["std"]
        known, own = (
            about["classes"],
            None if self.classes is None else [str(name) for name in self.classes],
        )
        if None not in (known, own) and own != known:
            if other := next((name for name in own if name not in known), None):
                raise unknown_class(other, known)
            places = torch.tensor([known.index(name) for name in own])
            self.change_targets(lambda targets: places[targets])
        elif self.num_classes > about["num_classes"]:
            what = f"has {self.num_classes} classes or targets, and the run {about['num_classes']}"
            raise UserError(f"dataset: {self.name} {what}.")
        self.classes, self.num_classes = known, about["num_classes"]
        units = [(of["target_mean"], of["target_scale"]) for of in (self.description(), about)]
        if self.kind == "regression" and units[0] != units[1]:
            mean, scale, to_mean, to_scale = (
                torch.tensor(x, dtype=torch.float64) for pair in units for x in pair
            )
            self.change_targets(
                lambda old: ((old.double() * scale + mean - to_mean) / to_scale).to(old.dtype)
            )
            self.target_mean, self.target_scale = units[1]

    def change_targets(self, change):
        """Puts `change(targets)` in place of each part's targets."""
        for part in filter(None, (self.train, self.val, self.test)):
            if "targets" not in vars(part):
                kind = type(part).__name__
                raise UserError(
                    f"dataset: the classes or units are others than the run's, and a {kind} keeps its own."
                )
            part.targets = change(part.targets)

    def part_to_evaluate(self, split=None):
        """The name of the part that is evaluated: `split`, or else the test part, or the validation part.

        For "all" it is the training part, of data that was not cut.
        """
        there = self.parts()
        if split == "all" and len(there) > 1:
            raise UserError(
                f"split=all: {self.name} has parts of its own. Type split= one of: {', '.join(there)}."
            )
        split = "train" if split == "all" else split
        split = split or next((name for name in ("test", "val") if name in there), None)
        if split is None:
            raise UserError(
                f"dataset: {self.name} has neither a test nor a validation part. Type split=train."
            )
        return check_choice("split", split, there)

    def classes_without_samples(self, part):
        """The names of the classes of which a part has no sample."""
        if self.kind != "classification":
            return []
        counts = torch.bincount(self.parts()[part].targets, minlength=self.num_classes)
        absent = (counts == 0).nonzero().view(-1).tolist()
        return [printable(self.classes[label]) if self.classes else str(label) for label in absent]

    def check_labels(self):
        """UserError for labels that are no class numbers."""
        for name, part in self.parts().items() if self.kind == "classification" else ():
            labels = part.targets
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

    def check_classes(self):
        """UserError where a training could learn one class only, or another part has a class that it could not."""
        if self.kind != "classification":
            return
        counts = {
            name: torch.bincount(part.targets, minlength=self.num_classes)
            for name, part in self.parts().items()
        }
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


def input_type(part):
    """The torch.dtype of a part's inputs; one of the user's own is asked for its first sample."""
    inputs = getattr(part, "inputs", None)
    if isinstance(inputs, torch.Tensor) or hasattr(part, "missing"):  # image files are bytes
        return torch.uint8 if inputs is None else inputs.dtype
    with random_stream():
        return torch.as_tensor(part[[0]][0]).dtype


def check_part(where, part, in_shape, kind):
    """UserError for what is no part, is empty, or whose samples in memory do not fit together or are not finite."""
    inputs, targets = getattr(part, "inputs", None), getattr(part, "targets", None)
    needed = ["__len__", "nbytes"] + ["targets"] * (kind == "classification")
    wrong = [f"has no {name}" for name in needed if not hasattr(part, name)]
    if targets is not None and not isinstance(targets, torch.Tensor):
        wrong.append(f"has targets that are no tensor but a {type(targets).__name__}")
    if wrong:
        raise UserError(
            f"{where}: this {type(part).__name__} {wrong[0]}.\n"
            "A part has len(), nbytes, targets as a tensor, and gives (inputs, targets) for a list of indices: see\n"
            "examples/own_data.py. DatasetSplit(dataset), of data.datasets, makes one of a torch Dataset."
        )
    if not len(part):
        raise UserError(f"{where}: it is empty.")
    if targets is not None and len(targets) != len(part):
        raise UserError(f"{where}: there are {len(part)} inputs and {len(targets)} targets.")
    if isinstance(inputs, torch.Tensor) and tuple(inputs.shape[1:]) != in_shape:
        raise UserError(
            f"{where}: inputs have the shape {tuple(inputs.shape[1:])}, and should have {in_shape}."
        )
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        low, high = tensor.aminmax()  # nan where there is one; one pass over it, and no memory
        if not (low.isfinite() and high.isfinite()):
            place = (~tensor.isfinite()).nonzero()[0].tolist()
            raise UserError(
                f"{where}: {name}{place} is {tensor[tuple(place)].item()}. Give finite numbers."
            )


def unknown_class(name, known):
    """The UserError for a class that a trained model does not know."""
    shown = ", ".join(printable(other) for other in known[:10]) + ", ..." * (len(known) > 10)
    hint = did_you_mean(name, known)
    return UserError(
        f"dataset: the run knows no class {printable(name)!r}.{hint}\nIts {len(known)} classes are {shown}.\n"
        "Rename or remove what is of another; images lie in a folder for each class."
    )


def is_description(about):
    """Whether this is of the form of Data.description(), with numbers that can be used: it may be anybody's."""
    try:
        return has_form(about)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return False


def has_form(about):
    """`is_description`, but a KeyError and the like where a part of it is missing, or of another kind."""
    shape, classes, table, outputs = (
        about[key] for key in ("in_shape", "classes", "table", "num_classes")
    )
    fits = isinstance(about["dataset"], str) and about["kind"] in ("classification", "regression")
    fits &= isinstance(getattr(torch, about["dtype"]), torch.dtype)
    fits &= (
        isinstance(shape, list) and 1 <= len(shape) <= 8 and all(map(is_size, [*shape, outputs]))
    )
    fits &= math.prod(shape) <= MOST_NUMBERS
    fits &= classes is None or (
        are(str, classes) and len(classes) == outputs and about["kind"] == "classification"
    )
    for key in ("mean", "std"):
        fits &= about[key] is None or (
            are_numbers(about[key], key == "std") and len(about[key]) == shape[0]
        )
    for key in ("target_mean", "target_scale"):
        values = about[key] if isinstance(about[key], list) else [about[key]]
        fits &= are_numbers(values, key == "target_scale") and len(values) in (1, outputs)
    if not fits or table is None:
        return fits
    fits &= are(str, [table["target"], table["missing"], table["delimiter"]]) and are(
        dict, table["columns"]
    )
    for column in table["columns"]:
        kinds = column.get("categories")
        fits &= isinstance(column["name"], str)
        if kinds is None:
            fits &= are_numbers([column["mean"]]) and are_numbers([column["std"]], positive=True)
        else:
            fits &= are(str, kinds) and len(kinds) > 0
    return (
        fits
        and shape == [sum(len(names_of(column)) for column in table["columns"])]
        and about["dtype"] == "float32"
    )


def names_of(column):
    """The names of the numbers that a table's column becomes: its own, or one a category."""
    kinds = column.get("categories")
    return [column["name"]] if kinds is None else [f"{column['name']}={kind}" for kind in kinds]


def is_size(value):
    return type(value) is int and 1 <= value <= MOST_NUMBERS


def are(kind, values):
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def are_numbers(values, positive=False):
    """Whether it is a list of finite numbers, all above 0 where they have to be `positive`."""
    return isinstance(values, list) and all(
        type(value) in (int, float) and abs(value) < 2**1023 and (value > 0 or not positive)
        for value in values
    )


def fingerprint(data):
    """A short hex string of what a training depends on: another one, and a resumed run would see other samples.

    The values of splits in memory, the names below the root, sizes and labels of image files, the number and labels of
    a user's own samples. No times and no root, so a copy of a folder has the fingerprint of the original.
    """
    state = hashlib.blake2b(
        repr((tuple(data.in_shape), data.num_classes, data.kind)).encode(), digest_size=16
    )
    for part in (data.train, data.val):
        state.update(f"{0 if part is None else len(part)} ".encode())
        for tensor in (getattr(part, "inputs", None), getattr(part, "targets", None)):
            if isinstance(tensor, torch.Tensor):
                state.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
                # As bytes without a copy: MNIST takes 0.05 s.
                state.update(
                    tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                )
        if hasattr(
            files := getattr(part, "files", None), "feed"
        ):  # the Paths of images, which nobody has to decode
            state.update(f"{part.shape} ".encode())
            files.feed(state)
    return state.hexdigest()


class TensorSplit:
    """Samples that lie in memory. An index is a number, or a list of them for a whole batch.

    `lines`: of a table, the number of each sample's line in its file; the header's is 1.
    """

    def __init__(self, inputs, targets, lines=None):
        self.inputs, self.targets, self.lines = inputs, targets, lines
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


class DatasetSplit:
    """A part of a map-style torch Dataset of (input, target), which is read sample by sample whenever it is wanted.

    `targets`: those of all samples, taken in place of the Dataset's own, such as an ImageFolder's `targets`; without
    them each sample is read once to know its target. So an input may be drawn anew in each epoch, and a target not.
    """

    def __init__(self, dataset, targets=None):
        name = type(dataset).__name__
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and len(dataset)):
            raise UserError(
                f"DatasetSplit: this {name} is empty or has no length. Give a map-style Dataset."
            )
        with random_stream():
            if targets is None:
                targets = [dataset[i][1] for i in range(len(dataset))]
            self.nbytes = len(dataset) * torch.as_tensor(dataset[0][0]).nbytes
        self.dataset, self.targets = (
            dataset,
            torch.stack([torch.as_tensor(target) for target in targets]),
        )
        if self.targets.is_floating_point():  # of a regression: (N, T)
            self.targets = self.targets.float().view(len(self.targets), -1)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, indices):
        return torch.stack([torch.as_tensor(self.dataset[i][0]) for i in indices]), self.targets[
            indices
        ]


def split_indices(targets, fractions, seed, stratified=True):
    """[rest, part, part, ...]: sorted indices, one part for each of `fractions` of the samples, disjoint and complete.

    `targets` are the samples' labels, or just their number. Stratified: the same shares of each class, with at least
    one sample of it in every part where the class has enough for that. A part that is asked for and gets nothing is a
    UserError.
    """
    n = targets if isinstance(targets, int) else len(targets)
    generator = torch.Generator().manual_seed(mix_seed(seed, "split"))
    if stratified and not isinstance(targets, int):
        groups = [(targets == label).nonzero().view(-1) for label in targets.unique()] or [
            torch.arange(0)
        ]
    else:
        groups = [torch.arange(n)]
    parts = [[] for _ in range(len(fractions) + 1)]
    asked = sum(fraction > 0 for fraction in fractions)
    for group in groups:
        counts = [round(len(group) * fraction) for fraction in fractions]
        if len(group) > asked:
            counts = [
                max(count, int(fraction > 0))
                for count, fraction in zip(counts, fractions, strict=True)
            ]
            while sum(counts) >= len(group):
                counts[counts.index(max(counts))] -= 1
        cuts = group[torch.randperm(len(group), generator=generator)].split(
            [len(group) - sum(counts), *counts]
        )
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


def check_fractions(**fractions):
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
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as lines:
        rows = torch.tensor([int(value) for line in lines for value in line.split(",")]).view(
            -1, 65
        )
    images = (rows[:, :64] * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    train, val, test = _cut(images, rows[:, 64].contiguous(), fractions, split_seed)
    return Data(
        "digits",
        train,
        val,
        test,
        (1, 8, 8),
        10,
        classes=[str(i) for i in range(10)],
        mean=mean,
        std=std,
    )


NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = [f"{i} - {name}" for i, name in enumerate(NUMBERS)]
CLOTHES = [
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
]
CHARACTERS = ["o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"]


def mnist(
    root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.1307,), std=(0.3081,)
):
    """60,000 + 10,000 handwritten digits, 1x28x28 (LeCun, Cortes, Burges), from root/MNIST/raw."""
    return _idx("mnist", "MNIST", DIGITS, root, download, val_fraction, split_seed, mean, std)


def fashion_mnist(
    root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.2860,), std=(0.3530,)
):
    """60,000 + 10,000 pieces of clothing, 1x28x28 (Xiao 2017, arXiv 1708.07747), from root/FashionMNIST/raw."""
    return _idx(
        "fashion_mnist",
        "FashionMNIST",
        CLOTHES,
        root,
        download,
        val_fraction,
        split_seed,
        mean,
        std,
    )


def kmnist(
    root="datasets", download=False, val_fraction=0.1, split_seed=0, mean=(0.1918,), std=(0.3483,)
):
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
    fractions = check_fractions(val_fraction=val_fraction)
    folder = os.path.join(os.path.expanduser(root), kind, "raw")

    def read():
        parts = []
        for part in ("train", "t10k"):
            images = read_idx(os.path.join(folder, f"{part}-images-idx3-ubyte"), 3).unsqueeze(1)
            labels = read_idx(os.path.join(folder, f"{part}-labels-idx1-ubyte"), 1).long()
            if len(images) != len(labels):
                raise ValueError(
                    f"{len(images)} images and {len(labels)} labels in the {part} files"
                )
            parts.append(TensorSplit(images, labels))
        return parts

    train, test = _read_or_download(name, kind, root, download, read)
    train, val = _cut(train.inputs, train.targets, fractions, split_seed)
    return Data(
        name,
        train,
        val,
        test,
        train.inputs.shape[1:],
        len(classes),
        classes=classes,
        mean=mean,
        std=std,
    )


def _cifar(name, kind, root, download, val_fraction, split_seed, mean, std):
    fractions = check_fractions(val_fraction=val_fraction)
    import torchvision

    def read():
        # The files are pickles. torchvision compares the MD5 of each with the original's before it unpickles any.
        parts = [
            getattr(torchvision.datasets, kind)(os.path.expanduser(root), train)
            for train in (True, False)
        ]
        images = [torch.as_tensor(part.data).permute(0, 3, 1, 2).contiguous() for part in parts]
        labels = [torch.as_tensor(part.targets, dtype=torch.int64) for part in parts]
        return *map(TensorSplit, images, labels), list(parts[0].classes)

    train, test, classes = _read_or_download(name, kind, root, download, read)
    train, val = _cut(train.inputs, train.targets, fractions, split_seed)
    return Data(
        name, train, val, test, (3, 32, 32), len(classes), classes=classes, mean=mean, std=std
    )


def _read_or_download(name, kind, root, download, read):
    """What `read` gives; where it cannot, and `download` says so, the files are fetched first."""
    root = os.path.expanduser(root)
    for fetched in (False, True):
        try:
            return read()
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            from stoker.data import (
                download as downloads,  # and with it urllib and ssl, only where they are wanted
            )

            if download and not fetched:
                downloads.fetch(name, root)
                continue
            megabytes, reason = downloads.megabytes(name), printable(error)
            there = os.path.join(root, downloads.SOURCES[name].folder)
            if not os.path.isdir(there) or isinstance(error, FileNotFoundError):
                what = f"Type dataset.download=true to fetch it ({megabytes} MB), or dataset.root=DIR for where it lies."
                raise UserError(f"{kind} is not in {printable(root)}.\n{what}") from None
            what = f"Type dataset.download=true to fetch it again ({megabytes} MB)."
            raise UserError(
                f"{kind} in {printable(there)} cannot be read ({reason}).\n{what}"
            ) from None


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
            raise ValueError(
                f"{os.path.basename(path)} has {there:,} bytes, which do not fit its sizes {sizes}"
            )
        contents = bytearray(math.prod(sizes))
        if file.readinto(contents) != len(contents):
            raise ValueError(f"{os.path.basename(path)} became shorter")
    return torch.frombuffer(contents, dtype=torch.uint8).view(sizes)


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
    check_number(
        "dataset.num_classes", num_classes, whole=True, least=2 if kind == "classification" else 1
    )
    check_number("dataset.noise", noise, least=0)
    in_shape = tuple(
        check_number("dataset.in_shape", size, whole=True, least=1)
        for size in ([in_shape] if isinstance(in_shape, int) else in_shape)
    )
    if len(in_shape) not in (1, 3):
        raise UserError(
            f"dataset.in_shape={list(in_shape)}: give [features] or [channels,height,width]."
        )
    fractions = check_fractions(val_fraction=val_fraction, test_fraction=test_fraction)
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
    targets = (
        torch.arange(n) % num_classes
        if classes
        else torch.randn(n, num_classes, generator=generator)
    )
    inputs = torch.empty(n, *in_shape, dtype=torch.uint8 if image else torch.float32)
    for start in range(0, n, 4096):  # in pieces, so that large sets of images never exist as floats
        part = targets[start : start + 4096]
        values = (
            patterns[part]
            if classes
            else (part @ patterns.flatten(1) / math.sqrt(num_classes)).view(-1, *in_shape)
        )
        values = values + noise * torch.randn(values.shape, generator=generator)
        inputs[start : start + 4096] = (
            (values * 40 + 128).round().clamp(0, 255) if image else values
        )
    train, val, test = _cut(inputs, targets, fractions, split_seed, stratified=classes)
    scale = {}
    if image:
        scale = {
            "mean": [128 / 255] * in_shape[0],
            "std": [40 * math.sqrt(1 + noise**2) / 255] * in_shape[0],
        }
    return Data("synthetic", train, val, test, in_shape, num_classes, kind, **scale)
