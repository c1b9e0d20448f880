"""Draw the table that a fit prints on a terminal, above a line for the current step.

`stoker.trainer.callbacks.progress` chooses what is in the rows and the line.
"""

import logging
import sys
import time
from collections.abc import Mapping

import tqdm

from stoker.trainer import terminal
from stoker.trainer.errors import log

Cells = Mapping[str, str]  # {name: text}

GAP = "  "
LEAST = 6  # minimum width of a column, in characters
LEFT = 14  # width of the time left, such as "  1:23:45 left", in `bar_format`
EVERY = 0.1  # seconds between redraws


class Table:
    """A table with a line below it that is redrawn; `tqdm` computes the time left."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.bar = tqdm.tqdm(
            initial=step,
            total=total_steps,
            file=sys.stdout,
            # With \r, a typed ^C overwrites the start of the line.
            bar_format="{desc} {remaining:>8} left\r",
            leave=False,
        )
        self.widths: dict[str, int] = {}  # column -> width
        self.length: int = 0  # of the longest line; tqdm cannot erase the rest of it after \r
        self.drawn: float = 0.0  # time at which the line was last drawn
        log.addFilter(self.clear)

    def clear(self, _: logging.LogRecord) -> bool:
        """Clear the line, so that a warning starts on an empty line."""
        self.bar.clear()
        return True

    def row(self, step: int, cells: Cells) -> bool:
        """Print a row of the table; return False if it is too wide."""
        self.bar.n = step
        widths = {}
        for name, text in cells.items():
            widths[name] = max(LEAST, len(name), len(text), self.widths.get(name, 0))
        if sum(widths.values()) + len(GAP) * (len(widths) - 1) > terminal.width():
            return False
        if widths != self.widths:
            self.widths = widths
            header = self.aligned({name: name for name in cells})
            self.bar.write(terminal.styled(header, "bold"))
        self.bar.write(self.aligned(cells))
        return True

    def aligned(self, cells: Cells) -> str:
        return GAP.join(cells.get(name, "").rjust(width) for name, width in self.widths.items())

    def is_due(self) -> bool:
        """Return whether it is time to redraw the line."""
        return time.monotonic() > self.drawn + EVERY

    def draw(self, step: int, cells: Cells, more: Cells) -> None:
        """Draw the current step's line: a row, or names and values if a row does not fit.

        As many values of `more` as fit are appended, each after its name.
        """
        self.drawn = time.monotonic()
        text = self.aligned(cells)
        if not text or len(text) > room():
            text = ""
            more = {**cells, **more}
        for name, value in more.items():
            part = f"{GAP}{name} {value}"
            if value and len(text) + len(part) <= room():
                text += part
        self.length = max(self.length, len(text))
        self.bar.n = step
        self.bar.set_description_str(text.ljust(self.length))

    def write(self, text: str) -> None:
        """Print text above the line."""
        self.bar.write(terminal.wrapped(text))

    def close(self) -> None:
        """Remove the line."""
        log.removeFilter(self.clear)
        self.bar.close()


def room() -> int:
    """Return the number of terminal columns to the left of the remaining time."""
    return terminal.width() - LEFT
