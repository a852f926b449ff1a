"""What a speed model is: given who shares GPUs, how fast does each one get on?"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from muri.profiler.records import StageProfile

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """The figures of a profile that sharing depends on; equal shapes are computed once.

    Attributes:
        stage_s: Seconds per iteration on each resource.
        iteration_s: Seconds of an iteration alone.
        gpu_mem_gib: Peak GPU memory.
        model: Model name, by which measured interference is looked up.
    """

    stage_s: tuple[float, ...]
    iteration_s: float
    gpu_mem_gib: float = 0.0
    model: str = ""


def shape_of(profile: StageProfile) -> Shape:
    """The shape of a profile."""
    return Shape(profile.stage_s, profile.iteration_s, profile.gpu_mem_gib, profile.key.model)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a speed model says of n groups of p members each.

    Attributes:
        speed: Array (n, p): speed of each member, in the order given, 1 = as fast as alone.
        efficiency: Array (n,): interleaving efficiency γ (Muri, Eq. 4): the share of time that a
            resource is busy, averaged over resources; 0 to 1.
        period_s: Array (n,): seconds in which every member completes one iteration: T of Eq. 3, and no
            less than the longest iteration; NaN where the model has no period.
    """

    speed: Floats
    efficiency: Floats
    period_s: Floats


class SpeedModel(Hashable, Protocol):
    """One answer to the question how jobs slow each other down. Pure, deterministic and hashable."""

    @property
    def name(self) -> str:
        """The name by which options select the model."""
        ...

    def evaluate(self, shapes: Sequence[Shape], groups: Indices) -> Evaluation:
        """Evaluate many groups of equal size at once.

        Args:
            shapes: The distinct shapes.
            groups: Array (n, p) of indices into `shapes`; a row may name a shape several times.
        """
        ...

    def order(self, members: Sequence[Shape]) -> tuple[int, ...]:
        """The ordering to run these members in: indices by position of the rotation.

        The identity for a model that knows no ordering.
        """
        ...
