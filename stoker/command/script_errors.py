"""Report a script's errors as the command does: one to three lines and an exit code."""

import sys
from types import TracebackType

from stoker.trainer.errors import TrainingError, UserError


def short_errors() -> None:
    """From here on, report an uncaught UserError or TrainingError as the command does.

    Call it at the top of a script: it prints the error's one to three lines in place of a
    traceback, and exits with code 2, or 3 if the training failed (see docs/exit-codes.md). It sets
    `sys.excepthook`: errors that you catch, errors of other libraries, notebooks and pytest are not
    affected.
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
