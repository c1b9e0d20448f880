"""Stop training before the last step: from a callback, a signal or another thread.

This is what happens on Ctrl-C or SIGTERM:

1. The handler in `stoker/command/signals.py` sets `received`. A second signal ends the process.
2. During a training run, `on_signal` is the Trainer's `interrupt`, which only sets `interruption`.
   At any other time, the handler raises `Interrupted`, which ends a fit like any other exception.
3. `fit` checks `interruption` in `poll_interruption`, after each step and before each batch of its
   evaluations. All processes agree on the last step.
4. The fit ends after its current step. If it is evaluating, `EvaluationInterrupted` ends the
   evaluation. The `Checkpoint` callback saves the step in `on_fit_end`.
5. The run (`stoker/tasks/running.py`) raises `Interrupted`, prints the command to resume it, and
   exits with code 130 or 143.

In a script without a run directory, Python raises KeyboardInterrupt instead.
"""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
received: int | None = None  # the number of the first signal, if the program handles signals
# The handler calls this with the name of the signal, or raises `Interrupted` if this is None.
on_signal: Callable[[str], object] | None = None


@dataclasses.dataclass(frozen=True)
class StopReason:
    """Why training stopped early: `kind` is for programs, and `text` is for people.

    The kinds are "asked" (`Trainer.stop` without a kind), "interrupted", "time_limit",
    "early_stopping" and "pruned".
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Stoppable:
    """The part of a Trainer that can be stopped."""

    stop_reason: StopReason | None = None  # why the last fit stopped; None if it reached its end
    interruption: str | None = None  # why a signal or another thread asked to stop
    failed: bool = False  # whether the fit ended with an error, for `on_fit_end`
    in_step: bool = False  # whether a step has begun, and its callbacks have not all returned
    agreement: Any  # the parallel.Agreement of all processes

    @property
    def interrupted(self) -> bool:
        """Whether training stops because `interrupt` was called on any process."""
        return self.stop_reason is not None and self.stop_reason.kind == "interrupted"

    def stop(self, reason: str, kind: str = "asked") -> None:
        """End training after this step. The reason is shown to the user; `kind` is for programs.

        With several processes, all of them must call this in the same step. To stop from a single
        process, call `interrupt` instead.
        """
        self.stop_reason = StopReason(kind, reason)

    def interrupt(self, reason: str) -> None:
        """End training after this step, or during its evaluation.

        You can call this from a signal handler or another thread. With several processes, one call
        is enough: all of them end after the same step, slightly later.
        """
        self.interruption = reason

    def poll_interruption(self) -> bool:
        """Stop, and return True, if any process was interrupted. All processes must call this."""
        if self.agreement.is_asked(self.interruption):
            self.stop(self.interruption or "another process was asked to stop", "interrupted")
            return True
        return False


class Interrupted(KeyboardInterrupt):
    """A signal arrived at a point where the program can exit.

    The exit code is 128 plus the number of the signal.
    """


class EvaluationInterrupted(BaseException):
    """The fit was interrupted during an evaluation, which is repeated when the run resumes."""


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Delay signals until the end of this context.

    Otherwise a library could mistake the exception for its own error, and a file would appear to be
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
