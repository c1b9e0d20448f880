"""Format numbers and text for the report."""

from stoker.trainer.errors import as_typed
from stoker.trainer.number_format import significant

MOST_TEXT = 200  # characters kept of a string from a file


def shortened(value: object, most: int = MOST_TEXT) -> str:
    """Return the value as text of at most `most` characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def one_line(text: str | None) -> str:
    """Return text without line breaks, shortened, or '' for None."""
    return shortened(" ".join((text or "").split()))


def setting(value: object) -> str:
    """Return a config value as a user would type it, shortened."""
    if isinstance(value, float) and value.is_integer():
        value = significant(value, 15)  # 10000, not 10000.0
    return shortened(as_typed(value))


def percent(fraction: float) -> str:
    """Format a fraction as '98.0%', with more digits below 1% and above 99%: '99.94%'."""
    if 0.01 <= fraction <= 0.99:
        return f"{100 * fraction:.1f}%"
    digits = 4 if fraction > 0.99 else 3
    return f"{100 * fraction:.{digits}g}%"
