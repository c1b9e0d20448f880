"""Why and how a training ends before its last step."""

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)
received: int | None = None  # the number of the first signal, if the program listens for them
gentle: Callable[[str], object] | None = None  # called with a signal's name, not an exception


@dataclasses.dataclass(frozen=True)
class StopReason:
    """Why a training stopped before its end: `kind` is for programs, `text` for people.

    The kinds are "asked" (`Trainer.stop` with a text), "interrupted", "time_limit",
    "early_stopping" and "pruned".
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Interrupted(KeyboardInterrupt):
    """A signal came where nothing is lost by ending at once; exit code 128 + its number."""


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Delay signals until the end of this context.

    A library may take their exception for another: a file that it reads would be called damaged.
    """
    global gentle
    outer = gentle
    waiting: list[str] = []
    gentle = waiting.append
    try:
        yield
    finally:
        gentle = outer
        for name in waiting:
            if outer is None:
                raise Interrupted
            outer(name)
