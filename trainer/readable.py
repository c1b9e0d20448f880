"""Numbers as people read them: 0.9861, 1,234.5, 4 min 10 s."""

import math


def number(value):
    """'0.9861', '3.215e-05', '1,234.5', '51,920,131', '1.2346e+20': four decimals, or as many digits."""
    if 0 < abs(value) < 0.001:
        return f"{value:.4g}"
    if abs(value) < 100:
        return f"{value:.4f}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e15:
        return f"{value:.5g}"
    return f"{value:,.{max(0, 4 - int(math.log10(abs(value))))}f}"


def numbers(results):
    """'loss 0.0707  acc 0.9861' of {"test/loss": ..., "test/acc": ...}; what is not one number is left out."""
    shown = {
        name.partition("/")[2]: value for name, value in results.items() if isinstance(value, float)
    }
    return "  ".join(f"{name} {number(value)}" for name, value in shown.items())


def seconds(value):
    """'3.2 s', '4 min 10 s', '2 h 5 min'."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return (
        f"{minutes} min {rest} s"
        if minutes < 100
        else f"{math.floor(minutes / 60)} h {minutes % 60} min"
    )


def duration(value):
    """'0.61 ms', '120 ms', '4.2 s', '4 min 10 s'."""
    return f"{1000 * value:.{2 if value < 0.01 else 0}f} ms" if value < 1 else seconds(value)
