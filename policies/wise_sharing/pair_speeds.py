"""How fast the models of a request run beside each other."""

from collections.abc import Iterable
from functools import cached_property
from math import isnan, prod

import numpy as np

from muri.policies.cycle.packed import Holding
from muri.policies.speed.interference import InterferenceTable
from muri.policies.speed.model import Floats
from muri.policies.types import PlanJob


def model_of(job: PlanJob) -> str:
    """Name of a job's model; empty while it has no profile."""
    return "" if job.profile is None else job.profile.key.model


class PairSpeeds:
    """Pair speeds by model, from a table of measured and estimated ones.

    Args:
        table: The table; None knows no pair.
        jobs: Jobs whose models count.
    """

    def __init__(self, table: InterferenceTable | None, jobs: Iterable[PlanJob]) -> None:
        self._table = table
        known = frozenset() if table is None else table.models
        self._number = {model: index for index, model in enumerate(sorted({model_of(job) for job in jobs} & known))}

    def number(self, job: PlanJob) -> int | None:
        """Index of a job's model in `slowdowns`; None for one that the table doesn't know."""
        return self._number.get(model_of(job))

    @cached_property
    def slowdowns(self) -> Floats:
        """Array (models, models): ξ of the first beside the second; NaN where nobody knows."""
        found = np.full((len(self._number),) * 2, np.nan)
        for (model_a, model_b), (speed_a, speed_b) in (self._table.pairs if self._table else {}).items():
            a, b = self._number.get(model_a), self._number.get(model_b)
            if a is not None and b is not None:
                found[a, b], found[b, a] = 1 / speed_a, 1 / speed_b
        return found

    def speed(self, job: PlanJob, other: PlanJob) -> float:
        """Speed of a job beside another, 1 = as fast as alone; an equal share of the time where nobody knows."""
        first, second = self.number(job), self.number(other)
        found = np.nan if first is None or second is None else self.slowdowns[first, second]
        return 0.5 if isnan(found) else float(1 / found)

    def of(self, holding: Holding) -> float:
        """Speed of a job where it is, 1 = as fast as alone and with its undivided batch."""
        job, steps = holding.job, holding.accumulate_steps
        alone = 1.0 if steps == 1 or job.batch is None else job.batch.speed(steps)
        return alone * self.beside_others(holding)

    def beside_others(self, holding: Holding) -> float:
        """Speed of a job beside those that it shares GPUs with, 1 = as fast as alone in as many steps.

        On each GPU it is the product of the pair speeds with all others there; the slowest GPU counts.
        """
        job = holding.job
        shared = [gpu.tenants for gpu in holding.gpus if len(gpu.tenants) > 1]
        return min(
            (prod(self.speed(job, other) for other in tenants.values() if other is not job) for tenants in shared),
            default=1.0,
        )
