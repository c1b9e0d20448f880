"""Numbers and texts as the report shows them."""

import math

from stoker.trainer import terminal
from stoker.trainer.errors import as_typed
from stoker.trainer.readable import number

MOST_TEXT = 200  # characters kept of a string from a file
UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def shortened(value: object, most: int = MOST_TEXT) -> str:
    """Return the value as text of at most `most` letters."""
    text = str(value)
    if len(text) > most:
        text = f"{text[: most - 1]}…"
    return text


def one_line(text: str | None) -> str:
    """Return a text without line breaks, shortened; '' for None."""
    return shortened(" ".join((text or "").split()))


def without_commands(error: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the message of an error without the commands in it, and these as (purpose, command).

    Such a line is 'To replay that step: stoker ...'.
    """
    lines = []
    commands = []
    for line in error.splitlines():
        match = terminal.COMMAND.search(line)
        if match is None or not match[1]:
            lines.append(line)
        else:
            commands.append((line[: match.start()], line[match.end(1) :]))
    return "\n".join(lines), commands


def setting(value: object) -> str:
    """Return a config value as a user would type it, shortened."""
    if isinstance(value, float) and value.is_integer():
        value = f"{value:.15g}".replace("e+", "e")  # 10000, not 10000.0
    return shortened(as_typed(value))


def percent(share: float) -> str:
    """'97.2%', with more digits near the ends: '99.94%', '0.01%'; '100%' is exact."""
    value = 100 * share
    near = min(value, 100 - value)
    digits = 1
    if near == 0:
        digits = 0
    elif near > 1e-4:
        digits = max(1, math.ceil(-math.log10(near)))
    return f"{value:.{digits}f}%"


def amount(value: float) -> str:
    """'1,234', '12.3 k', '51.9 M', '3.41 T'."""
    if value >= 1e4:
        for unit, size in UNITS.items():
            if value >= size:
                return f"{value / size:.3g} {unit}"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def tile(value: float) -> str:
    """Format a number for the width of a tile."""
    if 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    if abs(value) < 1e6:
        return number(value)
    if value < 0:
        return f"-{amount(-value)}"
    return amount(value)


def mib(value: float) -> str:
    """'1,234 MiB', '2.5 MiB'."""
    if value >= 100:
        return f"{value:,.0f} MiB"
    return f"{value:.3g} MiB"


def epoch(value: float) -> str:
    """'epoch 3', '2.5 epochs'."""
    if float(value).is_integer():
        return f"epoch {value:.0f}"
    return f"{value:.3g} epochs"


def flop(value: float) -> str:
    """'474 kFLOP', '12 FLOP'."""
    text = amount(value)
    if text[-1].isalpha():
        return f"{text}FLOP"
    return f"{text} FLOP"
