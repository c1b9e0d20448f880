"""The worker processes of a HostLoader: how many, how they start and end, and the error when one is
lost.
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
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import Subset

from stoker.data.images import ImageSplit
from stoker.data.splits import TensorSplit
from stoker.data.transforms import PerSample
from stoker.trainer import launch
from stoker.trainer.errors import TrainingError, UserError, cause, printable
from stoker.trainer.loading import children_do_not_interrupt
from stoker.trainer.seeding import random_stream
from stoker.trainer.stopping import SIGNALS

TIMEOUT = 300  # seconds to wait for one batch
POLL = 1.0  # seconds between two checks that the workers are alive
END = object()  # marks the end of the batches
FEWER = (
    "Type a lower dataset.workers (0: read in this process), or provide more shared memory "
    "(docker run --shm-size=8g)."
)
# Worker processes of all loaders.
WORKERS: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKERS.clear)  # only the parent ends its workers

# (epoch, indices of a batch).
Place = tuple[int, list[int]]


def choose_workers(split: Any, transforms: PerSample | None = None) -> int:
    """Choose how many processes read: one per core, up to 8; none for tensors in memory."""
    if (hasattr(split, "inputs") or hasattr(split, "tokens")) and transforms is None:
        return 0
    return max(1, min(launch.cores() // launch.local_world_size(), 8))


def whole_of(dataset: Any) -> Any:
    """Return the data set that a torch Subset is a part of; any other one itself."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


class Workers:
    """`count` processes that read batches `ahead` of the training; with 0, this process reads each
    when it is wanted.

    `timeout`: seconds to wait for a batch from them; 0: no limit.
    """

    def __init__(
        self, reader: "Reader", count: int, *, timeout: float, ahead: int, pin_memory: bool
    ) -> None:
        self.reader = reader
        self.timeout = timeout
        self.plan: list[Place] = []  # the sampler: the batches that are still to be read
        self.loader: Any = torch.utils.data.DataLoader(
            reader,
            batch_size=None,  # each index is already a whole batch, so nothing is collated
            sampler=self.plan,
            num_workers=count,
            pin_memory=pin_memory,
            persistent_workers=count > 0,
            prefetch_factor=max(1, min(ahead, 4)) if count else None,  # batches
            # Its own generator, or each epoch would draw from the global one.
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=functools.partial(begin_worker, parent=os.getpid()),
        )
        self.batches: Any = None  # the loader's iterator
        self.processes: list[BaseProcess] = []  # set at the first batch

    def read(self, plan: list[Place]) -> Iterator[Any]:
        """Yield the batches of the plan; the processes live on for the next one."""
        self._start(plan)
        for _ in plan:
            batch = self._take()
            if isinstance(batch, (UserError, TrainingError)):
                try:
                    raise batch
                finally:
                    # It would keep itself alive through this frame, and the workers would only end
                    # at garbage collection.
                    del batch
            yield batch

    def _start(self, plan: list[Place]) -> None:
        """Begin to read the plan; the workers are started with the first one."""
        if self.processes:
            # Batches begun before a seek are awaited and dropped.
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
                # Recorded here, or a pending signal could arrive before the processes to end are
                # known. private: _workers, the processes of an iterator, torch 2.15
                self.processes = getattr(self.batches, "_workers", [])
                WORKERS.update(self.processes)
                # To be the first at exit: torch waits 5 s for each, and multiprocessing forever.
                atexit.unregister(kill_all)
                atexit.register(kill_all)
        except Exception as error:
            if self.processes:
                raise self._lost(error) from None
            # Not enough memory, or a split that cannot be pickled.
            kind = TrainingError if isinstance(error, OSError) else UserError
            raise kind(
                f"The loader's workers could not be started: {cause(error)}.\n{FEWER}"
            ) from error
        if self.processes:
            # Set only now, since starting workers may take seconds.
            self.batches._timeout = POLL  # private: as above

    def _take(self) -> Any:
        """Return the next batch or END; TrainingError if a worker is lost or all are too slow."""
        limit = time.monotonic() + (self.timeout or math.inf)
        while True:
            try:
                return next(self.batches, END)
            except RuntimeError as error:
                if not is_late(error) or time.monotonic() >= limit:
                    raise self._lost(error) from None
            # passing a batch failed: too many open files, no shared memory
            except Exception as error:
                raise self._lost(error) from None

    def _lost(self, error: Exception | None) -> TrainingError:
        """End all workers, and return the error for why they give no batch."""
        codes = [worker.exitcode for worker in self.processes]  # None while it runs
        readings = [self.reader.reading_of(number) for number in range(len(codes))]
        kill(self.processes)
        for code, reading in zip(codes, readings, strict=True):
            if code is not None:
                end = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                return TrainingError(
                    f"A worker of the loader was ended by {end}{reading}.\n{FEWER}"
                )
        if error is not None and not is_late(error):
            return TrainingError(
                f"The loader's workers could not transfer {self.reader.part}: {cause(error)}.\n"
                f"{FEWER}"
            )
        return TrainingError(
            f"dataset.timeout={self.timeout:g}: no batch arrived within {self.timeout:g} "
            f"seconds{next(filter(None, readings), '')}.\n"
            "If reading can take this long, type a higher dataset.timeout (0: no limit)."
        )

    def close(self) -> None:
        """End the workers."""
        # The DataLoader stops its workers, unless one hangs.
        self.loader = None
        self.batches = None
        kill(self.processes)
        self.processes = []


def is_late(error: Exception | None) -> bool:
    """Tell whether an error of a DataLoader says that no batch arrived within its timeout."""
    return str(error).startswith("DataLoader timed out")


class Reader(torch.utils.data.Dataset[Any]):
    """Reads the batch of (epoch, indices), in a worker or not; returns an error as a value.

    As an exception it would arrive inside a traceback. What your own split draws as it reads is a
    function of the `stream`, (seed, name of the part), of the epoch, and of the first index: so of
    which batch it is.
    """

    def __init__(
        self,
        split: Any,
        part: str,
        workers: int,
        stream: tuple[Any, ...] = (),
        transforms: PerSample | None = None,
    ) -> None:
        self.split = split
        self.transforms = transforms
        self.part = part
        self.stream: tuple[Any, ...] | None = stream
        if type(split) in (TensorSplit, ImageSplit):
            self.stream = None  # other operations draw no random numbers
        # For each worker: the first sample of the batch that it is reading, or -1.
        self.reading = torch.full((workers,), -1)
        if workers > 0:
            self.reading.share_memory_()

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
        if self.stream is None:
            return self._transformed(epoch, indices)
        with random_stream("read", *self.stream, epoch, indices[0]):
            return self._transformed(epoch, indices)

    def _transformed(self, epoch: int, indices: list[int]) -> Any:
        if self.transforms is None:
            return self.split[indices]
        return self.transforms.read(self.split, epoch, indices)

    def _failure(self, error: BaseException, epoch: int, indices: list[int]) -> Exception:
        """Return the error for these samples; it names the first one that fails on its own, too."""
        for index in indices:
            try:
                self._read(epoch, [index])
            except UserError as alone:
                return alone
            except (Exception, SystemExit) as alone:
                return TrainingError(
                    f"Sample {self._name(index)} of {self.part} cannot be read: {cause(alone)}."
                )
        name = self._name(indices[0])
        return TrainingError(
            f"{len(indices)} samples of {self.part}, from {name} on, cannot be read: "
            f"{cause(error)}."
        )

    def reading_of(self, worker: int) -> str:
        """Return a phrase on what a worker is reading; "" if it reads nothing."""
        first = int(self.reading[worker])
        return (
            f" while it read {self.part} from sample {self._name(first)} on" if first >= 0 else ""
        )

    def _name(self, index: int) -> str:
        """Return the sample's number, and its file if it has one."""
        files = getattr(self.split, "files", None)
        return str(index) if files is None else f"{index} ({printable(files[index])})"


def begin_worker(_: int, parent: int) -> None:
    """Prepare a worker: only the training ends it, which finishes its step first when it is told to
    stop.

    A worker ends by itself within a second or two of its parent's death, whatever it is doing.
    """
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # The parent may have died before the fork could ask for it. With other start methods the parent
    # is a server, which dies with it.
    if multiprocessing.get_start_method() != "fork":
        parent = os.getppid()
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # With it, a multiprocessing thread would print a traceback if the parent ends while receiving a
    # batch.
    sys.excepthook = lambda *_: None


def end_with_parent(parent: int) -> None:
    """Wait for the parent's death, and end this process."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def kill_all() -> None:
    """End the workers of all loaders."""
    kill(list(WORKERS))


def kill(workers: Iterable[BaseProcess]) -> None:
    """End processes, which may hang and ignore any other signal."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(5)


@contextlib.contextmanager
def stops_wait() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from processes that are started within, until `begin_worker` has them
    ignored.
    """
    # A fork server would pass the mask on to other processes.
    is_server = multiprocessing.get_start_method() == "forkserver"
    if is_server or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
