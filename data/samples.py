"""Data sets of arbitrary samples, from a torch Dataset, an iterable or a loader.

These are the splits of a Data of kind "other". This module orders and batches samples, but knows
nothing about their contents.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from stoker.data.order import Limit, Ordered
from stoker.data.record import Data
from stoker.data.splits import DatasetSplit
from stoker.data.workers import TIMEOUT, Reader, Workers, choose_workers, whole_of
from stoker.trainer.errors import UserError, kind_of
from stoker.trainer.loading import IterableLoader, length_of
from stoker.trainer.seeding import CPU, mix_seed, random_stream, seed_generators, seed_own
from stoker.trainer.transfer import UNIFIED


def data_of(name: str, parts: Mapping[str, Any]) -> Data:
    """Make a Data from {"train": ..., "val": ..., "test": ...}.

    Each split is a map-style torch Dataset, an IterableDataset, or a loader (any iterable of
    batches). All splits but train may be missing or None; other keys are additional validation
    splits. Data sets of (tensor, class) pairs that have `classes` and `targets`, like those of
    torchvision, become classification data; anything else has kind "other".

    Raises:
        UserError: There is no training split, or a split yields neither samples nor batches.
    """
    if parts.get("train") is None:
        raise UserError(
            f"dataset: {name} returns {kind_of(parts)} without a train split. "
            'Return {"train": ..., "val": ..., "test": ...}; only train is required.'
        )
    given = {key: part for key, part in parts.items() if part is not None}
    for key, part in given.items():
        is_wrong = isinstance(part, (str, bytes, Mapping, torch.Tensor, type))
        if is_wrong or not (has_samples(part) or hasattr(part, "__iter__")):
            raise UserError(
                f"dataset: {name} returns {kind_of(part)} as {key!r}. Return an instance of a "
                "torch Dataset, of an IterableDataset or of a loader."
            )
    facts: dict[str, Any] = {"kind": "other"}
    if all(map(is_labelled, given.values())):
        inputs, _ = given["train"][0]
        classes = [str(label) for label in whole_of(given["train"]).classes]
        facts = {"in_shape": inputs.shape, "num_classes": len(classes), "classes": classes}
        given = {key: DatasetSplit(part, targets_of(part)) for key, part in given.items()}
    usual = {key: given.pop(key, None) for key in ("train", "val", "test")}
    return Data(name, **usual, more_val=given, **facts)


def has_samples(part: Any) -> bool:
    """Return whether this is a map-style data set, whose samples have indices."""
    is_sized = hasattr(part, "__len__") and hasattr(part, "__getitem__")
    return is_sized and not is_stream(part)


def is_stream(part: Any) -> bool:
    """Return whether this is an IterableDataset, which yields samples one by one."""
    return isinstance(part, IterableDataset)


def targets_of(dataset: Any) -> Any:
    """Return the `targets` of a data set, including those of a torch Subset."""
    if isinstance(dataset, torch.utils.data.Subset):
        targets = targets_of(dataset.dataset)
        return None if targets is None else [targets[i] for i in dataset.indices]
    return getattr(dataset, "targets", None)


def is_labelled(part: Any) -> bool:
    """Return whether this is a data set of (tensor, class) pairs that names its classes."""
    if not has_samples(part) or hasattr(part, "collate_fn") or len(part) == 0:
        return False
    whole = whole_of(part)
    # With a target_transform, samples do not contain the values in `targets` and `classes`.
    is_changed = getattr(whole, "target_transform", None) is not None
    if is_changed or not hasattr(whole, "classes") or targets_of(part) is None:
        return False
    with random_stream():
        sample = part[0]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        return False
    inputs, label = sample
    is_class = isinstance(label, int) or (torch.is_tensor(label) and not label.ndim)
    return torch.is_tensor(inputs) and inputs.ndim > 0 and is_class


def loader_line(data: Data) -> str:
    """Return a line that says what your own loader cannot guarantee; "" for built-in loaders."""
    part = data.train
    if data.kind != "other" or has_samples(part) or is_stream(part):
        return ""
    loader = IterableLoader(part)
    if loader.is_stateful or not loader.length_is_exact:  # `fit` warns about streams
        return ""
    return (
        f"loader   train is your own {loader.name}: a resumed run reads its batches again up to "
        "where it stopped; they are the same only if they depend on nothing but the global seeds"
    )


def make_loader(
    part: Any,
    name: str,
    batch_size: int,
    *,
    workers: str | int = "auto",
    timeout: float = TIMEOUT,
    **options: Any,
) -> Any:
    """Return a loader for a split of arbitrary samples: a SampleLoader for a map-style data set.

    An IterableDataset becomes a DataLoader, by default without workers, because each worker would
    read the whole stream. Your own loader is returned unchanged. With a limit, an evaluation uses
    the loader's first batches, and each epoch continues where the previous epoch stopped. `options`
    are passed to Ordered.
    """
    if has_samples(part):
        count = choose_workers(part) if workers == "auto" else int(workers)
        return SampleLoader(part, name, batch_size, workers=count, timeout=timeout, **options)
    if is_stream(part):
        count = 0 if workers == "auto" else int(workers)
        part = DataLoader(
            part,
            batch_size,
            collate_fn=getattr(part, "collate_fn", None),
            drop_last=options.get("drop_last", False),
            num_workers=count,
            timeout=timeout if count else 0,
            pin_memory=torch.device(options["device"]).type not in UNIFIED,
        )
    limit = options.get("limit")
    is_training = options.get("shuffle", False)
    if limit is not None:
        steps = batches_in(part, limit, "train" if is_training else "val")
        return IterableLoader(part, steps_per_epoch=steps)
    return part


def batches_in(loader: Any, limit: Limit, part: str) -> int:
    """Convert a fraction or a number of samples to a number of batches of a loader.

    Raises:
        UserError: The loader's length or batch size is unknown, or the limit is above its length.
    """
    length = length_of(loader)
    size: int | None = getattr(loader, "batch_size", None)
    if isinstance(limit, float) and length is not None:
        return max(1, round(limit * length))
    if isinstance(limit, int) and size is not None:
        count = -(-limit // size)
        if length is None or count <= length:
            return count
    raise UserError(
        f"limit_{part}={limit}: not possible with this {type(loader).__name__} "
        f"(length: {length or 'unknown'}, batch size: {size or 'unknown'}).\n"
        "A fraction requires a loader with a length; a number of samples requires a loader with a "
        "batch_size and at least that many samples."
    )


class SampleLoader(Ordered):
    """Batches of a map-style data set, collated by its `collate_fn` or torch's `default_collate`.

    A batch depends only on (seed, epoch, batch index). A sample's random numbers depend on (seed,
    epoch, sample index), so they are the same for any number of workers and processes; only the
    random numbers of a `collate_fn` differ between processes. In evaluations, the epoch is 0.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        batch_size: int,
        *,
        workers: int = 0,
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> None:
        if len(dataset) == 0:
            raise UserError(f"{name} is empty.")
        super().__init__(dataset, name, batch_size, **options)
        reader = SampleReader(dataset, name, workers, (self.seed,))
        self.workers = Workers(reader, workers, timeout, self.device)

    def batches(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the batches of this epoch, starting at index `position`."""
        whole = self.whole_batches(epoch, position)
        batches = self.workers.read(epoch if self.shuffle else 0, list(map(self.mine, whole)))
        for samples, batch in zip(whole, batches, strict=True):
            self.global_size = len(samples)
            yield batch


class SampleReader(Reader):
    """Reads samples one by one, each with its own random streams, and collates them."""

    def _read(self, epoch: int, indices: list[int]) -> Any:
        collate = getattr(self.split, "collate_fn", None) or default_collate
        with random_stream():
            samples = []
            for index in indices:
                seed = mix_seed("sample", *self.stream, epoch, index)
                seed_generators(CPU, seed)
                seed_own(whole_of(self.split), seed)
                samples.append(self.split[index])
            seed_generators(CPU, mix_seed("collate", *self.stream, epoch, indices[0]))
            return collate(samples)

    def _name(self, index: int) -> str:
        return str(index)
