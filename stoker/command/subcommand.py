"""The commands `python -m stoker.MODULE DIR`, each of which acts on one folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoker.command.exit_codes import report
from stoker.trainer.errors import UserError


def run(
    arguments: Sequence[str],
    usage: str,
    act: Callable[[Path], Any],
) -> int:
    """Call `act(folder)` and return the exit code."""
    if "-h" in arguments or "--help" in arguments:
        print(usage)
        return 0
    try:
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise UserError(f"Type {usage}")
        folder = Path(arguments[0])
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder.")
        act(folder)
    except (UserError, OSError) as error:
        return report(error)
    return 0
