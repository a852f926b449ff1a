"""How fast jobs on the same GPUs really get on when they share them without turns."""

from collections.abc import Iterable
from typing import Protocol

from muri.policies.horus.cost import slowdown
from muri.simulator.elastic import elastic_speed
from muri.simulator.model import Settings, TraceJob
from muri.simulator.pairs import Pairs
from muri.simulator.state import Unit


class Crowding(Protocol):
    """The truth about one GPU."""

    def speed(self, job: TraceJob, others: Iterable[TraceJob]) -> float:
        """Speed of a job beside others on a GPU, 1 = as fast as alone there."""
        ...


class ByPairs:
    """The product of the job's pair speeds with each of the others.

    Args:
        pairs: Speeds of all pairs of models.
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def speed(self, job: TraceJob, others: Iterable[TraceJob]) -> float:
        """Speed of a job beside others on a GPU, 1 = as fast as alone there."""
        return self._pairs.speed(job.key.model, (other.key.model for other in others))


class ByUtilization:
    """Horus's fitted function of the utilisation that all of them add up to."""

    def speed(self, job: TraceJob, others: Iterable[TraceJob]) -> float:
        """Speed of a job beside others on a GPU, 1 = as fast as alone there."""
        total = sum(other.gpu_share for other in (job, *others))
        return 1.0 / slowdown(100.0 * total, job.key.gpu_type)


def crowding_of(settings: Settings, pairs: Pairs) -> Crowding:
    """The truth that a simulation asks for."""
    return ByUtilization() if settings.slowdown == "utilization" else ByPairs(pairs)


def speed_of(unit: Unit, on_gpus: Iterable[list[Unit]], crowding: Crowding) -> float:
    """Speed of the job of a unit, 1 = alone with its own number of GPUs and its undivided batch.

    The slowest of its GPUs counts.

    Args:
        unit: A unit of one job.
        on_gpus: Who is on each of its GPUs, itself among them.
        crowding: The truth about one GPU.
    """
    job, steps = unit.members[0].job, unit.seat.accumulate_steps
    alone = elastic_speed(job, unit.gpu_count)
    if steps > 1 and job.batch is not None:
        alone *= job.batch.speed(steps)
    shared = {tuple(there) for there in on_gpus if len(there) > 1}
    beside = [[other.members[0].job for other in there if other is not unit] for there in shared]
    return alone * min((crowding.speed(job, others) for others in beside), default=1.0)
