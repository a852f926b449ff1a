"""The speeds that jobs were promised, for policies that choose partners without the grouping engine."""

from dataclasses import replace
from typing import Final

from muri.policies.types import PlanJob, PlanRequest

_ROUNDING: Final = 1e-9


def with_promises(request: PlanRequest, min_speed: float) -> PlanRequest:
    """Return a request in which every job was promised at least this speed.

    Args:
        request: Jobs, each with the promise of its own.
        min_speed: What everybody is promised, 1 = as fast as alone; 0: nothing.
    """
    if not min_speed:
        return request
    running = tuple(
        replace(unit, members=tuple(_promised(job, min_speed) for job in unit.members)) for unit in request.running
    )
    return replace(request, jobs=tuple(_promised(job, min_speed) for job in request.jobs), running=running)


def _promised(job: PlanJob, min_speed: float) -> PlanJob:
    return job if job.min_speed >= min_speed else replace(job, min_speed=min_speed)


def keeps_promise(job: PlanJob, speed: float) -> bool:
    """Whether a job gets what it was promised at a speed beside others, 1 = as fast as alone."""
    return speed >= job.min_speed - _ROUNDING
