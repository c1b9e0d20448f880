"""Keep the processes of a run in agreement: the same code on all ranks, one message per error.

The processes were started by torchrun or by `stoker.command.processes`.
"""

import atexit
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.command import signals
from stoker.trainer import launch, stopping
from stoker.trainer.errors import UserError
from stoker.trainer.launch import (
    is_first,
    local_rank,
    publish,
    rank,
    receive,
    store,
    world_size,
)

ANSWER = 5  # seconds to wait for the other ranks to report why they are ending

joined: bool = False  # whether this process has announced itself in the store
reported: bool = False  # whether this process has announced why it is ending


def quieten() -> None:
    """Silence ranks above 0 except for errors; silence torch's connection messages on all ranks."""
    if world_size() == 1:
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not is_first():
        import warnings

        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        warnings.simplefilter("ignore")


def join() -> None:
    """Announce this rank to the other ranks, and end this process once torchrun is gone."""
    global joined
    if joined or world_size() == 1:
        return
    joined = True
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def one_first() -> Iterator[None]:
    """Let one process per machine run the block first, while the other processes wait."""
    leader = rank() - local_rank()
    if local_rank():
        receive(f"first/{leader}", by=leader, limit=math.inf)
    yield
    if world_size() > 1 and not local_rank():
        publish(f"first/{rank()}", True)


def check_alike(parts: Mapping[str, Any]) -> None:
    """Raise UserError on every rank unless all ranks have the same `parts`.

    `parts` has the form {kind: value}, with kinds such as code and config. Without this check,
    ranks that differ would train together unnoticed.
    """
    if world_size() == 1:
        return
    join()
    kinds = "/".join(parts)
    publish(f"parts/{kinds}/{rank()}", {kind: digest(part) for kind, part in parts.items()})
    of_first = receive(f"parts/{kinds}/0")
    for peer in range(1, world_size()):
        theirs = receive(f"parts/{kinds}/{peer}", by=peer)
        for kind in parts:
            if theirs[kind] != of_first[kind]:
                raise UserError(
                    f"rank {peer} and rank 0 have different {kind}.\n"
                    "All processes need the same code, versions, config and data."
                )


def digest(value: Any) -> str:
    """Return a short SHA-256 of bytes or of a plain value."""
    if not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(value).hexdigest()[:16]


# How a rank ends: each error is printed once, by one rank.


def settle_end(kind: str, message: str | None, code: int | None) -> tuple[str | None, int | None]:
    """Return (message, exit code) for the end of this rank; if the message is None, print nothing.

    `kind` is "error" for this rank's own error, "lost" if contact with another rank was lost, or
    "signal". The ranks agree through the store, so that each error is printed once.
    """
    global reported
    if not joined:  # this early, all ranks usually have the same error
        if not is_first():
            if kind == "signal":
                return None, code
            time.sleep(2 * ANSWER)  # torchrun ends this rank with a signal once another has ended
        return message, code
    stopping.on_signal = lambda name: None  # ignore the signals that follow when other ranks end
    reported = True
    try:
        publish(f"end/{rank()}", {"kind": kind, "code": code})
        if kind == "error":
            is_printed = store().add(f"printed/{digest(message)}", 1) > 1
            return (None if is_printed else message), code
        return consequence(kind, message, code)
    except RuntimeError:  # the store is gone, so rank 0 or torchrun is gone too
        if kind == "lost" and stopping.received is not None:
            return None, signals.exit_code()
        return (None if kind == "signal" else message), code


def consequence(kind: str, message: str | None, code: int | None) -> tuple[str | None, int | None]:
    """Return (message, exit code) for this rank after a signal or a lost connection.

    If another rank reports its own error, that rank prints it. Otherwise, the message names the
    ranks that did not report.
    """
    reports = {peer: receive(f"end/{peer}") for peer in wait_for_all("end")}
    codes = {report["kind"]: report.get("code") for report in reports.values()}
    if "error" in codes:
        return None, codes["error"]
    absent = [peer for peer in range(world_size()) if peer not in reports]
    if absent and "lost" in codes:
        advice = "Type the same command again."
        if signals.resume_command:
            advice = f"To resume from the last checkpoint:\n{signals.resume_command}"
        message = (
            f"error: no answer from ranks {absent}: they have ended, or did not respond for "
            f"{launch.timeout:g} s.\n{advice}"
        )
        return (message if rank() == min(reports) else None), 3
    if kind == "lost" and ("signal" in codes or stopping.received is not None):
        return None, codes.get("signal", signals.exit_code())  # the signal ended the others first
    # If a rank received a signal, the ranks that lost contact print nothing.
    may_print = [peer for peer in reports if kind == "lost" or reports[peer]["kind"] == kind]
    return (message if rank() == min(may_print) else None), code


def wait_for_all(key: str) -> list[int]:
    """Wait up to ANSWER seconds for all ranks to publish this key; return the ranks that have."""
    end = time.monotonic() + ANSWER
    while True:
        present = [peer for peer in range(world_size()) if store().check([f"{key}/{peer}"])]
        if len(present) == world_size() or time.monotonic() > end:
            return present
        time.sleep(0.1)


def end(code: int | str | None) -> None:
    """End the process with this exit code.

    A failed rank skips the interpreter's shutdown, where libraries may wait for other ranks.
    """
    if joined and code:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # private: atexit._run_exitfuncs, os._exit skips them, Python 3.14
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


def leave() -> None:
    """Report that this rank is done, unless it has already reported why it is ending.

    Rank 0 hosts the store, so it waits until the other ranks no longer need it.
    """
    if not joined:
        return
    with contextlib.suppress(RuntimeError):
        if not reported:
            publish(f"end/{rank()}", {"kind": "done"})
        publish(f"left/{rank()}", True)
        if is_first() and not launch.store_is_torchruns():
            wait_for_all("left")
