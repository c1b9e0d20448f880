"""Report a script's errors as the command does: one to three lines and an exit code."""

import sys
from types import TracebackType

from stoker.trainer.errors import TrainingError, UserError


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
        if not isinstance(error, (UserError, TrainingError)):
            return outer(kind, error, traceback)
        from stoker.command.exit_codes import report

        raise SystemExit(report(error))

    sys.excepthook = end
