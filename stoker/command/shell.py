"""Format commands as a user would type them in a shell."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from stoker.command import invocation, settings
from stoker.trainer.errors import quoted

# Values that Hydra reads as strings even without quotes.
PLAIN = r"[A-Za-z0-9_/.:+-][A-Za-z0-9_/.:+ -]*(?<! )"


def command(overrides: Iterable[str], *more: str, start: Iterable[str] | None = None) -> str:
    """Return the command that continues a run with these settings.

    If a key occurs several times, its last value is used. Settings that only matter at the start of
    a run are omitted. The command begins with `start`, which defaults to this program.
    """
    last = {override.partition("=")[0]: override for override in (*overrides, *more)}
    kept = [override for key, override in last.items() if not settings.record(key).once]
    return shlex.join([*(start or invocation.program()), *kept])


def setting(key: str, value: str | Path) -> str:
    """Return 'key=value' for Hydra, with the value quoted if it has unusual characters."""
    text = str(value)
    if re.fullmatch(PLAIN, text):
        return f"{key}={text}"
    return f"{key}={quoted(text)}"


def command_for(task: str, folder: str | Path, packages: list[str], *options: str) -> str:
    """Return the command of a task for a run that trusts these packages."""
    words = [task, setting("run", folder), *options]
    if packages:
        words.append(f"trusted=[{','.join(packages)}]")
    return command(words)


def replay_command(overrides: list[str], path: str | Path) -> str:
    """Return the command that repeats the steps after a checkpoint, in a new run directory."""
    typed = [override for override in overrides if not override.startswith("run_dir=")]
    start = [*invocation.program(), setting("resume", path)]
    return command(typed, "log_every=1", start=start)
