"""What the Trainer asks of a loader: batches, a length, and `seek`, which any iterable gets here."""

import contextlib
import signal

import torch
from stoker.trainer import parallel
from stoker.trainer.device import mix_seed
from stoker.trainer.errors import TrainingError, UserError, cause
from stoker.trainer.spans import Spans, silent_spans


def resident_bytes(*loaders):
    """Bytes of the data that these loaders have, or will have, on the device: not of what is streamed."""
    return sum(getattr(loader, "resident_bytes", 0) for loader in loaders)


def seekable(loader, seed):
    """The loader itself if it has `seek`, else an IterableLoader around it.

    Any iterable with a length will do, such as a plain DataLoader.
    """
    return dealt(loader, seed) if hasattr(loader, "seek") else IterableLoader(loader, seed)


def dealt(loader, seed):
    """The loader, where several processes train one that deals its batches out, and says how large they were."""
    if parallel.ranks() == 1 or hasattr(loader, "global_size"):
        return loader
    if hasattr(loader, "seek"):
        raise UserError(
            f"{type(loader).__name__}: with several processes a loader with `seek` has to deal its batches out.\n"
            "Leave `seek` out, or give it `global_size`, the samples of the whole batch that its part is from."
        )
    return IterableLoader(loader, seed)


class Seekable:
    """Iterating gives the batches from where `seek` has set it to the end of that epoch, and then the epoch after."""

    next = (0, 0)
    resident_bytes = 0  # of the data that it holds on the device
    spans: Spans = silent_spans()  # `fit` puts those of its Trainer here

    def seek(self, epoch, position=0):
        """The next `iter()` begins with batch number `position` of this epoch."""
        self.next = (epoch, position)

    def __iter__(self):
        epoch, position = self.next
        # Set here and not at the end: after a stop in the middle, or a look at one batch,
        # the next iter() begins a whole epoch.
        self.next = (epoch + 1, 0)
        return self.batches(epoch, position)

    def batches(self, epoch, position):
        """Yields the batches of this epoch from number `position` on."""
        raise NotImplementedError


class IterableLoader(Seekable):
    """The face of a Loader for any iterable with a length.

    To begin at a position it has to read, and drop, the batches before it. The iterable draws from a random stream of
    its own, (seed, epoch), whenever it is asked for a batch: so a DataLoader's shuffling and torch's random numbers in
    its data set repeat themselves, and neither disturbs the training nor is disturbed. Python's and numpy's global
    generators are left alone, and workers that outlive an epoch (persistent_workers) go on with their own streams.
    Where several processes train together, each reads all of it, and has its part of every batch.
    """

    global_size = None

    def __init__(self, loader, seed=0):
        if not hasattr(loader, "__iter__"):
            raise UserError(
                f"{type(loader).__name__} is no loader: give an iterable of batches, with a length."
            )
        try:
            len(loader)
        except TypeError:
            dataset = getattr(loader, "dataset", None)
            owner = "it" if dataset is None else f"its data set, {type(dataset).__name__},"
            raise UserError(
                f"{type(loader).__name__} has no len(), the number of batches in an epoch. "
                f"Give {owner} a __len__ method."
            ) from None
        parallel.check_sampler(loader)
        self.loader, self.seed, self.deals = loader, seed, parallel.ranks() > 1
        self.batch_size = getattr(loader, "batch_size", None)
        dataset = getattr(loader, "dataset", None)
        self.samples = len(dataset) if hasattr(dataset, "__len__") else None

    def __len__(self):
        return len(self.loader)

    def batches(self, epoch, position):
        seed = mix_seed(self.seed, "order", epoch)
        own = torch.Generator().manual_seed(seed).get_state()
        # A generator given to the DataLoader (or its sampler) goes on from epoch to epoch: it must be set back as well.
        for owner in (
            self.loader,
            getattr(self.loader, "sampler", None),
            getattr(self.loader, "batch_sampler", None),
        ):
            if isinstance(getattr(owner, "generator", None), torch.Generator):
                owner.generator.manual_seed(seed)
        iterator, number, end = None, 0, object()
        while True:
            outside = torch.default_generator.get_state()
            torch.default_generator.set_state(own)
            try:
                if iterator is None:
                    with children_do_not_interrupt():
                        iterator = iter(self.loader)
                batch = next(iterator, end)
                own = torch.default_generator.get_state()
            except (UserError, TrainingError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TrainingError(
                    f"The loader has no batch {number} of epoch {epoch}: {cause(error)}."
                ) from error
            finally:
                torch.default_generator.set_state(outside)
            if batch is end:
                return
            if number >= position:
                if self.deals:
                    self.global_size, batch = parallel.deal(batch)
                yield batch
            number += 1


@contextlib.contextmanager
def children_do_not_interrupt():
    """A DataLoader that is started within leaves the handler of SIGCHLD as it was.

    Its own would raise the death of a worker at whatever line the main thread has come to. It is noticed as well where
    the next batch is waited for.
    """
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    try:
        yield
    finally:
        # None stands for a handler that Python does not know; only the main thread can set one, and torch as well.
        if handler is not None and signal.getsignal(signal.SIGCHLD) is not handler:
            signal.signal(signal.SIGCHLD, handler)
