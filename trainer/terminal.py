"""Print text on a terminal, wrapped at words and with a little color. Pipes get unchanged text."""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from typing import TextIO

INDENT = " " * 9  # aligned with the text of lines such as "model    MLP, 85,002 parameters"
STYLES: Mapping[str, str] = {"bold": "1", "red": "31"}
# Matches lines with a command, which are not wrapped, so that you can copy them. In a command, the
# program's name is followed by a script, an option or a setting, sometimes with a task in between.
COMMAND = re.compile(
    r"(?:^|: |^(?:evaluate|resume|train|best) +)(?:\S*python[\d.]*|stoker|torchrun) "
    r"(?=-|['\"]|\S+(?:\.py\b|=)|\w+ \S+=)"
)


def is_terminal(file: TextIO) -> bool:
    """Return whether this is a terminal on which a line can be redrawn."""
    return file.isatty() and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the number of columns of the terminal."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, indent: str = INDENT) -> str:
    """Wrap lines at words, with a hanging indent.

    Commands, lines that are already indented and lines of one or two words, such as paths, are not
    wrapped.
    """
    lines = []
    for line in text.split("\n"):
        is_text = len(line.split()) > 2 and not line.startswith(INDENT)
        if len(line) > width() and is_text and COMMAND.search(line) is None:
            line = textwrap.fill(
                line,
                width(),
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines.append(line)
    return "\n".join(lines)


def styled(text: str, style: str) -> str:
    """Return the text in this style, or unchanged if NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


def show(text: str, style: str | None = None) -> None:
    """Print text; wrap and style it if standard output is a terminal."""
    if is_terminal(sys.stdout):
        text = wrapped(text)
        if style is not None:
            text = styled(text, style)
    print(text, flush=True)
