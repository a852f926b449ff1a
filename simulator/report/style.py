"""Colours and line styles that the still and the interactive plots share."""

from typing import Final

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7A7A7A")
"""Okabe and Ito's palette, told apart by colour-blind readers; its yellow and black would be lost on light or dark."""

GROUP_COLOURS: Final = ("#9AA5B1", "#56B4E9", "#009E73", "#D55E00")
"""Of groups of one, two, three and four jobs."""

_SECONDS: Final = ((2 * 86_400.0, 86_400.0, "days"), (2 * 3_600.0, 3_600.0, "hours"), (120.0, 60.0, "minutes"))


def colour(index: int) -> str:
    """The colour of the index-th policy."""
    return COLOURS[index % len(COLOURS)]


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds of the unit that suits an axis up to `longest_s`, and its name."""
    for at_least_s, size_s, name in _SECONDS:
        if longest_s >= at_least_s:
            return size_s, name
    return 1.0, "seconds"
