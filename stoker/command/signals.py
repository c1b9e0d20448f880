"""SIGINT and SIGTERM: they end the process at once, or a training run after its current step."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from stoker.trainer import stopping
from stoker.trainer.stopping import SIGNALS, Interrupted

received_at: float = 0.0  # when the first signal arrived
ready: bool = False  # whether an exception would be handled
code: int | None = None  # the exit code to use instead of the signal's
resume_command: str | None = None  # the command that continues this run, once its folder is known
told: bool = False  # whether `print_advice` was called


def listen() -> None:
    """Handle both signals from here on. One that is ignored, as by nohup, stays ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)


@contextlib.contextmanager
def heard(resume: str) -> Iterator[None]:
    """Listen within this context, in a script; `resume` is the command that continues its run."""
    global ready, received_at, resume_command, told
    if threading.current_thread() is not threading.main_thread() or ready:
        yield  # only the main thread gets signals, or the command already handles them
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    ready = True
    resume_command = resume
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        ready = False
        resume_command = None
        told = False
        stopping.received = None


def hear(number: int, _: FrameType | None) -> None:
    """Handle the first signal gracefully if the program is ready; at the second, end the process.

    Among several ranks a second signal within a second is a copy of the first: torchrun
    passes on what all of them have already received.
    """
    global received_at
    is_first = stopping.received is None
    if not is_first and "RANK" in os.environ and time.monotonic() < received_at + 1:
        return
    if not (is_first and ready):
        if os.environ.get("RANK", "0") == "0" and not told:
            advice = f" To resume:\n{resume_command}" if resume_command else ""
            os.write(2, f"ended at once.{advice}\n".encode())
        # No cleanup, since it may be what hangs. Files are written atomically.
        os._exit(128 + number)
    stopping.received = number
    received_at = time.monotonic()
    if stopping.gentle is None:
        raise Interrupted
    stopping.gentle(signal.Signals(number).name)


def print_advice(text: str) -> None:
    """Print what to do after a signal. The next signal ends the process silently."""
    global told
    print(text, file=sys.stderr, flush=True)
    told = True


@contextlib.contextmanager
def gently(interrupt: Callable[[str], object]) -> Iterator[None]:
    """Within this context, a signal calls `interrupt` with its name, and raises nothing."""
    stopping.gentle = interrupt
    try:
        if stopping.received is not None:  # a finalizer may have swallowed its exception
            raise Interrupted
        yield
    finally:
        stopping.gentle = None


def exit_code() -> int:
    """Return 130 or 143, by the signal; 130 for a KeyboardInterrupt without a signal."""
    return code or 128 + (stopping.received or signal.SIGINT)
