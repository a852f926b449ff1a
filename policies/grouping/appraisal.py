"""What groups of given kinds of jobs are worth, and which of them may be formed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from muri.policies.grouping.objectives import coefficients
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import Floats, Indices, Shape, SpeedModel

_GAIN = 1e-9
"""Gain in total speed below which sharing is only a rounding error."""


class Appraiser:
    """Evaluates groups; kinds of jobs are indices.

    Args:
        shapes: What sharing depends on, for each kind.
        worth: What a second of each kind's full-speed progress is worth.
        options: Objective and margin.
        model: How fast members get on.
        memory_limit_gib: GPU memory that a group may use.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        worth: Sequence[float],
        options: PolicyOptions,
        model: SpeedModel,
        memory_limit_gib: float,
    ) -> None:
        self.coefficient = coefficients(shapes, worth, options.objective)
        self._shapes = shapes
        self._options = options
        self._model = model
        self._memory_gib = np.array([shape.gpu_mem_gib for shape in shapes])
        self._memory_limit_gib = memory_limit_gib

    @property
    def limits_memory(self) -> bool:
        """Whether there is anything that could be too large."""
        return bool(np.isfinite(self._memory_limit_gib))

    def fits(self, groups: Indices) -> NDArray[np.bool_]:
        """Which groups fit the GPU's memory."""
        return np.asarray(self._memory_gib[groups].sum(axis=1) <= self._memory_limit_gib)

    def appraise(self, groups: Indices) -> tuple[Floats, Floats]:
        """Value under the objective, and total speed, of each of n groups; γ is the speed model's own."""
        evaluation = self._model.evaluate(self._shapes, groups)
        total_speed = evaluation.speed.sum(axis=1)
        if self._options.objective == "efficiency":
            return evaluation.efficiency, total_speed
        return (evaluation.speed * self.coefficient[groups]).sum(axis=1), total_speed

    def pays(self, total_speed: Floats, alone: Floats | float = 1.0) -> NDArray[np.bool_]:
        """Which groups do more work than what would run instead, by the factor asked for.

        Args:
            total_speed: Sum of the members' speeds.
            alone: Total speed of what would run instead.
        """
        return np.asarray(total_speed > np.asarray(alone) * self._options.min_speedup + _GAIN)
