"""Numbers and texts as the report shows them."""

import math

from stoker.trainer.errors import as_typed
from stoker.trainer.readable import number

MOST_TEXT = 200  # letters of a text from a file


def shortened(value: object, most: int = MOST_TEXT) -> str:
    """Return the value as text of at most `most` letters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: str | None) -> str:
    """Return a text without line breaks, shortened; '' for None."""
    return shortened(" ".join((text or "").split()))


def setting(value: object) -> str:
    """Return a config value as a user would type it, shortened."""
    return shortened(as_typed(value))


def percent(share: float) -> str:
    """'97.2 %', with more digits near the ends: '99.94 %', '0.01 %'; '100 %' is exact."""
    near = 100 * min(share, 1 - share)
    digits = 1
    if near == 0:
        digits = 0
    elif near > 1e-4:
        digits = max(1, math.ceil(-math.log10(near)))
    return f"{100 * share:.{digits}f} %"


def amount(value: float) -> str:
    """'1,234', '12.3 k', '51.9 M', '3.41 T'."""
    for unit, least, size in (("T", 1e12, 1e12), ("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if value >= least:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def tile(value: float) -> str:
    """Format a number for the width of a tile."""
    if 0 < abs(value) < 0.001:
        return f"{value:.3g}"
    if abs(value) < 1e6:
        return number(value)
    return amount(value) if value > 0 else f"-{amount(-value)}"


def mib(value: float) -> str:
    """'1,234 MiB', '2.5 MiB'."""
    return f"{value:,.0f} MiB" if value >= 100 else f"{value:.3g} MiB"


def epoch(value: float) -> str:
    """'epoch 3', '2.5 epochs'."""
    return f"epoch {value:.0f}" if float(value).is_integer() else f"{value:.3g} epochs"


def flop(value: float) -> str:
    """'474 kFLOP', '12 FLOP'."""
    text = amount(value)
    return f"{text}FLOP" if text[-1].isalpha() else f"{text} FLOP"
