"""How the command ends: the message and the exit code of each error."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from stoker import __version__, project
from stoker.command import arguments, processes, ranks, signals
from stoker.command.contact import is_lost
from stoker.command.help import help_text
from stoker.command.messages import FAILING, explanation, message
from stoker.trainer import launch, stopping, terminal
from stoker.trainer.errors import (
    RunInUse,
    TrainingError,
    UserError,
    cause,
    explanation_of,
    printable,
)

# docs/exit-codes.md explains each code. For a signal, such as Ctrl-C, see `signals.exit_code`.
OK = 0
INTERNAL_ERROR = 1
USER_ERROR = 2
TRAINING_ERROR = 3
FAILED = (INTERNAL_ERROR, USER_ERROR, TRAINING_ERROR)
DIFFERENT = 4
IN_USE = 75  # sysexits.h defines it as "try again later"
BROKEN_PIPE = 128 + 13  # what a shell returns for SIGPIPE
codes: list[int] = []  # exit codes of the errors reported so far
has_summary: bool = False  # whether a sweep has printed its summary, and how to continue


class Wrapping(logging.Formatter):
    """Wraps log messages if standard error is a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return terminal.wrapped(text, indent="  ") if terminal.is_terminal(sys.stderr) else text


def run(main: Callable[[], Any]) -> None:
    """Run `main` and end the process with its exit code."""
    code: Any
    try:
        code = run_and_report(main)
    except KeyboardInterrupt:
        code = say_interrupted()
    except SystemExit as end:
        code = end.code
    finally:
        ranks.leave()
    ranks.end(code)


def run_and_report(main: Callable[[], Any]) -> int:
    """Run `main`, print how it ended, and return the exit code.

    Raises:
        KeyboardInterrupt: the process received a signal.
    """
    open_closed()
    ranks.quieten()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    logging.getLogger("hydra").setLevel(logging.CRITICAL)
    if logging.lastResort is not None:  # prints warnings
        logging.lastResort.setFormatter(Wrapping())
    try:
        signals.can_raise = True
        sys.unraisablehook = signals.show_unraisable
        project.enter()
        typed = sys.argv[1:]
        is_job = processes.job() != {}  # a sweep checks and completes the arguments of its jobs
        if not is_job:
            arguments.check(typed)
        if "-h" in typed or "--help" in typed:
            print(help_text(typed))
        elif "--version" in typed:
            print(f"stoker {__version__}")
        else:
            if not is_job:
                sys.argv[1:] = arguments.for_hydra(typed)
            main()
        sys.stdout.flush()
        if stopping.received is not None:  # a library swallowed the signal's exception
            raise KeyboardInterrupt
        return max(codes, default=OK)  # includes the failed jobs of a sweep
    except BrokenPipeError:
        return nobody_reads()
    except Exception as error:
        if is_interruption(error):
            raise KeyboardInterrupt from None
        return report(with_message(error))


def with_message(error: Exception) -> Exception:
    """Return the error, or a clearer one if it comes from a library and is hard to read."""
    # Hydra does not catch every library's errors, such as those for a file that is not YAML.
    if not HydraConfig.initialized() and code_of(error) == INTERNAL_ERROR:
        reason = " ".join(str(error).split())
        typed = [one for one in sys.argv[1:] if not one.startswith("hydra.searchpath=")]
        return UserError(f"{' '.join(typed)}: these settings cannot be read ({reason}).")
    return error


def say_interrupted() -> int:
    """Print how to continue after an interruption, and return the exit code."""
    advice = "\ninterrupted."
    if not has_summary:
        advice += " Type the same command again to resume, or to start over if nothing was saved."
    text, code = ranks.settle_end("signal", advice, signals.exit_code())
    if text:
        signals.print_advice(text)
    return code or OK


def is_interruption(error: BaseException) -> bool:
    """Return whether a library turned a signal's exception into this error."""
    is_ours = isinstance(error, TrainingError) or is_lost(error)
    return stopping.received is not None and not is_ours


def open_closed() -> None:
    """Reopen streams that a shell has closed (`>&-`), so that no file gets their descriptors."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def nobody_reads() -> int:
    """Discard further output, because nobody reads it (as after `| head`); return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def report(error: BaseException, note: Callable[[int], Any] | None = None) -> int:
    """Print the message for an error, and return its exit code.

    With several processes, only one prints the message and calls `note(code)`.
    """
    if isinstance(error, BrokenPipeError):
        return nobody_reads()
    code = code_of(error)
    text: str | None = message(error)
    if code == INTERNAL_ERROR or "debug=true" in sys.argv:
        trace = "".join(traceback.format_exception(error)).rstrip()
        text = trace if code == INTERNAL_ERROR else f"{trace}\n{text}"
    sys.stdout.flush()  # so that the error comes after earlier output, even in a file
    if launch.world_size() > 1:
        lost = is_lost(error)
        if lost and code == INTERNAL_ERROR:
            text = f"error: lost contact with another process.\n{cause(error)}"
            code = TRAINING_ERROR
        text, ended = ranks.settle_end("lost" if lost else "error", text, code)
        code = INTERNAL_ERROR if ended is None else ended
    codes.append(code)
    # the job's processes have already printed the message
    if text and not isinstance(error, processes.JobFailed):
        show_error(text)
    if text and note:
        note(code)
    return code


def show_error(text: str) -> None:
    """Print an error message to standard error."""
    if terminal.is_terminal(sys.stderr):
        text = terminal.wrapped(text, indent="  ")
        if text.startswith("error:"):
            text = terminal.styled("error:", "red") + text.removeprefix("error:")
    print(text, file=sys.stderr, flush=True)


def code_of(error: BaseException) -> int:
    """Return the exit code of an error."""
    if isinstance(error, processes.JobFailed):
        return error.exit_code
    if isinstance(error, RunInUse):
        return IN_USE
    if isinstance(error, (UserError, HydraException, OmegaConfBaseException)):
        return USER_ERROR
    if isinstance(error, TrainingError) or getattr(error, "errno", None) in FAILING:
        return TRAINING_ERROR
    # An OSError that Stoker raises may lack an errno.
    if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
        return USER_ERROR
    if explanation_of(error) is not None and not is_lost(error):
        return USER_ERROR
    return INTERNAL_ERROR


def failure_text(error: BaseException) -> str:
    """Return the reason for a run's failure, for its result.json."""
    if code_of(error) == INTERNAL_ERROR and not isinstance(error, processes.JobFailed):
        return cause(error)
    return "\n".join(printable(line) for line in explanation(error).split("\n"))
