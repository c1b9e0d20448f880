"""The record of a data set: its splits, and the facts that models, losses and metrics need."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from stoker.data.description import KEYS, KINDS, Description
from stoker.data.splits import DatasetSplit, Split
from stoker.trainer.errors import (
    UserError,
    check_choice,
    check_number,
    did_you_mean,
    first_few,
    printable,
)
from stoker.trainer.loading import length_of
from stoker.trainer.losses import IGNORED
from stoker.trainer.metrics import MAE, MSE, R2, Accuracy, MeanIoU, Perplexity, Sums
from stoker.trainer.seeding import random_stream

# The attributes that hold the values in Stoker's splits and in most data sets.
IN_MEMORY = ("inputs", "targets", "tokens", "data")
LARGE = 2**30  # bytes; a larger array may be memory-mapped from disk, so hash only its shape


@dataclass
class Data:
    """The splits of a data set, and the facts that models, losses and metrics need.

    The constructor checks sizes, labels and numbers. `val` and `test` may be None; `more_val` maps
    names to additional validation splits. Classification targets are int64: one class per sample
    (N,), per token (N, T) or per pixel (N, H, W); in the last two, the loss and the metrics ignore
    -100. `mean` and `std` have one number per channel, for pixels in 0..1. They normalize uint8
    images; without them, such images are only scaled to 0..1. Floating-point inputs are not
    changed. Regression targets are (value - target_mean) / target_scale, so that errors can be
    reported in the original units; both may be lists or tensors with one number per target. `table`
    describes a table's columns and how to read it: see tables.py. `tokens` is the kind of tokens in
    a text, which a trained model needs to read and write text: see text.py.

    With kind "other", the splits are torch data sets, iterables of batches, or loaders. Nothing is
    known about their batches, so `in_shape`, `num_classes` and everything that depends on them are
    None: see samples.py.
    """

    name: str
    train: Any  # a Split, or for kind "other" anything that yields samples or batches
    val: Any
    test: Any
    in_shape: Any = None  # a tuple of whole numbers
    num_classes: Any = None  # for regression, the number of targets
    kind: str = "classification"
    classes: list[str] | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    target_mean: float | list[float] | Tensor = 0.0
    target_scale: float | list[float] | Tensor = 1.0
    table: dict[str, Any] | None = None
    tokens: str | None = None
    more_val: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = printable(self.name)
        check_choice("kind", self.kind, KINDS)
        if self.train is None:
            raise UserError(f"{self.name} has no training split.")
        if self.kind == "other":
            return
        if self.in_shape is None:
            raise UserError(f"{self.name}: pass in_shape, the shape of one sample's inputs.")
        self.in_shape = tuple(self.in_shape)
        if not isinstance(self.num_classes, SupportsIndex):  # allows torch and NumPy integers
            check_number("num_classes", self.num_classes, whole=True, least=1)
        if self.classes is not None:
            self.classes = [str(name) for name in self.classes]
            if len(self.classes) != self.num_classes or self.kind == "regression":
                raise UserError(
                    f"{self.name}: there are {len(self.classes)} class names for a "
                    f"{self.kind} task with num_classes={self.num_classes}."
                )
        self.mean = _per_channel("mean", self.mean, self.in_shape[0])
        self.std = _per_channel("std", self.std, self.in_shape[0])
        for name, part in self.parts().items():
            where = f"{self.name}, {name} split"
            _check_part(where, part, self.kind)
            _check_tensors(where, part, self.in_shape)
            if self.kind == "classification":
                _check_labels(where, part, self.num_classes, self.target_shape)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of a sample's class targets.

        It is () for one class per sample, (T,) for one per token, (H, W) for one per pixel, and ()
        if the targets are not classes.
        """
        return _target_shape(self.train) if self.kind == "classification" else ()

    @property
    def targets_are_uniform(self) -> bool:
        """Whether all training samples have the same number of targets, and none is ignored.

        A split without `targets` can declare this with its own `targets_are_uniform` attribute.
        """
        if self.kind != "classification":
            return True
        targets = getattr(self.train, "targets", None)
        if targets is None:
            return getattr(self.train, "targets_are_uniform", False)
        return int(targets.min()) >= 0

    def parts(self) -> dict[str, Any]:
        """Return the splits by name, except those that are None."""
        parts = {"train": self.train, "val": self.val, **self.more_val, "test": self.test}
        return {name: part for name, part in parts.items() if part is not None}

    def description(self) -> Description:
        """Return what a trained model needs to know about its inputs and outputs, as plain values
        for checkpoints.
        """
        if self.kind == "other":
            return {**dict.fromkeys(KEYS), "dataset": self.name, "kind": self.kind}
        about = {key: getattr(self, key, None) for key in KEYS}
        return about | {
            "dataset": self.name,
            "in_shape": [int(size) for size in self.in_shape],
            "dtype": str(input_type(self.train)).removeprefix("torch."),
            "num_classes": int(self.num_classes),
            "target_mean": torch.as_tensor(self.target_mean, dtype=torch.float64).tolist(),
            "target_scale": torch.as_tensor(self.target_scale, dtype=torch.float64).tolist(),
            "resize": getattr(self.train, "resize", None),  # only for image files; see decode_image
        }

    def prepare_as(self, about: Description) -> None:
        """Adopt the classes, mean, std and units of the data that a model was trained on.

        Classes are matched by name. Raises UserError if the model does not know a class, or if the
        inputs have a different shape.
        """
        if self.kind != about["kind"]:
            raise UserError(
                f"dataset: {self.name} is data of kind {self.kind}, but the model was trained on "
                f"data of kind {about['kind']}."
            )
        if self.kind == "other":
            return
        if list(self.in_shape) != about["in_shape"]:
            raise UserError(
                f"dataset: {self.name} has inputs of shape {list(self.in_shape)}, "
                f"but the model was trained on inputs of shape {about['in_shape']}."
            )
        self.mean = about["mean"]
        self.std = about["std"]
        self._adopt_classes(about)
        if self.kind == "regression":
            self._adopt_units(about)

    def _adopt_classes(self, about: Description) -> None:
        known = about["classes"]
        if self.classes is None or known is None or self.classes == known:
            if self.num_classes > about["num_classes"]:
                kind = "targets" if self.kind == "regression" else "classes"
                raise UserError(
                    f"dataset: {self.name} has {self.num_classes} {kind}, but the model was "
                    f"trained on {about['num_classes']}."
                )
        else:
            for name in self.classes:
                if name not in known:
                    raise unknown_class(name, known)
            places = torch.tensor(list(map(known.index, self.classes)))
            self._change_targets(
                lambda targets: places[targets.clamp_min(0)].where(targets != IGNORED, IGNORED)
            )
        self.classes = known
        self.num_classes = about["num_classes"]

    def _adopt_units(self, about: Description) -> None:
        scaled = (self.target_mean, self.target_scale, about["target_mean"], about["target_scale"])
        mean, scale, to_mean, to_scale = (torch.as_tensor(x, dtype=torch.float64) for x in scaled)
        if torch.equal(mean, to_mean) and torch.equal(scale, to_scale):
            return
        self._change_targets(
            lambda targets: ((targets.double() * scale + mean - to_mean) / to_scale).to(
                targets.dtype
            )
        )
        self.target_mean = about["target_mean"]
        self.target_scale = about["target_scale"]

    def _change_targets(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each split's targets with `change(targets)`."""
        for part in self.parts().values():
            if "targets" not in vars(part):
                raise UserError(
                    "dataset: the classes or units differ from those of the run, "
                    f"and the targets of a {type(part).__name__} cannot be converted to match."
                )
            part.targets = change(part.targets)

    def part_to_evaluate(self, split: str | None = None) -> str:
        """Return the name of the split to evaluate: `split` if given, otherwise the test split, or
        the validation split if there is no test split.

        "all" means the training split, which must then be the only split.
        """
        parts = self.parts()
        if split == "all" and len(parts) == 1:
            return "train"
        if split:
            check_choice("split", split, parts)
            return split
        for name in ("test", "val"):
            if name in parts:
                return name
        advice = "Type split=train."
        if length_of(self.train) is None:
            advice = "Its train split has no length, so add a val or test split."
        raise UserError(f"dataset: {self.name} has neither a test nor a validation split. {advice}")

    def check_classes(self) -> None:
        """Check that the training split has at least two classes, including all classes of the
        other splits. Classes of tokens and pixels are not checked.
        """
        if self.kind != "classification" or self.target_shape:
            return
        counts = {
            name: torch.bincount(part.targets, minlength=self.num_classes)
            for name, part in self.parts().items()
        }
        is_trained = counts["train"] > 0
        if is_trained.sum() == 1:
            raise UserError(
                f"{self.name}: all training samples belong to class "
                f"{self._class_name(is_trained)}, so there is nothing to learn."
            )
        for name, count in counts.items():
            is_new = (count > 0) & ~is_trained
            if is_new.any():
                raise UserError(
                    f"{self.name}: the {name} split has the class {self._class_name(is_new)}, "
                    "which does not occur in the training split.\n"
                    "Add training samples of this class, or choose a different "
                    "dataset.split_seed or smaller fractions."
                )

    def balanced_weights(self) -> list[float]:
        """Return class weights that give all classes the same total weight in training.

        The formula is scikit-learn's: samples / (classes * samples of the class).

        Raises:
            UserError: The targets are not classes, or a class has no training sample.
        """
        targets = getattr(self.train, "targets", None)
        if self.kind != "classification" or targets is None:
            counts = torch.zeros(1)
        else:
            counts = torch.bincount(targets[targets >= 0].flatten(), minlength=self.num_classes)
        if not counts.all():
            raise UserError(
                f"loss.weight=balanced: the training split of {self.name} must have `targets` and "
                "samples of every class.\nType a list of numbers, one per class."
            )
        weights: list[float] = (counts.sum() / (len(counts) * counts.double())).tolist()
        return weights

    def _class_name(self, mask: Tensor) -> str:
        """Return the name of the first class that the mask selects."""
        label = int(mask.int().argmax())
        return str(label) if self.classes is None else repr(printable(self.classes[label]))


def input_type(part: Split) -> torch.dtype:
    """Return the dtype of a split's inputs; if the split has no dtype, read a sample."""
    dtype = getattr(getattr(part, "inputs", part), "dtype", None)
    if isinstance(dtype, torch.dtype):
        return dtype
    with random_stream():
        return torch.as_tensor(part[[0]][0]).dtype


def unknown_class(name: str, known: Sequence[str]) -> UserError:
    """Make the UserError for a class that a trained model does not know."""
    return UserError(
        f"dataset: the run has no class {printable(name)!r}.{did_you_mean(name, known)}\n"
        f"Its {len(known)} classes are {first_few(known, 10)}.\n"
        "Rename the class, or remove its samples. For images, each class is a folder."
    )


def default_metrics(
    kind: str,
    scale: float | Sequence[float] | Tensor = 1.0,
    *,
    target_dims: int = 0,
    num_classes: int = 2,
) -> dict[str, Sums]:
    """Return the default metrics for a kind of data set; the first one selects the best checkpoint.

    For "classification", this is accuracy. Perplexity comes first if the targets of a sample are
    tokens (T,) (`target_dims=1`), and mean IoU if they are pixels (H, W) (`target_dims=2`). For
    other kinds, the metrics are R2, MAE and MSE, in the units of the targets.
    """
    if kind == "classification":
        if target_dims == 1:
            return {"perplexity": Perplexity(), "acc": Accuracy()}
        if target_dims == 2:
            return {"miou": MeanIoU(num_classes), "acc": Accuracy()}
        return {"acc": Accuracy()}
    return {"r2": R2(), "mae": MAE(scale), "mse": MSE(scale)}


def fingerprint(data: Data) -> str:
    """Return a short hex string that identifies the data that a run trains on. If it changes, a
    resumed run would see different samples.

    It covers the relative paths, sizes and labels of image files, and the length of any other
    split, with its dense tensors and numeric arrays of at most 1 GiB. It does not cover the root or
    modification times, so a copied folder has the same fingerprint.
    """
    start = repr((data.in_shape, data.num_classes, data.kind))
    state = hashlib.blake2b(start.encode(), digest_size=16)
    for place, part in enumerate((data.train, data.val, *data.more_val.values())):
        state.update(f"{0 if part is None else length_of(part)} {place} ".encode())
        for value in _values_of(part):
            _feed_array(state, value)
        feed = getattr(part, "feed", None)
        if feed is not None:
            feed(state)
    return state.hexdigest()


def _values_of(part: Any) -> list[Any]:
    """Return the tensors and arrays in which a split keeps its values."""
    # Other attributes may change while samples are read.
    values = [getattr(part, name, None) for name in IN_MEMORY]
    if isinstance(part, DatasetSplit):
        values += _values_of(part.dataset)
    if isinstance(part, TensorDataset):
        values += part.tensors
    return values


def _feed_array(state: "hashlib.blake2b", array: Any) -> None:
    """Add a dense tensor or a numeric array to a hash: its values, or its shape if it is large."""
    if isinstance(array, Tensor):
        is_dense = array.layout is torch.strided and not array.is_nested
    else:
        is_dense = isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
    if not is_dense:
        return
    state.update(f"{array.dtype} {tuple(array.shape)} ".encode())
    if array.nbytes > LARGE:
        return
    # Hash the bytes without a copy; this takes 0.05 s for MNIST.
    if isinstance(array, Tensor):
        values = array.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        array = values.view(torch.uint8).numpy()
    state.update(np.ascontiguousarray(array).reshape(-1).data)


def _per_channel(key: str, values: Any, channels: int) -> list[float] | None:
    """Return `mean` or `std` as a list; raise UserError unless it has one number per channel."""
    if values is None:
        return None
    if not isinstance(values, Iterable) or len(list(values)) != channels:
        raise UserError(
            f"dataset.{key}={values}: expected a list of length {channels}, one number per channel."
        )
    above = 0 if key == "std" else None
    return [float(check_number(f"dataset.{key}", value, above=above)) for value in values]


def _check_part(where: str, part: Split, kind: str) -> None:
    """Check that this is a nonempty split."""
    targets = getattr(part, "targets", None)
    needed = ["__len__", "nbytes"]
    if kind == "classification" and not hasattr(part, "target_shape"):
        needed.append("targets")
    if not all(hasattr(part, name) for name in needed) or not isinstance(
        targets, (Tensor, type(None))
    ):
        raise UserError(
            f"{where}: this {type(part).__name__} is not a valid split. A split needs "
            f"{', '.join(needed)}.\n"
            "Targets must be a tensor, and split[[0, 1]] must return (inputs, targets): see "
            "examples/own_data.py.\n"
            "stoker.data.datasets.DatasetSplit(dataset) makes a split from a torch Dataset."
        )
    if len(part) == 0:
        raise UserError(f"{where}: there are no samples.")
    if targets is not None and len(targets) != len(part):
        raise UserError(f"{where}: there are {len(part)} inputs but {len(targets)} targets.")


def _check_tensors(where: str, part: Split, in_shape: tuple[int, ...]) -> None:
    """Check that samples in memory have the right shape and finite values."""
    inputs = getattr(part, "inputs", None)
    for name, tensor in (("inputs", inputs), ("targets", getattr(part, "targets", None))):
        if not isinstance(tensor, Tensor):
            continue
        shape = tuple(tensor.shape[1:])
        if name == "inputs" and shape != in_shape:
            raise UserError(
                f"{where}: inputs have shape {shape}, but should have shape {in_shape}."
            )
        # A NaN anywhere makes both extremes NaN. Finding them takes one pass and no extra memory.
        if tensor.is_floating_point() and not torch.stack(tensor.aminmax()).isfinite().all():
            place = (~tensor.isfinite()).nonzero()[0].tolist()
            value = tensor[tuple(place)].item()
            raise UserError(f"{where}: {name}{place} is {value}. All values must be finite.")


def _target_shape(part: Split) -> tuple[int, ...]:
    targets = getattr(part, "targets", None)
    return tuple(getattr(part, "target_shape", ()) if targets is None else targets.shape[1:])


def _check_labels(where: str, part: Split, classes: int, shape: tuple[int, ...]) -> None:
    """Check that labels are valid class indices, with the dimensions of `shape` for each sample."""
    if len(_target_shape(part)) != len(shape):
        raise UserError(
            f"{where}: a sample's targets have shape {_target_shape(part)}, "
            f"but those of the training split have shape {shape}."
        )
    labels = getattr(part, "targets", None)
    if labels is None:
        return
    # The shape (N, 1) means labels with an extra dimension, not sequences of one token.
    if labels.dtype != torch.int64 or labels.ndim > 3 or shape == (1,):
        raise UserError(
            f"{where}: labels must be int64 of shape (N,), (N, T) with T > 1, or (N, H, W), "
            f"but these are {labels.dtype} of shape {tuple(labels.shape)}."
        )
    is_wrong = (labels < 0) | (labels >= classes)
    if shape:
        is_wrong &= labels != IGNORED
    if is_wrong.any():
        place = is_wrong.nonzero()[0].tolist()
        raise UserError(
            f"{where}: the label {labels[tuple(place)].item()} of sample {place[0]} is not one of "
            f"the {classes} classes 0 to {classes - 1}."
        )
