"""SIGINT and SIGTERM: before and after a training they end the process at once, within one after its step."""

import contextlib
import dataclasses
import os
import signal
import sys
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM)
received = None  # the number of the first one
received_at = 0.0  # when that was
ready = False  # whether an exception would find somebody who answers it
code = None  # what the process ends with then, in place of the signal's
gentle = None  # what is called with its name instead of an exception


@dataclasses.dataclass(frozen=True)
class StopReason:
    """Why a training stopped before its end: `kind` is for programs, `text` for people.

    The kinds are "asked" (`Trainer.stop` with a text), "interrupted", "time_limit", "early_stopping" and "pruned".
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Interrupted(KeyboardInterrupt):
    """By a signal, where nothing is lost by ending at once; exit code 128 + its number."""


def listen():
    """Hears both signals from here on. One that is ignored, as by nohup, stays so."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)
    sys.unraisablehook = end_unheard


def hear(number, _):
    """The first signal is gentle where somebody cares for it; a second one ends the process, whatever it is doing.

    Among several ranks the second one within a second is the first one once more: torchrun hands on what all have got.
    """
    global received, received_at
    if received is not None and "RANK" in os.environ and time.monotonic() < received_at + 1:
        return
    if received is not None or not ready:
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"ended at once.\n")
        os._exit(
            128 + number
        )  # no clean-up: it may be what takes so long. Files are written whole or not at all
    received, received_at = number, time.monotonic()
    if gentle is None:
        raise Interrupted
    gentle(signal.Signals(number).name)


def end_unheard(unraisable):
    """Ends the process where Interrupted came up in a finalizer, such as a loader's, which would swallow it."""
    if isinstance(unraisable.exc_value, Interrupted):
        os._exit(exit_code())
    sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def gently(interrupt):
    """Within it, a signal calls `interrupt` with its name instead of raising an exception wherever it comes."""
    global gentle
    gentle = interrupt
    try:
        if received is not None:  # its exception may have been lost in a finalizer
            raise Interrupted
        yield
    finally:
        gentle = None


@contextlib.contextmanager
def later():
    """Within it, a signal waits for the end: in the middle of a library's code its exception may be taken for another.

    A file that was being read would be called damaged, for one.
    """
    global gentle
    outer, waiting = gentle, []
    gentle = waiting.append
    try:
        yield
    finally:
        gentle = outer
        for name in waiting:
            if outer is None:
                raise Interrupted
            outer(name)


def exit_code():
    """130 or 143, by the signal; 130 for a KeyboardInterrupt that came without one."""
    return code or 128 + (received or signal.SIGINT)
