"""The processes that read for a HostLoader: how many, their start and end, and what is said when one is lost."""

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

import torch
from stoker.data.images import ImageSplit
from stoker.data.splits import TensorSplit
from stoker.trainer import launch
from stoker.trainer.device import MIB, random_stream
from stoker.trainer.errors import TrainingError, UserError, cause, printable
from stoker.trainer.loading import children_do_not_interrupt
from stoker.trainer.stopping import SIGNALS

# What it costs to take a batch from a worker: 1.4 ms of 64 or 256 x 3 x 32 x 32 bytes, and of this process's own time
# 0.06 ms for each MiB (2.6 ms of 37 MiB). Two workers that only copy, 2 cores of an Intel Xeon at 2.6 GHz, median of 3.
HANDOVER, HANDOVER_MIB = 1.4e-3, 0.06e-3
POLL = 1.0  # seconds after which it is looked whether the workers still live
END = object()  # what comes after the last batch
WORKERS = weakref.WeakSet()  # the processes of all loaders
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKERS.clear)  # they are the parent's to end


def choose_workers(split, batch_size):
    """How many processes should read: none where a batch is read faster than it is handed over, else one a core to 8.

    Only image files are tried out: reading a split of the user's might draw random numbers, or open what cannot be
    shared with workers.
    """
    if hasattr(split, "inputs"):
        return 0
    if hasattr(split, "missing"):
        handover = HANDOVER + HANDOVER_MIB * batch_size * split.nbytes / len(split) / MIB
        if batch_size * sample_seconds(split) < handover:
            return 0
    return max(1, min(launch.cores() // launch.local_world_size(), 8))


def sample_seconds(split):
    """Seconds that this process takes to read an image that is still to be decoded, or else any one."""
    indices = split.missing() if len(split.missing()) else torch.arange(len(split))
    indices = indices[:: max(1, len(indices) // 1000)].tolist()
    split[indices[:1]]  # what is imported and opened at the first
    indices, start = indices[1:] or indices, time.perf_counter()
    for count in (1, 4, 16, 64, 256):
        before, (chosen, indices) = time.perf_counter(), (indices[:count], indices[count:])
        split[chosen]
        after = time.perf_counter()
        if after - start > 0.02 or not indices:
            break
    return (after - before) / len(chosen)  # of the largest batch, whose time is the surest


def decode_seconds(split):
    """Seconds that it takes to decode what is not in the split's cache yet; 0 for what needs no decoding."""
    missing = len(split.missing()) if hasattr(split, "missing") else 0
    return missing * sample_seconds(split) / split.threads if missing else 0.0


class Workers:
    """So many processes that read batches `ahead` of the training; 0: this process reads each when it is wanted.

    `timeout`: seconds to wait for a batch from them; 0: no limit.
    """

    def __init__(self, reader, count, *, timeout, ahead, pin_memory):
        self.reader, self.timeout, self.plan = reader, timeout, Plan()
        self.loader = torch.utils.data.DataLoader(
            self.reader,
            batch_size=None,  # an index of the plan is a whole batch already, so that nothing is collated
            sampler=self.plan,
            num_workers=count,
            pin_memory=pin_memory,
            persistent_workers=count > 0,
            prefetch_factor=max(1, min(ahead, 4)) if count else None,  # batches
            generator=torch.Generator().manual_seed(
                0
            ),  # its own, or each epoch would draw from the global one
            worker_init_fn=functools.partial(begin_worker, parent=os.getpid()),
        )
        self.processes = []  # from the first batch on

    def read(self, plan):
        """Yields the batches of the plan, a list of (epoch, indices); the processes live on for the next one."""
        batches = self.start(plan)
        for _ in range(len(plan)):
            batch = self.take(batches)
            if isinstance(batch, (UserError, TrainingError)):
                try:
                    raise batch
                finally:
                    del batch  # or it would hold itself, by this frame, and leave the workers' end to the collector
            yield batch

    def start(self, plan):
        """An iterator over the batches of the plan; the workers are started with the first one."""
        if self.processes:
            self.plan.batches.clear()  # what the workers had begun before a seek is waited for, and dropped
            while self.take(self.loader._iterator) is not END:
                pass
            if not all(worker.is_alive() for worker in self.processes):
                raise self.lost(None)
            self.loader._iterator._timeout = 0
        self.plan.batches = plan
        try:
            with children_do_not_interrupt(), stops_wait():
                batches = iter(self.loader)
                # Here, or a signal that has waited would come before anybody knows of the processes to be ended.
                self.processes = getattr(batches, "_workers", [])
                self.end_with_this_process()
        except Exception as error:
            if self.processes:
                raise self.lost(error) from None
            kind = (
                TrainingError if isinstance(error, OSError) else UserError
            )  # too little memory, or not to be pickled
            raise kind(
                f"dataset.workers={self.loader.num_workers}: the workers could not be started, {cause(error)}.\n"
                "Type dataset.workers=0 to have the samples read by this process."
            ) from error
        if self.processes:
            batches._timeout = POLL
        return batches

    def end_with_this_process(self):
        """Has the processes killed at exit, before torch, which waits 5 s for each, and multiprocessing, for ever."""
        WORKERS.update(self.processes)
        atexit.unregister(kill_all)
        atexit.register(kill_all)

    def take(self, batches):
        """The next batch of the iterator or END; TrainingError where a worker is lost or all are too slow."""
        start = time.monotonic()
        while True:
            try:
                return next(batches, END)
            except RuntimeError as error:
                late = str(error).startswith("DataLoader timed out")
                if late and time.monotonic() - start < (self.timeout or math.inf):
                    continue
                raise self.lost(error) from None
            except Exception as error:  # of the hand-over: too many open files, no shared memory
                raise self.lost(error) from None

    def lost(self, error):
        """The TrainingError for workers that give no batch; it ends all of them."""
        dead = [number for number, worker in enumerate(self.processes) if not worker.is_alive()]
        codes = [self.processes[number].exitcode for number in dead]
        readings = [self.reader.reading_of(number) for number in dead or range(len(self.processes))]
        pids = [worker.pid for worker in self.processes]
        kill(self.processes)
        if dead:
            code, hint = (
                codes[0],
                "Type dataset.workers=0 to have the samples read by this process.",
            )
            end = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            if end.endswith("SIGKILL"):
                hint = f"Type a lower dataset.workers than {len(pids)} if too little memory was the reason."
            elif end.endswith("SIGBUS"):
                hint = (
                    "Give more shared memory (docker run --shm-size=8g), or type dataset.workers=0."
                )
            what = f" while it read {readings[0]}" if readings[0] else ""
            return TrainingError(f"The loader's worker {pids[dead[0]]} {end}{what}.\n{hint}")
        if not str(error).startswith("DataLoader timed out"):
            return TrainingError(
                f"The loader's workers could not hand over {self.reader.part}: {cause(error)}.\n"
                f"Type a lower dataset.workers than {len(pids)}, or 0."
            )
        busy = [
            f"; worker {pid} is reading {what}"
            for pid, what in zip(pids, readings, strict=True)
            if what
        ]
        return TrainingError(
            f"dataset.timeout={self.timeout:g}: no batch came within so many seconds{busy[0] if busy else ''}.\n"
            "Type a higher dataset.timeout if that may take so long (0: no limit)."
        )

    def close(self):
        self.loader = self.reader = None  # the DataLoader ends its workers, if none hangs
        kill(self.processes)
        self.processes = []


class Plan:
    """The sampler of a HostLoader: the batches still to read, set anew each epoch, so that the workers can live on."""

    batches = ()

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class Reader(torch.utils.data.Dataset):
    """Reads the batch of (epoch, indices), in a worker or not; gives an error as a value.

    As an exception it would arrive inside a traceback. What a split of the user's draws as it reads is a function of
    the `stream`, (seed, name of the part), the epoch and the first of the indices, so of which batch it is.
    """

    def __init__(self, split, part, workers, stream=()):
        self.split, self.part = split, part
        self.stream = (
            None if type(split) in (TensorSplit, ImageSplit) else stream
        )  # those draw nothing
        # Of each worker: how many samples it is reading, and the first three of them.
        self.reading = (
            torch.zeros(workers, 4, dtype=torch.int64).share_memory_() if workers else None
        )

    def __getitem__(self, place):
        epoch, indices = place
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            first = indices[:3]
            self.reading[worker.id, : 1 + len(first)] = torch.tensor([len(indices), *first])
        try:
            batch = self.read(epoch, indices)
        except UserError as error:
            return error
        except (Exception, SystemExit) as error:
            return self.failure(error, epoch, indices)
        if worker is not None:
            self.reading[worker.id, 0] = 0
        return batch

    def read(self, epoch, indices):
        if self.stream is None:
            return self.split[indices]
        with random_stream("read", *self.stream, epoch, indices[0]):
            return self.split[indices]

    def failure(self, error, epoch, indices):
        """The TrainingError for what happened as these samples were read; it names the first that fails alone, too."""
        for index in indices:
            try:
                self.read(epoch, [index])
            except UserError as alone:
                return alone
            except (Exception, SystemExit) as alone:
                return TrainingError(
                    f"Sample {self.name(index)} of {self.part} cannot be read: {cause(alone)}."
                )
        names = ", ".join(map(self.name, indices[:3])) + ", ..." * (len(indices) > 3)
        return TrainingError(f"Samples {names} of {self.part} cannot be read: {cause(error)}.")

    def reading_of(self, worker):
        """What the worker is reading, for people; '' where that is nothing."""
        count, *first = self.reading[worker].tolist()
        names = ", ".join(map(self.name, first[:count])) + ", ..." * (count > 3)
        return f"{count} samples of {self.part} ({names})" if count else ""

    def name(self, index):
        """The sample's number, and its file where it has one."""
        files = getattr(self.split, "files", None)
        return str(index) if files is None else f"{index} ({printable(files[index])})"


def begin_worker(_, parent):
    """In a worker: only the training ends it, which finishes its step first when a terminal or a scheduler says stop.

    It ends by itself within a second or two of its parent's death, whatever it is doing.
    """
    for stop in SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # A fork's parent may have died before it could be asked for; of other kinds it is a server that dies with it.
    parent = parent if multiprocessing.get_start_method() == "fork" else os.getppid()
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    # A thread of multiprocessing's shows a traceback by it when the parent ends in the middle of a hand-over.
    sys.excepthook = lambda *_: None


def end_with_parent(parent):
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def kill_all():
    kill(list(WORKERS))


def kill(workers):
    """Ends the processes that are still there, which may hang and ignore any other signal."""
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(5)


@contextlib.contextmanager
def stops_wait():
    """Processes that are started within get no SIGINT and SIGTERM before `begin_worker` has them ignored."""
    # A fork server would hand the mask on to other processes than ours.
    masks = (
        hasattr(signal, "pthread_sigmask") and multiprocessing.get_start_method() != "forkserver"
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if masks else None
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
