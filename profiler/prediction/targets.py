"""What is predicted, and the scale on which it is learnt and judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from muri.profiler.prediction.documents import Example
from muri.profiler.records import STAGES

Array = NDArray[np.float64]

PROPAGATE: Final = STAGES.index("propagate")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure to predict.

    It is learnt as log(1 + unit · value): the root mean square error there is the RMSLE by which Horus judges.

    Attributes:
        name: Such as "load_share".
        unit: The unit in which errors are told.
        per_unit: How many of the unit make one: 100 for shares in per cent, 1000 for seconds in milliseconds.
        of: The measured value.
    """

    name: str
    unit: str
    per_unit: float
    of: Callable[[Example], float]

    def learnt(self, examples: Sequence[Example]) -> Array:
        """The measured values on the scale on which they are learnt."""
        return np.log1p(self.per_unit * np.array([self.of(item) for item in examples], dtype=np.float64))

    def value(self, learnt: Any) -> Any:
        """Back from that scale."""
        return np.maximum(np.expm1(learnt), 0.0) / self.per_unit


def device_utilisation(example: Example) -> float:
    """GPU utilisation as telemetry measured it; on a node without GPU the share that propagate owns."""
    measured = example.profile.detail.gpu_utilisation
    return _share(example, PROPAGATE) if measured is None else measured


def _share(example: Example, stage: int) -> float:
    """What a stage owns of the iteration; where stages overlap, of their sum."""
    profile = example.profile
    return profile.stage_s[stage] / max(profile.iteration_s, sum(profile.stage_s))


def _share_target(index: int, stage: str) -> Target:
    return Target(f"{stage}_share", "%", 100.0, lambda example: _share(example, index))


UTILISATION: Final = Target("device_utilisation", "%", 100.0, device_utilisation)
SHARES: Final = tuple(_share_target(index, stage) for index, stage in enumerate(STAGES))
ITERATION: Final = Target("iteration", "ms", 1000.0, lambda example: example.profile.iteration_s)
TARGETS: Final = (UTILISATION, *SHARES, ITERATION)
