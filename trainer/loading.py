"""What the Trainer asks of a loader: batches, a length, and `seek`, which any iterable gets."""

import contextlib
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from stoker.trainer import batch as batches
from stoker.trainer import launch, parallel
from stoker.trainer.batch import SampleDimOf
from stoker.trainer.errors import TrainingError, UserError, cause
from stoker.trainer.seeding import mix_seed, seed_python
from stoker.trainer.spans import Spans, silent_spans

END = object()  # of an iterator
SAMPLERS = ("sampler", "batch_sampler")  # attributes of a DataLoader and of samplers around others


def resident_bytes(*loaders: Any) -> int:
    """Return the bytes that these loaders hold on the device; streamed data has none."""
    return sum(getattr(loader, "resident_bytes", 0) for loader in loaders)


def by_name(val_loader: Any) -> dict[str, Any]:
    """Return {name: loader} of what a fit evaluates: a single loader is "val"."""
    if val_loader is None:
        return {}
    return dict(val_loader) if isinstance(val_loader, Mapping) else {"val": val_loader}


def seekable(loader: Any, seed: int, sample_dim: SampleDimOf = batches.usual_dim) -> Any:
    """Return the loader if it has `seek`, else an IterableLoader around it.

    Any iterable with a length will do, such as a plain DataLoader.
    """
    if hasattr(loader, "seek"):
        return dealt(loader, seed, sample_dim)
    return IterableLoader(loader, seed, sample_dim)


def dealt(loader: Any, seed: int, sample_dim: SampleDimOf = batches.usual_dim) -> Any:
    """Return the loader, or in several processes one that deals its batches out to them.

    Raises:
        UserError: The loader has `seek`, and does not deal its batches out.
    """
    if parallel.ranks() == 1 or hasattr(loader, "global_size"):
        return loader
    if hasattr(loader, "seek"):
        raise UserError(
            f"{type(loader).__name__}: with several processes a loader with `seek` has to deal its "
            "batches out.\nLeave `seek` out, or give it `global_size`, the samples of the whole "
            "batch that its part is from."
        )
    return IterableLoader(loader, seed, sample_dim)


class Seekable:
    """A loader that begins where `seek` has set it.

    Iterating yields the batches from there to the end of that epoch, and then the epoch after.
    """

    next: tuple[int, int] = (0, 0)
    # Whether all samples have the same number of targets, and no class is negative, as a loss may
    # ignore those.
    targets_are_uniform: bool = False
    resident_bytes: int = 0  # of the data that it holds on the device
    spans: Spans = silent_spans()  # `fit` puts those of its Trainer here

    def seek(self, epoch: int, position: int = 0) -> None:
        """Begin the next `iter()` with batch number `position` of this epoch."""
        self.next = (epoch, position)

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.next
        # Set here and not at the end: after a stop in the middle, or a look at one batch,
        # the next iter() begins a whole epoch.
        self.next = (epoch + 1, 0)
        return self.batches(epoch, position)

    def batches(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the batches of this epoch from number `position` on."""
        raise NotImplementedError


class IterableLoader(Seekable):
    """A Seekable around any iterable with a length.

    To begin at a position it reads, and drops, the batches before it. Whenever it is asked for a
    batch, the iterable draws from random streams of its own: from torch's of (seed, epoch), and
    from Python's and numpy's of (seed, epoch, batch), which leave `random` and `numpy.random`
    seeded. So a DataLoader's shuffling and the random numbers in its data set repeat themselves,
    and the training and the data do not disturb each other. Only workers that outlive an epoch
    (persistent_workers) continue their own streams. In several processes, each reads all batches
    and takes its part of every one.

    Raises:
        UserError: This is not an iterable, or has no length.
    """

    global_size: int | None = None  # samples of the whole batch, in several processes

    def __init__(
        self, loader: Any, seed: int = 0, sample_dim: SampleDimOf = batches.usual_dim
    ) -> None:
        name = type(loader).__name__
        if not hasattr(loader, "__iter__"):
            raise UserError(f"{name} is not a loader: give an iterable of batches, with a length.")
        dataset = getattr(loader, "dataset", None)
        try:
            len(loader)
        except TypeError:
            owner = "it" if dataset is None else f"its data set, {type(dataset).__name__},"
            raise UserError(
                f"{name} has no len(), the number of batches in an epoch. "
                f"Give {owner} a __len__ method."
            ) from None
        parallel.check_sampler(loader)
        self.loader = loader
        self.seed = seed
        self.sample_dim = sample_dim
        self.targets_are_uniform = getattr(loader, "targets_are_uniform", False)
        self.deals: bool = parallel.ranks() > 1
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        length = getattr(dataset, "__len__", None)
        self.samples: int | None = None if length is None else length()

    def __len__(self) -> int:
        return len(self.loader)

    def batches(self, epoch: int, position: int) -> Iterator[Any]:
        seed = mix_seed(self.seed, "order", epoch)
        self.seed_generators(seed)
        state = torch.Generator().manual_seed(seed).get_state()
        iterator: Iterator[Any] | None = None
        number = 0
        while True:
            outside = torch.default_generator.get_state()
            torch.default_generator.set_state(state)
            seed_python(mix_seed(seed, number))  # the step reseeds them
            try:
                if iterator is None:
                    with children_do_not_interrupt():
                        iterator = iter(self.loader)
                batch = next(iterator, END)
                state = torch.default_generator.get_state()
            except (UserError, TrainingError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TrainingError(
                    f"The loader has no batch {number} of epoch {epoch}: {cause(error)}."
                ) from error
            finally:
                torch.default_generator.set_state(outside)
            if batch is END:
                return
            if number >= position:
                if self.deals:
                    rank, ranks = launch.rank(), launch.world_size()
                    self.global_size, batch = batches.deal(batch, rank, ranks, self.sample_dim)
                yield batch
            number += 1

    def seed_generators(self, seed: int) -> None:
        """Seed the generators of the loader, and of the DataLoaders and samplers inside it.

        They would continue from epoch to epoch, and a resumed run has not had those before.
        """
        owners = [self.loader]
        for owner in owners:  # which grow
            for name, value in getattr(owner, "__dict__", {}).items():
                if isinstance(value, torch.Generator):
                    value.manual_seed(seed)
                is_inside = isinstance(value, (DataLoader, Sampler)) or name in SAMPLERS
                if is_inside and all(value is not owner for owner in owners):
                    owners.append(value)


@contextlib.contextmanager
def children_do_not_interrupt() -> Iterator[None]:
    """Keep the handler of SIGCHLD while a DataLoader starts its workers.

    The DataLoader's handler raises the death of a worker at whatever line the main thread has come
    to. Waiting for the next batch notices it as well.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    try:
        yield
    finally:
        # None is a handler that Python does not know. Only the main thread sets one, torch too.
        if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
