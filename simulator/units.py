"""Figures as people read them."""

from typing import Final

_STEPS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))


def duration(seconds: float | None) -> str:
    """Seconds in the largest unit that leaves at least 1: "3.2 d", "12.4 h", "45 min", "8 s"."""
    if seconds is None:
        return "-"
    for size_s, unit in _STEPS:
        if abs(seconds) >= size_s:
            return f"{_short(seconds / size_s)} {unit}"
    return f"{_short(seconds)} s"


def count(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    return "-" if value is None else _short(value)


def percent(share: float | None) -> str:
    """A share as whole per cents."""
    return "-" if share is None else f"{share:.0%}"


def ratio(value: float | None) -> str:
    """A factor: "2.03×"."""
    return "-" if value is None else f"{value:.2f}×"


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}".rstrip("0").rstrip(".")
