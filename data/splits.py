"""Splits of a data set, in memory or read from a torch Dataset, and the rules that divide samples
among splits.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stoker.trainer.errors import UserError, check_number, kind_of
from stoker.trainer.loading import length_of
from stoker.trainer.seeding import mix_seed, random_stream


class Split(Protocol):
    """The interface of a split, which Data takes and loaders read.

    `split[[3, 1]]` returns (inputs, targets) of these samples, each stacked into one tensor. A
    split that can return all samples at once also has `tensors()`, and can then be resident on the
    device. `targets` is optional for regression, and for classes that are computed on access, such
    as next tokens. A split of such classes needs a `target_shape`, (T,) or (H, W), and sets
    `targets_are_uniform` to True if no target is -100.
    """

    nbytes: int
    targets: Tensor

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int], /) -> tuple[Tensor, Tensor]: ...


class TensorSplit:
    """A split in memory. Index it with an int, or with a list of ints for a whole batch.

    `lines`: for a table, each sample's line number in its file; the header is line 1.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        lines: Tensor | None = None,
    ) -> None:
        self.inputs = inputs
        self.targets = targets
        self.lines = lines
        self.nbytes: int = inputs.nbytes + getattr(targets, "nbytes", 0)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int | list[int] | Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(index, int):
            return self.inputs[index], self.targets[index]
        index = torch.as_tensor(index)
        return self.inputs.index_select(0, index), self.targets.index_select(0, index)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all inputs and targets."""
        return self.inputs, self.targets


class DatasetSplit:
    """A map-style torch Dataset of (input, target), read sample by sample for each batch.

    `targets`: the targets of all samples, such as an ImageFolder's `targets`. Without them, each
    sample is read once to get its target. Inputs can change between epochs, but targets must
    stay the same.
    """

    def __init__(self, dataset: Any, targets: Sequence[Any] | Tensor | None = None) -> None:
        if not hasattr(dataset, "__getitem__") or length_of(dataset) in (None, 0):
            raise UserError(
                f"DatasetSplit: this {type(dataset).__name__} is empty, or has no length or no "
                "__getitem__. Pass a map-style Dataset."
            )
        with random_stream():
            first = dataset[0]
            if not isinstance(first, (tuple, list)):
                raise UserError(
                    f"DatasetSplit: a sample of this {type(dataset).__name__} is {kind_of(first)}, "
                    "not (input, target)."
                )
            self.nbytes: int = len(dataset) * _stacked([first], 0).nbytes
            if targets is None:
                targets = _stacked([dataset[i] for i in range(len(dataset))], 1)
        self.dataset = dataset
        self.targets = torch.as_tensor(targets)
        if self.targets.is_floating_point():  # for regression: (N, number of targets)
            self.targets = self.targets.float().view(len(self.targets), -1)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return _stacked([self.dataset[i] for i in indices], 0), self.targets[indices]


def _stacked(samples: Sequence[Any], part: int) -> Tensor:
    """Return the inputs (part 0) or targets (part 1) of samples as one tensor."""
    return torch.stack([torch.as_tensor(sample[part]) for sample in samples])


def shuffled(n: int, *parts: object) -> Tensor:
    """Return the numbers from 0 to n - 1, int64 on the CPU, in an order that depends on `parts`."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(mix_seed(*parts)))


def check_fractions(**fractions: float) -> list[float]:
    """Return the values of `val_fraction=` and `test_fraction=`; raise UserError if they leave
    too few samples to train on.
    """
    for key, value in fractions.items():
        check_number(f"dataset.{key}", value, least=0, most=0.95)
    if sum(fractions.values()) > 0.95:
        raise UserError(
            "dataset.val_fraction + dataset.test_fraction is above 0.95, which leaves too few "
            "samples to train on."
        )
    return list(fractions.values())


def split_indices(targets: Tensor | int, fractions: Sequence[float], seed: int) -> list[Tensor]:
    """Divide samples into [rest, split, split, ...], with one split per fraction; return the sorted
    indices of each.

    `targets` is either the number of samples or their targets. With one class per sample, the
    splits are stratified: each has the same fraction of every class, and at least one sample of
    every class that has enough samples. Raises UserError if a split would be empty.
    """
    n = targets if isinstance(targets, int) else len(targets)
    groups = [torch.arange(n)]
    if isinstance(targets, Tensor) and targets.ndim == 1 and n > 0:
        groups = [(targets == label).nonzero().view(-1) for label in targets.unique()]
    generator = torch.Generator().manual_seed(mix_seed(seed, "split"))
    cuts = []
    for group in groups:
        shuffled = group[torch.randperm(len(group), generator=generator)]
        cuts.append(shuffled.split(_sizes(len(group), fractions)))
    parts = [torch.cat(pieces).sort().values for pieces in zip(*cuts, strict=True)]
    _check_sizes(parts, fractions)
    return parts


def divide(
    targets: Tensor | int,
    fractions: Sequence[float],
    seed: int,
    *,
    folds: int = 0,
    fold: int = 0,
    groups: Tensor | None = None,
    times: Tensor | None = None,
) -> list[Tensor]:
    """Divide samples into [train, val, test] with `split_indices`, or by folds, groups or times.

    `folds`: divide the samples outside the test split into this many folds of equal size, which are
    stratified if `targets` are classes; fold number `fold` is the validation split.
    `groups`: keep samples with the same group number in one split; fractions refer to the number of
    groups.
    `times`: use the latest samples as the test split, and the samples before them as the validation
    split; samples with the same time stay together.
    """
    check_number("dataset.folds", folds, whole=True, least=0)
    check_number("dataset.fold", fold, whole=True, least=0, most=max(folds - 1, 0))
    if times is not None:
        if folds or groups is not None:
            raise UserError(
                "dataset.split_time: cannot be combined with dataset.folds or dataset.split_group."
            )
        return _by_time(times, fractions)
    if groups is not None:
        names, numbers = groups.unique(return_inverse=True)
        parts = divide(len(names), fractions, seed, folds=folds, fold=fold)
        return [torch.isin(numbers, part).nonzero().view(-1) for part in parts]
    if folds == 0:
        return split_indices(targets, fractions, seed)
    rest, test = split_indices(targets, fractions[1:], seed)
    if len(rest) < folds or folds == 1:
        raise UserError(
            f"dataset.folds={folds}: there are {len(rest)} samples or groups to split. Type "
            f"a number from 2 to {len(rest)}."
        )
    order = shuffled(len(rest), seed, "folds")
    if isinstance(targets, Tensor):
        order = order[targets[rest[order]].argsort(stable=True)]
    is_val = torch.zeros(len(rest), dtype=torch.bool)
    is_val[order[fold::folds]] = True
    return [rest[~is_val], rest[is_val], test]


def _by_time(times: Tensor, fractions: Sequence[float]) -> list[Tensor]:
    """Return the sample indices of each split; the first split has the earliest samples."""
    starts = torch.tensor(_sizes(len(times), fractions)[:-1]).cumsum(0)
    ordered = torch.cat([times.sort().values, torch.tensor([math.inf])])
    number = torch.bucketize(times, ordered[starts], right=True)
    parts = [(number == part).nonzero().view(-1) for part in range(len(fractions) + 1)]
    _check_sizes(parts, fractions)
    return parts


def _check_sizes(parts: list[Tensor], fractions: Sequence[float]) -> None:
    """Raise UserError if a split with a nonzero fraction is empty."""
    for part, fraction in zip(parts, [1.0, *fractions], strict=True):
        if fraction > 0 and len(part) == 0:
            raise UserError(
                f"{sum(map(len, parts))} samples or groups cannot be split with these fractions: a "
                "split would be empty.\n"
                "Choose a different dataset.val_fraction or dataset.test_fraction (0: no split)."
            )


def _sizes(count: int, fractions: Sequence[float]) -> list[int]:
    """Return how many of `count` samples go to the rest and to each split."""
    sizes = [round(count * fraction) for fraction in fractions]
    asked = [i for i, fraction in enumerate(fractions) if fraction > 0]
    if count > len(asked):
        for i in asked:
            sizes[i] = max(sizes[i], 1)
        while sum(sizes) >= count:
            sizes[sizes.index(max(sizes))] -= 1
    return [count - sum(sizes), *sizes]


def cut(inputs: Tensor, targets: Tensor, fractions: Sequence[float], seed: int) -> list[Any]:
    """Return a TensorSplit for the rest and one for each fraction, or None if it is empty."""
    return tensor_splits(split_indices(targets, fractions, seed), inputs, targets)


def tensor_splits(parts: Sequence[Tensor], *tensors: Tensor) -> list[Any]:
    """Return a TensorSplit for each list of indices in `parts`, or None if the list is empty."""
    splits: list[Any] = []
    for part in parts:
        split = TensorSplit(*(tensor[part] for tensor in tensors))
        splits.append(split if len(part) else None)
    return splits
