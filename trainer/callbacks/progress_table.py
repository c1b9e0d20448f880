"""The table that a fit prints on a terminal: a row per epoch, above a line for the current step."""

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
ROWS = 20  # rows between two headers
LEFT = 9  # width of the last column, which shows the time left
EVERY = 0.1  # seconds between redraws


class Table:
    """A table with a line below it that is redrawn; `tqdm` computes the time left."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.bar = tqdm.tqdm(
            initial=step,
            total=total_steps,
            file=sys.stdout,
            bar_format="{desc}{remaining}\r",  # with \r, a typed ^C overwrites the line's start
            leave=False,
        )
        self.widths: dict[str, int] = {}  # column -> width
        self.rows: int = 0  # number of rows since the last header
        self.drawn: float = 0.0  # time at which the line was last drawn
        log.addFilter(self.clear)

    def clear(self, _: logging.LogRecord) -> bool:
        """Clear the line, so that a warning starts on an empty line."""
        self.bar.clear()
        return True

    @property
    def left(self) -> str:
        """The time left, such as "01:30"."""
        return str(self.bar.format_meter(**{**self.bar.format_dict, "bar_format": "{remaining}"}))

    def row(self, step: int, cells: Cells) -> bool:
        """Print a row of the table; return False if it is too wide."""
        self.bar.n = step
        widths = {}
        for name, text in cells.items():
            widths[name] = max(LEAST, len(name), len(text), self.widths.get(name, 0))
        room = terminal.width() - LEFT
        if sum(widths.values()) + len(GAP) * (len(widths) - 1) > room:
            return False
        if widths != self.widths or self.rows == ROWS:
            self.widths = widths
            self.rows = 0
            header = self.aligned({name: name for name in cells})
            self.bar.write(terminal.styled(f"{header.ljust(room)}  left", "bold"))
        self.bar.write(f"{self.aligned(cells).ljust(room)} {self.left}")
        self.rows += 1
        return True

    def aligned(self, cells: Cells) -> str:
        return GAP.join(cells.get(name, "").rjust(width) for name, width in self.widths.items())

    def is_due(self) -> bool:
        """Return whether it is time to redraw the line."""
        return time.monotonic() > self.drawn + EVERY

    def draw(self, step: int, cells: Cells) -> None:
        """Draw the line of the current step: as a row, or without a table as names and values."""
        self.drawn = time.monotonic()
        room = terminal.width() - LEFT
        text = self.aligned(cells)
        if not self.widths:
            for name, value in cells.items():
                part = f"{name} {value}{GAP}"
                if value and len(text) + len(part) + len("left") <= room:
                    text += part
            text = f"{text.ljust(room - 4)}left"
        self.bar.n = step
        self.bar.set_description_str(f"{text.ljust(room)} ")

    def write(self, text: str) -> None:
        """Print text above the line."""
        self.bar.write(terminal.wrapped(text))

    def close(self) -> None:
        """Remove the line."""
        log.removeFilter(self.clear)
        self.bar.close()
