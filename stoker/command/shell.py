"""Commands as a user types them in a shell."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from stoker.command import settings
from stoker.trainer import launch


def command(overrides: Iterable[str], *more: str, start: Iterable[str] | None = None) -> str:
    """Return the command that continues a run with these settings; of each key the last one counts.

    Settings that are only for starting a run are left out. `start` stands before them, by default this program.
    """
    typed = {override.partition("=")[0]: override for override in [*overrides, *more]}
    kept = [override for key, override in typed.items() if not settings.record(key).once]
    return shlex.join([*(start or launch.program()), *kept])


def setting(key: str, value: str | Path) -> str:
    """Return 'key=value' as Hydra reads it: a value with unusual characters stands in quotes."""
    if re.fullmatch(r"[A-Za-z0-9_/.:+-][A-Za-z0-9_/.:+ -]*(?<! )", str(value)):
        return f"{key}={value}"
    quoted = str(value).replace("'", "\\'")
    return f"{key}='{quoted}'"
