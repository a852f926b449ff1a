"""How much jobs that share a GPU slow each other down, by the utilisation that they add up to."""

import math
import re
from dataclasses import dataclass
from typing import Final

from muri.errors import UsageError


class UtilizationError(UsageError):
    """A GPU utilisation cannot be true."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fitted parabola, constant + linear·x + square·x², x in percent."""

    constant: float
    linear: float
    square: float

    def __call__(self, percent: float) -> float:
        """The fit from its lowest point on, and the value there before it; never below 1."""
        # To the left of its vertex the parabola rises again, an artefact: less use would slow jobs down more.
        percent = max(percent, -self.linear / (2 * self.square))
        return max(1.0, self.constant + percent * (self.linear + percent * self.square))


_FITS: Final = {
    "2080": _Fit(1.16664, -0.00302, 4e-5),
    "1080": _Fit(1.32198, -0.00728, 6e-5),
}
"""RTX 2080 and GTX 1080, by the number in the GPU's name. Source: Horus (TPDS 2021), the fitted f of its cost."""


def slowdown(utilization_percent: float, gpu_type: str = "") -> float:
    """How many times longer each of several jobs on one GPU takes than alone there.

    For two jobs or more; a job that has the GPU to itself is not slowed down at all. The fits were made on an
    RTX 2080 and a GTX 1080; every other type gets the mean of both. Where a fit falls with rising use (below 38 %
    and 61 %), its lowest value (1.11 and 1.10) is taken instead, so more use never speeds anybody up.

    Args:
        utilization_percent: What all of the GPU's jobs use of it alone, added up: 0 to 100 for each job.
        gpu_type: As Slurm or the driver names it ("rtx2080", "NVIDIA GeForce GTX 1080 Ti"); empty: unknown.

    Returns:
        A factor ≥ 1 that rises with utilisation.

    Raises:
        UtilizationError: The utilisation is negative or not finite.

    Source: Horus (TPDS 2021), the fitted f of its cost.
    """
    if not 0 <= utilization_percent < math.inf:
        raise UtilizationError(f"a GPU utilisation is {utilization_percent} %; it must be finite and ≥ 0")
    fits = [_FITS[number] for number in re.findall(r"\d{4}", gpu_type) if number in _FITS] or list(_FITS.values())
    return sum(fit(utilization_percent) for fit in fits) / len(fits)
