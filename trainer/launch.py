"""The processes of a distributed run: their ranks, and the store they communicate through.

torchrun starts the processes and provides the store. This module imports torch only when the store
is used.
"""

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stoker.trainer import stopping
from stoker.trainer.errors import TrainingError, first_line, log

if TYPE_CHECKING:
    from torch.distributed import Store

SEVERAL = ("ddp", "fsdp")  # strategies with several processes

# Holds a `store` for each thread, because a thread that waits for the store blocks its connection.
connections = threading.local()
waits = itertools.count()  # numbers the calls to `wait_for_ranks`
timeout: float = 300  # seconds to wait for another rank


class LostContact(TrainingError):
    """Another rank has exited or does not respond. The actual error occurred on that rank."""


def rank() -> int:
    """Return the rank of this process, which is 0 if there is only one."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of processes that train together, on all machines."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_rank() -> int:
    """Return the rank of this process within its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """Return the number of processes that train together on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cores() -> int:
    """Return the number of CPU cores that this process can use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_first() -> bool:
    """Return whether this is rank 0, the process that prints and writes files."""
    return rank() == 0


def warn(text: str) -> None:
    """Log a warning on rank 0 only."""
    if is_first():
        log.warning(text)


def store() -> "Store":
    """Return the store that all ranks share, limited to entries since the last restart."""
    from torch.distributed import PrefixStore

    # Without this prefix, gloo tries addresses from before the restart, and most restarts fail.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt{attempt}", whole_store())


def whole_store() -> "Store":
    """Return the store that torchrun or rank 0 hosts, with the entries from all restarts.

    Raises:
        LostContact: Rank 0 cannot be reached.
    """
    if not hasattr(connections, "store"):
        connections.store = connect()
    shared: Store = connections.store
    return shared


def connect() -> "Store":
    """Connect to the store. A signal can interrupt the wait for rank 0 to start."""
    from torch.distributed import TCPStore

    address = os.environ.get("MASTER_ADDR", "localhost")
    port = int(os.environ.get("MASTER_PORT", 29500))
    is_host = is_first() and not store_is_torchruns()
    try:
        if not is_host:
            wait_for_port(address, port)  # TCPStore would ignore signals while it waits
        return TCPStore(
            address,
            port,
            is_master=is_host,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=timeout),
        )
    except (OSError, RuntimeError) as error:
        raise LostContact(
            f"rank 0 at {address}:{port} cannot be reached ({first_line(error)})."
        ) from None


def wait_for_port(address: str, port: int) -> None:
    """Wait until a process accepts connections; raise OSError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        pause()


def pause() -> None:
    """Wait 20 ms; raise Interrupted if a library has swallowed the exception of a signal."""
    if stopping.received is not None:
        raise stopping.Interrupted
    time.sleep(0.02)


def store_is_torchruns() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def publish(key: str, value: Any) -> None:
    """Put a plain value into the store for the other ranks."""
    store().set(key, json.dumps(value))


def receive(key: str, by: int = 0, limit: float | None = None) -> Any:
    """Wait until rank `by` publishes a value under this key, and return it.

    Raises:
        LostContact: The rank has exited, or has published nothing for `limit` seconds (by default,
            `timeout` seconds).
    """
    end = time.monotonic() + (timeout if limit is None else limit)
    while not store().check([key]):
        if store().check([f"end/{by}"]) and not store().check([key]):
            raise LostContact(f"rank {by} has exited.")
        if time.monotonic() > end:
            raise LostContact(f"rank {by} did not respond: timed out after {timeout:g} s.")
        pause()
    return json.loads(store().get(key))


def wait_for_ranks(name: str) -> None:
    """Wait until all ranks have called this with the same `name` as many times as this rank.

    Unlike in a collective operation, a signal can interrupt the wait.
    """
    number = next(waits)  # each call needs new keys, because keys stay in the store
    publish(f"{name}/{number}/{rank()}", True)
    for peer in range(world_size()):
        receive(f"{name}/{number}/{peer}", by=peer)


def agreed(name: str, make: Callable[[], Any], lasting: bool = False) -> Any:
    """Call `make` on rank 0, and return its result (a plain value) on all ranks.

    If `lasting` is True, the value survives a restart of the ranks by torchrun.
    """
    if world_size() == 1:
        return make()
    key = f"agreed/{name}"
    if is_first():
        if lasting and whole_store().check([key]):
            value = whole_store().get(key).decode()
        else:
            value = json.dumps(make())
        if lasting:
            whole_store().set(key, value)
        store().set(key, value)
    return receive(key)
