"""The worker processes of a loader: how many there are, how they start and stop, and what happens
if one of them dies.
"""

import atexit
import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from stoker.data import settings
from stoker.data.images import ImageSplit
from stoker.data.splits import TensorSplit
from stoker.data.transforms import PerSample
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError, cause, printable
from stoker.trainer.loading import END, children_do_not_interrupt
from stoker.trainer.seeding import mix_seed, random_stream, seed_own
from stoker.trainer.stopping import SIGNALS
from stoker.trainer.transfer import UNIFIED

TIMEOUT = 300  # seconds to wait for a batch
POLL = 1.0  # seconds between checks that the workers are alive
FEWER = (
    "Set a lower dataset.workers (0: read in this process), or provide more shared memory "
    "(docker run --shm-size=8g)."
)
# The worker processes of all loaders.
WORKERS: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKERS.clear)  # only the parent stops its workers

# (epoch, indices of a batch).
Place = tuple[int, list[int]]


def choose_workers(split: Any, transforms: Sequence[Any] = ()) -> int:
    """Choose the number of workers: one per core, up to 8; none for tensors in memory."""
    if (hasattr(split, "inputs") or hasattr(split, "tokens")) and not transforms:
        return 0
    return max(1, min(launch.cores() // launch.local_world_size(), 8))


def whole_of(dataset: Any) -> Any:
    """Return the data set underneath a torch Subset; any other data set is returned unchanged."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class Workers:
    """`count` processes that read batches ahead of the training loop; with 0, this process reads
    each batch on demand.

    `timeout`: seconds to wait for a batch from a worker; 0: no limit. `ahead`: the number of
    batches each worker prefetches, from 1 to 4.
    """

    def __init__(
        self, reader: "Reader", count: int, timeout: float, device: torch.device, ahead: int = 2
    ) -> None:
        self.reader = reader
        self.timeout = settings.check("dataset.timeout", timeout)
        self.plan: list[Place] = []  # the sampler: the batches to read
        self.loader: Any = torch.utils.data.DataLoader(
            reader,
            batch_size=None,  # each item of the plan is a whole batch
            sampler=self.plan,
            num_workers=count,
            pin_memory=device.type not in UNIFIED,  # on mps, host and device share memory
            persistent_workers=count > 0,
            prefetch_factor=max(1, min(ahead, 4)) if count else None,  # batches per worker
            # Without this generator, each epoch would draw a number from the global one.
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=functools.partial(begin_worker, parent=os.getpid()),
        )
        self.batches: Any = None  # the loader's iterator
        self.processes: list[BaseProcess] = []  # set at the first batch

    def read(self, epoch: int, batches: Sequence[Tensor]) -> Iterator[Any]:
        """Yield the batches of these indices; the workers keep running for the next call."""
        # Send lists, because tensors would need shared memory.
        self._start([(epoch, indices.tolist()) for indices in batches])
        for _ in batches:
            batch = self._take()
            if isinstance(batch, (UserError, TrainingError)):
                try:
                    raise batch
                finally:
                    # Otherwise the error and this frame would refer to each other, and the workers
                    # would keep running until the next garbage collection.
                    del batch
            yield batch

    def _start(self, plan: list[Place]) -> None:
        """Start reading the plan; the first call starts the workers."""
        if self.processes:
            # Drain the batches that were requested before a seek.
            self.plan.clear()
            while self._take() is not END:
                pass
            if not all(worker.is_alive() for worker in self.processes):
                raise self._lost(None)
            self.batches._timeout = 0  # private: this iterator's timeout, torch 2.15
        self.plan[:] = plan
        try:
            with children_do_not_interrupt(), stops_wait():
                self.batches = iter(self.loader)
                # Record the processes while signals are blocked: the handler of a pending signal
                # must know which processes to stop.
                # private: `_workers` holds the iterator's worker processes, torch 2.15
                self.processes = getattr(self.batches, "_workers", [])
                WORKERS.update(self.processes)
                # Register this last, so that it runs first at exit: torch would wait 5 s for each
                # worker, and multiprocessing would wait forever.
                atexit.unregister(kill)
                atexit.register(kill, WORKERS)
        except Exception as error:
            if self.processes:
                raise self._lost(error) from None
            # There is not enough memory, or the split cannot be pickled.
            kind = TrainingError if isinstance(error, OSError) else UserError
            raise kind(
                f"The loader's workers could not be started: {cause(error)}.\n{FEWER}"
            ) from error
        if self.processes:
            # Set only now, because starting workers can take seconds.
            self.batches._timeout = POLL  # private: as above

    def _take(self) -> Any:
        """Return the next batch or END; raise TrainingError if a worker dies or is too slow."""
        limit = time.monotonic() + (self.timeout or math.inf)
        while True:
            try:
                return next(self.batches, END)
            except Exception as error:
                # Unless the batch is late, a worker died or could not transfer the batch: there
                # were too many open files, or too little shared memory.
                if not is_late(error) or time.monotonic() >= limit:
                    raise self._lost(error) from None

    def _lost(self, error: Exception | None) -> TrainingError:
        """Stop all workers, and return the error that says why no batch arrived."""
        codes = [worker.exitcode for worker in self.processes]  # None if still running
        readings = list(map(self.reader.reading_of, range(len(codes))))
        kill(self.processes)
        for code, reading in zip(codes, readings, strict=True):
            if code is not None:
                end = f"exited with code {code}"
                if code < 0:
                    end = f"was killed by {signal.Signals(-code).name}"
                return TrainingError(f"A loader worker {end}{reading}.\n{FEWER}")
        if error is not None and not is_late(error):
            return TrainingError(
                f"The loader's workers could not transfer a batch of {self.reader.where}: "
                f"{cause(error)}.\n{FEWER}"
            )
        return TrainingError(
            f"dataset.timeout={self.timeout:g}: no batch arrived within {self.timeout:g} "
            f"seconds{next(filter(None, readings), '')}.\n"
            "If reading can take this long, set a higher dataset.timeout (0: no limit)."
        )

    def close(self) -> None:
        """Stop the workers."""
        # The DataLoader stops its own workers unless one hangs.
        self.loader = None
        self.batches = None
        kill(self.processes)
        self.processes = []


def is_late(error: Exception | None) -> bool:
    """Return whether this is a DataLoader's error for a batch that did not arrive in time."""
    return str(error).startswith("DataLoader timed out")


class Reader(torch.utils.data.Dataset[Any]):
    """Reads one batch, given as (epoch, indices), in a worker or in this process.

    Errors are returned, because a raised exception would arrive wrapped in a traceback. The random
    numbers that your own split draws while reading depend only on the `stream` (seed, name of the
    split), the epoch and the batch's first index.
    """

    def __init__(
        self,
        split: Any,
        where: str,
        workers: int = 0,
        stream: tuple[Any, ...] = (),
    ) -> None:
        self.split = split
        self.transforms: PerSample | None = None  # for a training split that has any
        self.where = where
        self.stream = stream
        # For each worker, the first sample of the batch it is reading, or -1.
        self.reading = torch.full((workers,), -1)
        if workers > 0:
            self.reading.share_memory_()

    def first(self) -> Any:
        """Read the first sample as a batch; raise the error if it cannot be read."""
        batch = self[0, [0]]
        if isinstance(batch, (UserError, TrainingError)):
            raise batch
        return batch

    def __getitem__(self, place: Place) -> Any:
        epoch, indices = place
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            self.reading[worker.id] = indices[0]
        try:
            batch = self._read(epoch, indices)
        except UserError as error:
            return error
        except (Exception, SystemExit) as error:
            return self._failure(error, epoch, indices)
        if worker is not None:
            self.reading[worker.id] = -1
        return batch

    def _read(self, epoch: int, indices: list[int]) -> Any:
        context: AbstractContextManager[None] = contextlib.nullcontext()
        # Reading the built-in splits draws no random numbers.
        if type(self.split) not in (TensorSplit, ImageSplit):
            parts = ("read", *self.stream, epoch, indices[0])
            context = random_stream(*parts)
            seed_own(self.split, mix_seed("split", *parts))
            seed_own(whole_of(getattr(self.split, "dataset", None)), mix_seed(*parts))
        with context:
            if self.transforms is None:
                return self.split[indices]
            return self.transforms.read(self.split, epoch, indices)

    def _failure(self, error: BaseException, epoch: int, indices: list[int]) -> Exception:
        """Return an error that names the first of these samples that also fails on its own."""
        for index in indices:
            try:
                self._read(epoch, [index])
            except UserError as alone:
                return alone
            except (Exception, SystemExit) as alone:
                return TrainingError(
                    f"Sample {self._name(index)} of {self.where} cannot be read: {cause(alone)}."
                )
        name = self._name(indices[0])
        return TrainingError(
            f"{len(indices)} samples of {self.where}, starting at {name}, cannot be read: "
            f"{cause(error)}.\n"
            "If their shapes differ, give the data set a collate_fn(samples) that returns a batch."
        )

    def reading_of(self, worker: int) -> str:
        """Return a phrase that says what a worker is reading; "" if nothing."""
        first = int(self.reading[worker])
        if first < 0:
            return ""
        return f" while reading {self.where}, starting at sample {self._name(first)}"

    def _name(self, index: int) -> str:
        """Return the sample's index, with its file if it has one."""
        files = getattr(self.split, "files", None)
        return str(index) if files is None else f"{index} ({printable(files[index])})"


def begin_worker(_: int, parent: int) -> None:
    """Make a worker ignore stop signals: the training process handles them, finishes its step and
    then stops the workers.

    If the parent dies, the worker exits within two seconds, whatever it is doing.
    """
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # With fork, use the pid that the parent passed, because the parent may already be dead. With
    # other start methods, the worker's parent may be a server, which dies with the training
    # process.
    if multiprocessing.get_start_method() != "fork":
        parent = os.getppid()
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # Otherwise, if the parent exits while it receives a batch, a multiprocessing thread prints a
    # traceback.
    sys.excepthook = lambda *_: None


def end_with_parent(parent: int) -> None:
    """Wait until the parent dies, then exit."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def kill(workers: Iterable[BaseProcess]) -> None:
    """Send SIGKILL to processes, because they may hang and ignore other signals."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(5)


@contextlib.contextmanager
def stops_wait() -> Iterator[None]:
    """Block SIGINT and SIGTERM while processes start, until `begin_worker` ignores them."""
    # A fork server would pass the signal mask on to other processes.
    is_server = multiprocessing.get_start_method() == "forkserver"
    if is_server or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
