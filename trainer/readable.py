"""Numbers as people read them: 0.9861, 1,234.5, 4 min 10 s."""

import math
from collections.abc import Mapping
from typing import Any


def number(value: float) -> str:
    """Return "0.9861", "3.215e-05", "1,234.5", "51,920,131": four decimals, or as many digits."""
    if 0 < abs(value) < 0.001:
        return f"{value:.4g}"
    if abs(value) < 100:
        return f"{value:.4f}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e15:
        return f"{value:.5g}"
    decimals = max(0, 4 - int(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def numbers(results: Mapping[str, Any]) -> str:
    """Return "loss 0.0707  acc 0.9861" for {"test/loss": ..., "test/acc": ...}; only numbers."""
    parts = []
    for name, value in results.items():
        if isinstance(value, float):
            parts.append(f"{name.partition('/')[2]} {number(value)}")
    return "  ".join(parts)


def seconds(value: float) -> str:
    """Return "3.2 s", "4 min 10 s" or "2 h 5 min"."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def duration(value: float) -> str:
    """Return "0.61 ms", "120 ms", "4.2 s" or "4 min 10 s"."""
    if value >= 1:
        return seconds(value)
    milliseconds = 1000 * value
    decimals = 2 if value < 0.01 else 0
    return f"{milliseconds:.{decimals}f} ms"
