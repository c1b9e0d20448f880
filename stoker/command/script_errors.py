"""Report a script's errors as the command does: one to three lines and an exit code."""

import inspect
import re
import sys
from types import TracebackType

from stoker.trainer.errors import TrainingError, UserError, did_you_mean


def short_errors() -> None:
    """Report every uncaught UserError or TrainingError as the command does.

    Call this at the top of a script. An uncaught error then prints one to three lines instead of a
    traceback, and the script exits with code 2, or 3 if the training failed (see
    docs/exit-codes.md). This function sets `sys.excepthook`, so it does not affect errors that you
    catch, errors from other libraries, notebooks or pytest.
    """
    outer = sys.excepthook

    def end(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        unknown = re.match(
            r"Trainer\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error)
        )
        if kind is TypeError and unknown:
            error = unknown_argument(unknown[1])
        if not isinstance(error, (UserError, TrainingError)):
            return outer(kind, error, traceback)
        from stoker.command.exit_codes import report

        raise SystemExit(report(error))

    sys.excepthook = end


def unknown_argument(name: str) -> UserError:
    """Return the error for an argument that the Trainer does not have."""
    from stoker.trainer.trainer import Trainer

    names = list(inspect.signature(Trainer).parameters)
    return UserError(
        f"Trainer has no argument {name}.{did_you_mean(name, names)}\n"
        f"Its arguments are: {', '.join(names)}."
    )
