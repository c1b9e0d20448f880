"""The handler for SIGINT and SIGTERM. `stoker/trainer/stopping.py` describes how runs stop."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from stoker.command.contact import is_lost
from stoker.trainer import launch, stopping
from stoker.trainer.stopping import SIGNALS, Interrupted

received_at: float = 0.0  # when the first signal arrived
can_raise: bool = (
    False  # whether the program handles Interrupted; if not, a signal ends the program
)
code: int | None = None  # the exit code to use instead of the signal's
resume_command: str | None = None  # the command that continues this run, once its folder is known
has_advised: bool = False  # whether `print_advice` was called


def install() -> None:
    """Handle both signals from now on, except a signal that is ignored, as under nohup."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def show_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Print an exception that a finalizer swallowed, unless it is Interrupted (raised later)."""
    if not isinstance(unraisable.exc_value, Interrupted):
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def for_script(resume: str) -> Iterator[None]:
    """Handle a script's signals within this context; the command `resume` resumes the script."""
    global can_raise, resume_command, has_advised
    if threading.current_thread() is not threading.main_thread() or can_raise:
        yield  # only the main thread can install handlers, and the command may already have done so
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    install()
    can_raise = True
    resume_command = resume
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        can_raise = False
        resume_command = None
        has_advised = False
        stopping.received = None


def handle(number: int, _: FrameType | None) -> None:
    """Stop gracefully at the first signal, if the program can; end the process at the second.

    With several ranks, a second signal within one second is a copy of the first, because torchrun
    forwards signals that the ranks have already received.
    """
    is_second = stopping.received is not None
    if is_second and "RANK" in os.environ and time.monotonic() < received_at + 1:
        return
    if is_second or not can_raise:
        if launch.is_first() and not has_advised:
            advice = f" To resume:\n{resume_command}" if resume_command else ""
            os.write(2, f"ended immediately.{advice}\n".encode())
        # No cleanup, because the cleanup may be what hangs. Files are written atomically.
        os._exit(128 + number)
    record(number)
    if stopping.on_signal is not None:
        stopping.on_signal(signal.Signals(number).name)
    elif not is_lost(sys.exc_info()[1]):  # torchrun ends all ranks after one has failed
        raise Interrupted


def record(number: int) -> None:
    """Record the first signal, which this process or another rank has received."""
    global received_at
    stopping.received = number
    received_at = time.monotonic()


def print_advice(text: str) -> None:
    """Print how to continue after an interruption. The next signal ends the process silently."""
    global has_advised
    print(text, file=sys.stderr, flush=True)
    has_advised = True


@contextlib.contextmanager
def calling(interrupt: Callable[[str], object]) -> Iterator[None]:
    """Within this context, let a signal call `interrupt(name)` instead of raising an exception."""
    stopping.on_signal = interrupt
    try:
        if stopping.received is not None:  # a finalizer may have swallowed the signal's exception
            raise Interrupted
        yield
    finally:
        stopping.on_signal = None


def exit_code() -> int:
    """Return the exit code for the signal, 130 or 143; without a signal, return 130."""
    return code or 128 + (stopping.received or signal.SIGINT)
