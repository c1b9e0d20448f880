"""Format numbers and sizes for people: 0.9861, 1,234.5, 3e7, 2.4 MiB."""

import math


def number(value: float) -> str:
    """Format with four or more digits: "0.9861", "3.215e-05", "1,234.5", "51,920,131"."""
    if 0 < abs(value) < 0.001:
        return f"{value:.4g}"
    if abs(value) < 100:
        return f"{value:.4f}"
    if not abs(value) < 1e15:  # also inf and nan
        return significant(value, 5)
    decimals = max(0, 4 - int(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def brief(value: float) -> str:
    """Format with three significant digits, or as an integer: "0.003", "3.2e-05", "5,450"."""
    if 999.5 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return significant(value, 3)


def counted(count: float, unit: str) -> str:
    """Format a count with its unit: "1 step", "1,000 steps", "2.5 epochs"."""
    return f"{count:,.10g} {unit}{'' if count == 1 else 's'}"


def size_of(count: int) -> str:
    """Format a number of bytes: "12 KiB", "2.4 MiB", "20,004 MiB"."""
    mib = count / 2**20
    if mib < 0.1:
        return f"{math.ceil(count / 1024)} KiB"
    return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:,.1f} MiB"


def significant(value: float, digits: int) -> str:
    """Format with at most this many significant digits: "0.1", "3e7"."""
    return f"{value:.{digits}g}".replace("e+", "e")
