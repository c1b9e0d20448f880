"""Give any iterable of batches the length and the `seek` method that the Trainer needs."""

import contextlib
import dataclasses
import inspect
import math
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from stoker.trainer import batches, launch, parallel, settings
from stoker.trainer.batches import SampleDimOf
from stoker.trainer.errors import TrainingError, UserError, cause
from stoker.trainer.number_format import counted
from stoker.trainer.seeding import CPU, mix_seed, seed_generators, seed_own
from stoker.trainer.spans import Spans, is_profiled, silent_spans

END = object()  # marks the end of an iterator
UNREAD = inspect.GEN_CREATED  # the state of a generator that has not been read
SAMPLERS = ("sampler", "batch_sampler")  # attributes of loaders and samplers that hold a sampler


def resident_bytes(*loaders: Any) -> int:
    """Return the number of bytes of data that these loaders keep on the device."""
    return sum(getattr(loader, "resident_bytes", 0) for loader in loaders)


def by_name(val_loader: Any) -> dict[str, Any]:
    """Return the validation loaders as {name: loader}; a single loader is named "val"."""
    if val_loader is None:
        return {}
    return dict(val_loader) if isinstance(val_loader, Mapping) else {"val": val_loader}


def seekable(loader: Any, seed: int, sample_dim: SampleDimOf = batches.usual_dim) -> Any:
    """Return the loader if it has `seek`, or else an IterableLoader around it.

    Any iterable works, such as a DataLoader. For an IterableLoader, a new one with the same
    settings is returned.
    """
    if isinstance(loader, IterableLoader):
        return IterableLoader(
            loader.loader, seed, sample_dim, loader.steps_per_epoch, loader.accumulate
        )
    return loader if hasattr(loader, "seek") else IterableLoader(loader, seed, sample_dim)


def length_of(iterable: Any) -> int | None:
    """Return the length of a loader or a data set, or None if its length is unknown."""
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):
        return None


def epoch_length(loader: Any, max_steps: int | None) -> int:
    """Return the number of steps in an epoch: the loader's length, or else `max_steps`.

    Raises:
        UserError: There is neither, or the length is 0.
    """
    steps = length_of(loader)
    if steps is None:
        steps = max_steps
    if steps is None:
        raise UserError(
            f"{type(getattr(loader, 'loader', loader)).__name__} has no len(), so the number of "
            "batches in an epoch is unknown.\nType max_steps=N or steps_per_epoch=N; in a script, "
            "call fit(IterableLoader(loader, steps_per_epoch=N), ...)."
        )
    if not steps:
        raise UserError("The training loader is empty: it has fewer samples than one batch.")
    return steps


class Seekable:
    """A loader that can start at any batch, which you choose with `seek`.

    The first iteration yields the batches from there to the end of the epoch. Each further
    iteration yields the next epoch.
    """

    next: tuple[int, int] = (0, 0)
    # Whether all samples have the same number of targets, and no class is negative (losses may
    # ignore negative classes).
    targets_are_uniform: bool = False
    resident_bytes: int = 0  # size of the data that the loader keeps on the device
    spans: Spans = silent_spans()  # `fit` replaces them with the Trainer's spans

    def seek(self, epoch: int, position: int = 0) -> None:
        """Let the next `iter()` start at batch `position` of this epoch."""
        self.next = (epoch, position)

    def __iter__(self) -> Iterator[Any]:
        epoch, position = self.next
        # Set this now, so that the next iter() starts a new epoch even if this one stops early.
        self.next = (epoch + 1, 0)
        return self.batches(epoch, position)

    def batches(self, epoch: int, position: int) -> Iterator[Any]:
        """Yield the batches of this epoch, starting at batch `position`."""
        raise NotImplementedError


@dataclasses.dataclass
class Place:
    """The position of an IterableLoader within its iterable.

    Attributes:
        passes: How many times the iterable was read to its end, including epochs of earlier fits.
        number: The number of batches read in this pass.
        drop: How many of these batches to skip, to reach the position of a checkpoint.
        step: The number of steps before this position, counted from the first epoch. None if the
            position is from a checkpoint: the next iteration then always continues here.
        seed: The seed of the random streams of this pass, set by `begin_pass`.
    """

    passes: int
    number: int = 0
    drop: int = 0
    step: int | None = None
    seed: int = 0
    iterator: Iterator[Any] | None = None


class IterableLoader(Seekable):
    """A Seekable around any iterable of batches, with or without a length.

    An epoch has `steps_per_epoch` steps, or one per batch. The next epoch continues where the last
    one stopped. When the iterable ends, it is read again from the start; each such reading is
    called a pass. When a run resumes, an iterable with `state_dict` and `load_state_dict` continues
    where it stopped. For any other iterable, the batches of the pass up to that point are read
    again and dropped.

    The iterable draws its random numbers from separate streams: for each batch, the generators of
    Python, numpy and torch are seeded by (seed, pass, batch). Shuffling and augmentation are
    therefore reproducible, and training and data do not affect each other. Only persistent workers,
    which outlive a pass, continue their own streams. If the iterable has `set_epoch`, it is called
    with the number of the pass. With several processes, each process reads all batches and takes
    its part of each.

    Args:
        loader: An iterable of batches.
        seed: The seed of the random streams. `fit` uses the Trainer's seed.
        sample_dim: A function like `Trainer.sample_dim`. `fit` uses the Trainer's.
        steps_per_epoch: Steps per epoch, if the length is unknown or you want a different one.
        accumulate: Batches per step, each of which is a micro-batch. The last step of a pass may
            have fewer.
    """

    global_size: int | None = None  # samples in the last batch, across all processes
    steps: int | None = None  # steps per epoch, set by `fit`; None to read a single pass
    place: Place | None = None  # where the next iteration continues
    is_warned: bool = False  # whether a warning about a wrong length was logged

    def __init__(
        self,
        loader: Any,
        seed: int = 0,
        sample_dim: SampleDimOf = batches.usual_dim,
        steps_per_epoch: int | None = None,
        accumulate: int = 1,
    ) -> None:
        self.name = type(loader).__name__
        parallel.check_sampler(loader)
        self.loader = loader
        self.seed = seed
        self.sample_dim = sample_dim
        self.steps_per_epoch = settings.check("steps_per_epoch", steps_per_epoch)
        self.accumulate = settings.check("grad_accum_steps", accumulate)
        self.targets_are_uniform = getattr(loader, "targets_are_uniform", False)
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        dataset = getattr(loader, "dataset", None)
        # For an IterableDataset, the length of a DataLoader is only an estimate.
        is_guess = isinstance(dataset, torch.utils.data.IterableDataset)
        self.length_is_exact = length_of(loader) is not None and not is_guess
        self.is_plain = type(loader) is DataLoader and not is_guess  # see `next_batch`
        # The workers of an IterableDataset determine the order of its samples.
        self.workers: int | None = getattr(loader, "num_workers", None) if is_guess else None
        self.is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.samples = length_of(dataset)

    def __len__(self) -> int:
        return self.steps_per_epoch or math.ceil(len(self.loader) / self.accumulate)

    def close(self) -> None:
        """Stop reading the iterable, which ends the workers of a DataLoader."""
        self.place = None

    def batches(self, epoch: int, position: int) -> Iterator[Any]:
        step = epoch * (self.steps or 0) + position
        place = self.place
        if place is None or self.steps is None or place.step not in (None, step):
            place = Place(passes=epoch, drop=position * self.accumulate)
        parts: list[Any] = []  # the micro-batches of a step
        samples = 0  # in these micro-batches, across all processes
        limit = self.steps or self.steps_per_epoch
        while limit is None or position < limit:
            batch = self.read(place)
            if batch is not END:
                place.number += 1
                if place.number <= place.drop:
                    continue
                if parallel.process_count > 1:
                    size, batch = batches.deal(
                        batch, launch.rank(), launch.world_size(), self.sample_dim
                    )
                    if self.accumulate > 1:
                        parallel.check_size(size)
                    samples += size
                parts.append(batch)
                if len(parts) < self.accumulate:
                    continue
            elif self.steps is not None:
                self.check_pass(place)
                place = Place(passes=place.passes + 1)
            if not parts:
                if self.steps is None:
                    return
                continue
            position += 1
            step += 1
            place.step = step
            self.place = place
            self.global_size = samples
            yield parts[0] if self.accumulate == 1 else batches.Accumulated(parts)
            parts = []
            samples = 0

    def read(self, place: Place) -> Any:
        """Return the next batch, or END. The iterable draws from its own random streams."""
        # Outside a fit, restore torch's generator. Python's and numpy's would take too long. In a
        # fit, `Trainer.begin_step` seeds all of them after reading.
        outside = torch.default_generator.get_state() if self.steps is None else None
        if place.iterator is None:
            is_generator = inspect.isgenerator(self.loader)
            if place.drop and is_generator and inspect.getgeneratorstate(self.loader) != UNREAD:
                raise UserError(
                    "To resume, the training data is read again from the start, but this generator "
                    "has already been read. Pass a new one."
                )
            if not place.number:  # otherwise, `load_state_dict` has begun the pass
                self.begin_pass(place)
        seed_generators(CPU, place.seed + place.number)
        try:
            if place.iterator is None:
                with children_do_not_interrupt():
                    place.iterator = iter(self.loader)
                if place.number:  # an uninterrupted run did not create an iterator here
                    seed_generators(CPU, place.seed + place.number)
            return next_batch(place.iterator, self.is_plain)
        except (UserError, TrainingError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise TrainingError(
                f"The loader failed at batch {place.number + 1} of pass {place.passes + 1}: "
                f"{cause(error)}."
            ) from error
        finally:
            if outside is not None:
                torch.default_generator.set_state(outside)

    def check_pass(self, place: Place) -> None:
        """Warn at the end of a pass if the iterable's length was wrong.

        Raises:
            UserError: The pass had no batches, such as the second pass of a generator.
        """
        if not place.number:
            raise UserError(
                f"The training loader ({self.name}) has no batches"
                f"{' when it is read again' if place.passes else ''}.\n"
                "Pass an object that starts over at each iter(), such as a DataLoader, or reduce "
                "max_steps to the number of batches."
            )
        length = length_of(self.loader)
        if length not in (None, place.number) and not self.is_warned:
            self.is_warned = True
            launch.warn(
                f"{self.name}'s len() is {length}, but it yielded {place.number} batches. "
                f"The number of steps per epoch is still {self.steps}; each epoch continues where "
                "the previous one ended."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the state of the iterable if it has one."""
        place = self.place
        if place is None or place.step is None:  # nothing has been read
            return {}
        # If the length is known, a resumed run need not read a finished pass again.
        is_exact = self.length_is_exact and isinstance(self.loader, DataLoader)
        if is_exact and place.number == len(self.loader):
            return {"passes": place.passes + 1, "number": 0}
        state: dict[str, Any] = {"passes": place.passes, "number": place.number}
        if self.is_stateful:
            state["loader"] = self.loader.state_dict()
        if self.workers is not None:
            state["workers"] = self.workers
        return state

    def load_state_dict(self, state: Any) -> None:
        """Continue from this state at the next iteration; {} changes nothing.

        Raises:
            UserError: The iterable is read by a different number of workers.
        """
        if state == {}:
            return
        before = state.get("workers")
        workers = self.workers
        # A single worker reads in the same order as the main process.
        if before is not None and workers is not None and max(1, before) != max(1, workers):
            raise UserError(
                f"{self.name}: the run read this IterableDataset with {counted(before, 'worker')}, "
                f"but the loader now has {counted(workers, 'worker')}, which changes the sample "
                f"order.\nType dataset.workers={before} (in a script, set the "
                "DataLoader's num_workers). For a new run, choose a different run_dir."
            )
        place = Place(state["passes"], drop=state["number"])
        if self.is_stateful and "loader" in state:
            place = Place(state["passes"], state["number"])
            self.begin_pass(place)  # before load_state_dict, which may restore generators
            self.loader.load_state_dict(state["loader"])
        self.place = place

    def begin_pass(self, place: Place) -> None:
        """Seed the pass, and the generators of the loader and of DataLoaders and samplers in it.

        Otherwise, each stream would continue from pass to pass, which a resumed run cannot repeat.
        """
        place.seed = mix_seed(self.seed, "order", place.passes)
        owners = [self.loader, getattr(self.loader, "dataset", None)]
        for number, owner in enumerate(owners):  # the list grows inside the loop
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(place.passes)
            seed_own(owner, mix_seed(place.seed, number))
            for name, value in getattr(owner, "__dict__", {}).items():
                is_inside = isinstance(value, (DataLoader, Sampler)) or name in SAMPLERS
                if is_inside and all(value is not owner for owner in owners):
                    owners.append(value)


def next_batch(iterator: Any, is_plain: bool) -> Any:
    """Return the next batch, or END.

    A DataLoader names each batch for torch's profiler, which takes 10 to 20 us. If the iterator is
    from a plain DataLoader and no profiler is running, leave that out.
    """
    if not is_plain or is_profiled():
        return next(iterator, END)
    try:
        return iterator._next_data()  # private: `__next__` without the name, torch 2.15
    except StopIteration:
        return END


@contextlib.contextmanager
def children_do_not_interrupt() -> Iterator[None]:
    """Keep the SIGCHLD handler, which a DataLoader replaces when it starts workers.

    When a worker dies, the DataLoader's handler raises an error at an arbitrary line of the main
    thread. Without this handler, the error is raised while waiting for the next batch.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    try:
        yield
    finally:
        # None means that the handler was not set by Python code. Only the main thread can set one.
        if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
