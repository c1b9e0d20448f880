"""What the processes of one run owe each other: the same code, and one message for each fault.

They are torchrun's, or those that `stoker.command.processes` has started.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stoker.command import signals
from stoker.trainer import launch, stopping
from stoker.trainer.errors import UserError, first_few
from stoker.trainer.launch import (
    TIMEOUT,
    LostContact,
    agreed,
    is_first,
    local_rank,
    publish,
    rank,
    receive,
    store,
    world_size,
)

ANSWER = 5  # seconds within which other ranks have to report why they end
SAME = 2  # seconds within which rank 0 hits the same error as another rank, if it does
# Seconds after a signal (plus ANSWER) until a process ends if its peers stop responding.
LATE = 3
# Seconds after which a process that has not handled a signal ends. torchrun kills it after 30.
BLOCKED = 25
# How gloo, NCCL and the store report that a peer is gone or does not respond.
CONTACT = re.compile(
    r"gloo|NCCL|nccl|TCPStore|ProcessGroup"
    r"|[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure"
)

joined: bool = False  # whether this process has announced itself in the store
reported: bool = False  # whether this process has announced why it ends


def quieten() -> None:
    """Silence ranks above 0, except for errors, and torch's messages about connections on all."""
    if world_size() == 1:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not is_first():
        import warnings

        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        warnings.simplefilter("ignore")


def join() -> None:
    """Announce this rank to the others, and watch for signals that it cannot handle."""
    global joined
    if joined or world_size() == 1:
        return
    store().set(f"who/{rank()}", f"process {os.getpid()} on {platform.node()}")
    joined = True
    watch_signals()


@contextlib.contextmanager
def one_first(name: str) -> Iterator[None]:
    """Let one process per machine run the block first, while its other processes wait."""
    leader = rank() - local_rank()
    if local_rank():
        receive(f"{name}/{leader}", by=leader, limit=math.inf)
    yield
    if world_size() > 1 and not local_rank():
        publish(f"{name}/{rank()}", True)


def check_alike(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that all ranks have the same `parts`: {kind: {name: value}}, such as code and config.

    Ranks that differ would train together silently. UserError on all ranks where one differs.
    """
    if world_size() == 1:
        return
    kinds = "/".join(parts)
    digests = {
        kind: {name: digest(value) for name, value in items.items()}
        for kind, items in parts.items()
    }
    join()
    publish(f"parts/{kinds}/{rank()}", digests)
    verdict = agreed(f"alike/{kinds}", lambda: first_difference(kinds, digests))
    if verdict is not None:
        raise UserError(verdict)


def first_difference(kinds: str, digests: dict[str, dict[str, str]]) -> str | None:
    """Return the message about the first rank whose parts differ from this rank's, or None."""
    for peer in range(world_size()):
        theirs = receive(f"parts/{kinds}/{peer}", by=peer)
        for kind, items in digests.items():
            names = sorted({*items, *theirs[kind]})
            names = [name for name in names if items.get(name) != theirs[kind].get(name)]
            if names:
                return (
                    f"rank {peer} ({who(peer)}) and rank 0 differ in their {kind}: "
                    f"{first_few(names, 3)}.\n"
                    "All processes need the same code, versions, config and data."
                )
    return None


def digest(value: Any) -> str:
    """Return a short SHA-256 of bytes or of a plain value."""
    if not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(value).hexdigest()[:16]


# Signals. Python does not run its handlers while a rank waits inside a library.


def watch_signals() -> None:
    """Start a thread that ends this process if it does not handle a signal itself."""
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    try:
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread: the host program handles signals
        return
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
    threading.Thread(target=guard, args=(receiver, sender, os.getppid()), daemon=True).start()


def guard(receiver: socket.socket, sender: socket.socket, parent: int) -> None:
    """End this process if a signal is not handled in time, or if the process's parent is gone.

    `sender` is an argument so that the thread keeps it open.
    """
    receiver.settimeout(2)
    while True:
        try:
            number = receiver.recv(1)[0]
        except TimeoutError:
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)
            continue
        if number in stopping.SIGNALS:
            wait_for_handler(number)


def wait_for_handler(number: int) -> None:
    """Give the main thread time to handle this signal; end the process if it does not."""
    start = time.monotonic()
    time.sleep(1)
    with contextlib.suppress(RuntimeError):
        if stopping.received is None:
            # so that the others do not wait for a report
            publish(f"end/{rank()}", {"kind": "signal"})
        time.sleep(LATE - 1)
        text, code = consequence("signal", None, None)
        if code is not None:
            if text and not reported:
                os.write(2, f"{text}\n".encode())
            os._exit(code)
    time.sleep(max(0, start + BLOCKED - time.monotonic()))
    exception_was_lost = stopping.gentle is None and not reported
    if stopping.received is None or exception_was_lost:
        os._exit(128 + number)


# How a rank ends: one rank prints one message per fault.


def is_lost(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is that another rank is gone or does not respond."""
    while error is not None:
        if isinstance(error, LostContact):
            return True
        if isinstance(error, RuntimeError) and CONTACT.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def settle_end(kind: str, message: str | None, code: int | None) -> tuple[str | None, int | None]:
    """Return (what this rank prints before it ends, or None; its exit code).

    `kind` is "error" for this rank's own error, "lost" if contact with another rank was lost, or
    "signal". Ranks agree through the store, so that each fault is printed once.
    """
    global reported
    stopping.gentle = lambda name: None  # ending ranks send signals to the others
    if not joined:  # this early, all ranks usually have the same error
        if is_first():
            return message, code
        return (None if signal_comes(2 * ANSWER) else by_rank(message)), code
    reported = True
    try:
        publish(f"end/{rank()}", {"kind": kind, "message": message, "code": code})
        if kind == "error":
            return own_error(message, code)
        return consequence(kind, message, code)
    except RuntimeError:  # the store is gone, so rank 0 or torchrun is gone too
        return (None if kind == "signal" else by_rank(message)), code


def signal_comes(limit: float) -> bool:
    """Wait at most `limit` seconds for a signal; return whether one came."""
    end = time.monotonic() + limit
    while stopping.received is None and time.monotonic() < end:
        time.sleep(0.05)
    return stopping.received is not None


def by_rank(message: str | None) -> str | None:
    """Put this rank in front of an error message."""
    if message is None:
        return None
    if "error: " in message:
        return message.replace("error: ", f"error: rank {rank()}: ", 1)
    return f"rank {rank()}:\n{message}"


def own_error(message: str | None, code: int | None) -> tuple[str | None, int | None]:
    """Return what this rank prints about its own error, and its exit code."""
    if not is_first():
        wait_for_ends([0], SAME)
        if end_of(0).get("message") == message:
            return None, code
    store().compare_set("first", "", str(code))
    if store().add(f"said/{digest(message)}", 1) > 1:
        return None, code
    return (message if is_first() else by_rank(message)), code


def consequence(kind: str, message: str | None, code: int | None) -> tuple[str | None, int | None]:
    """Return what this rank prints after a signal or a lost contact, and its exit code.

    Unless some rank has reported an error of its own, that names the ranks that do not respond.
    """
    present = wait_for_ends(range(world_size()), ANSWER)
    first_code = store().compare_set("first", "", "").decode()
    if first_code:
        return None, int(first_code)
    absent = [peer for peer in range(world_size()) if peer not in present]
    dead = [peer for peer in absent if has_ended(peer)]
    lost = [peer for peer in present if end_of(peer).get("kind") == "lost"]
    if absent and (dead or lost):
        speaks = rank() == min(present, default=None)
        hangs = not dead and TIMEOUT.search(message or "") is not None
        return (missing_ranks(dead or absent, hangs) if speaks else None), 3
    if lost:
        return (by_rank(message) if rank() == min(lost) else None), 3
    return (message if is_first() else None), code


def missing_ranks(ranks: list[int], hangs: bool) -> str:
    """Return the message that names the ranks that are gone, or do not respond."""
    names = " and ".join(f"rank {peer} ({who(peer)})" for peer in ranks[:3])
    fate = "is gone: it was killed"
    if hangs:
        fate = f"did not respond for {launch.timeout:g} s while the others waited"
    advice = "Type the same command again."
    if signals.resume_command:
        advice = f"To resume from the last checkpoint:\n{signals.resume_command}"
    return f"error: {names} {fate}.\n{advice}"


def wait_for_ends(peers: Iterable[int], limit: float, key: str = "end") -> list[int]:
    """Wait at most `limit` seconds for the reports of these ranks; return the ranks that did.

    Killed ranks never report: the wait ends when they are the only ones left.
    """
    peers = list(peers)
    end = time.monotonic() + limit
    while True:
        present = [peer for peer in peers if store().check([f"{key}/{peer}"])]
        if time.monotonic() > end:
            return present
        if all(peer in present or has_ended(peer) for peer in peers):
            return present
        time.sleep(0.1)


def end_of(peer: int) -> dict[str, Any]:
    """Return the {"kind", "message", "code"} that a rank has reported; {} if it has not."""
    key = f"end/{peer}"
    if not store().check([key]):
        return {}
    report: dict[str, Any] = json.loads(store().get(key))
    return report


def who(peer: int) -> str:
    """Return "process 123 on host" for another rank."""
    key = f"who/{peer}"
    return store().get(key).decode() if store().check([key]) else "which never came"


def has_ended(peer: int) -> bool:
    """Return whether another rank ran on this machine and its process is gone."""
    process = re.fullmatch(r"process (\d+) on (.*)", who(peer))
    if process is None or process[2] != platform.node() or os.name != "posix":
        return False
    try:
        os.kill(int(process[1]), 0)
    except OSError as error:  # it may be another user's
        return isinstance(error, ProcessLookupError)
    return False


def end(code: int | str | None) -> None:
    """End the process with this exit code.

    A failed rank skips the interpreter's shutdown, in which libraries may wait for other ranks.
    """
    if joined and code:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # private: atexit._run_exitfuncs, os._exit skips them, Python 3.14
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def leave() -> None:
    """Report that this rank is done, unless it has reported its end; rank 0 waits for the others.

    The others still need the store that rank 0 hosts.
    """
    if not joined:
        return
    with contextlib.suppress(RuntimeError):
        if not reported:
            publish(f"end/{rank()}", {"kind": "done"})
        publish(f"left/{rank()}", True)
        if is_first() and not launch.store_is_torchruns():
            wait_for_ends(range(world_size()), ANSWER, "left")
