"""Which figures of training can be true at all.

Figures come from scripts, users' comments and old files. A figure beyond these bounds is refused where it enters, so
that nothing that computes with it overflows, divides by zero or exceeds what SQLite stores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a figure can be."""

    least: float  # The smallest value
    most: float  # The largest value
    unit: str = ""  # Unit of both, "" for plain numbers
    whole: bool = False  # Whether only whole numbers count

    def fault(self, value: object) -> str:
        """Return what is wrong with a value, such as "is -1; it must be ≥ 0 s"; "" when it can be true."""
        kind = Integral if self.whole else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            found = repr(value)[:_LONGEST] if isinstance(value, (str, float)) else f"a {type(value).__name__}"
            return f"is {found}; it must be a {'whole ' if self.whole else ''}number"
        if isinstance(value, Integral) and abs(int(value)) > MOST_WHOLE:
            return f"has over 15 digits; it must be ≤ {self._text(self.most)}"
        number = float(value)
        if math.isfinite(number) and self.least <= number <= self.most:
            return ""
        return f"is {value}; it must be {self._law(number)}"

    def _law(self, number: float) -> str:
        if (self.least, self.most) == (0, 1):
            return "between 0 and 1"
        if not math.isfinite(number):
            return "> 0" if self.least > 0 else f"≥ {self._text(self.least)}"
        if number > self.most:
            return f"≤ {self._text(self.most)}"
        return "> 0" if number <= 0 < self.least else f"≥ {self._text(self.least)}"

    def _text(self, value: float) -> str:
        return f"{value:g} {self.unit}".rstrip()


_LONGEST: Final = 40

MOST_WHOLE: Final = 2**53
"""Larger whole numbers lose digits as floats; SQLite stores up to 2⁶³."""

TIME_S: Final = Bounds(0, 86400, "s")
"""A part of an iteration."""

ITERATION_S: Final = Bounds(1e-9, 86400, "s")
"""A whole iteration takes some time, and at most a day."""

ITERATIONS: Final = Bounds(0, 10**12, whole=True)
BATCH_SIZE: Final = Bounds(0, MOST_WHOLE, whole=True)
GPU_COUNT: Final = Bounds(1, 10**6, whole=True)
GPU_MEM_GIB: Final = Bounds(0, 10**5, "GiB")
HOST_MEM_GIB: Final = Bounds(0, 10**6, "GiB")
GRADIENT_MIB: Final = Bounds(0, 10**8, "MiB")
CORES: Final = Bounds(0, 10**6)
CPU_COUNT: Final = Bounds(1, 10**6, whole=True)
VARIATION: Final = Bounds(0, 10**6)
"""A coefficient of variation, or a spread as a share of its mean."""

SHARE: Final = Bounds(0, 1)
RATIO: Final = Bounds(1, 10**6)
"""How many times as long something takes."""

PER_SECOND: Final = Bounds(1 / 86400, 1e9)
"""Iterations per second."""

DATASET_GIB: Final = Bounds(1e-9, 1e9, "GiB")
BATCH_MIB: Final = Bounds(1e-9, 1e9, "MiB")
BANDWIDTH_MIB_PER_S: Final = Bounds(1e-6, 1e9, "MiB/s")


def reproducible(value: float) -> float:
    """Keep 12 digits of a fitted figure, as the last ones depend on the processor's linear algebra."""
    return float(f"{value:.12g}")
