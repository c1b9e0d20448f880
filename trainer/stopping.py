"""Stopping before the last step: from a callback, a signal or another thread.

What Ctrl-C does, and SIGTERM likewise:

1. The handler, `stoker/command/signals.py`, sets `received`. The second signal ends the process.
2. During a training run, `on_signal` is the Trainer's `interrupt`, which only leaves a note. In any
   other place, the handler raises `Interrupted`, which ends a fit as any exception does.
3. `fit` reads the note with `poll_interruption`, after each step and before each batch of its
   evaluations. All processes agree on the step to end with.
4. The fit ends: the loop after its step, an evaluation by `EvaluationInterrupted`. The `Checkpoint`
   callback saves the step in `on_fit_end`.
5. The run (`stoker/tasks/running.py`) raises `Interrupted`, prints the command that resumes it, and
   exits with code 130 or 143.

A script without a run directory gets Python's KeyboardInterrupt in place of all this.
"""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
received: int | None = None  # the number of the first signal, if the program handles signals
on_signal: Callable[[str], object] | None = None  # called with a signal's name, to raise nothing


@dataclasses.dataclass(frozen=True)
class StopReason:
    """Why training stopped early: `kind` is for programs, `text` for people.

    The kinds are "asked" (`Trainer.stop` with a text), "interrupted", "time_limit",
    "early_stopping" and "pruned".
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Stoppable:
    """The part of a Trainer that can be stopped."""

    stop_reason: StopReason | None = None  # why the last fit stopped; None if it reached its end
    interruption: str | None = None  # a stop requested by a signal or another thread
    failed: bool = False  # whether an error ended the fit; read by `on_fit_end`
    agreement: Any  # a parallel.Agreement between all processes

    @property
    def interrupted(self) -> bool:
        """Whether training ends because of `interrupt`, on this process or another."""
        return self.stop_reason is not None and self.stop_reason.kind == "interrupted"

    def stop(self, reason: str, kind: str = "asked") -> None:
        """End training after this step; the reason is shown, and `kind` is for programs.

        With several processes, all of them must call it in the same step. To stop from only one
        process, call `interrupt` there.
        """
        self.stop_reason = StopReason(kind, reason)

    def interrupt(self, reason: str) -> None:
        """End training after this step, or during its evaluation.

        Call it from a signal handler or another thread. With several processes, a single call is
        enough: all of them end after the same step, slightly later.
        """
        self.interruption = reason

    def poll_interruption(self) -> bool:
        """Stop and return True if any process was interrupted. All processes must call this."""
        if self.agreement.is_asked(self.interruption):
            self.stop(self.interruption or "another process was asked to stop", "interrupted")
            return True
        return False


class Interrupted(KeyboardInterrupt):
    """A signal arrived where the program can exit at once. Exit code 128 + its number."""


class EvaluationInterrupted(BaseException):
    """A fit was interrupted during an evaluation, which is repeated when the run resumes."""


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Delay signals until the end of this context.

    Otherwise a library could mistake the exception for its own error, and a file would seem
    damaged.
    """
    global on_signal
    outer = on_signal
    waiting: list[str] = []
    on_signal = waiting.append
    try:
        yield
    finally:
        on_signal = outer
        for name in waiting:
            if outer is None:
                raise Interrupted
            outer(name)
