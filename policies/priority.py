"""Who goes first: a smaller key is more urgent; ties go to the earlier, then to the lower job id. Promised speeds."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from muri.policies.types import PlanJob, PlanRequest

PriorityKey = Callable[[PlanJob], tuple[float, ...]]


def fifo(job: PlanJob) -> tuple[float, ...]:
    """First in, first out."""
    return (job.submit_s,)


def slurm(job: PlanJob) -> tuple[float, ...]:
    """Slurm's own priority, the highest first; where it is unknown all are equal, so in order of submission."""
    return (-job.priority,)


def sjf(job: PlanJob) -> tuple[float, ...]:
    """Shortest job first: by the whole expected duration; jobs of unknown duration follow in order of submission."""
    if job.remaining_s is None:
        return (1.0,)
    return (0.0, job.attained_s + job.remaining_s)


def srtf(job: PlanJob) -> tuple[float, ...]:
    """Shortest remaining time first, r; jobs of unknown duration follow by attained service."""
    if job.remaining_s is None:
        return (1.0, job.attained_s)
    return (0.0, job.remaining_s)


def srsf(job: PlanJob) -> tuple[float, ...]:
    """Shortest remaining service first, r·g; jobs of unknown duration follow by attained service.

    Source: Muri, section 4.2 (Muri-S), after Tiresias.
    """
    if job.remaining_s is None:
        return (1.0, job.attained_gpu_s)
    return (0.0, job.remaining_s * job.gpu_count)


def las(job: PlanJob) -> tuple[float, ...]:
    """Least attained service first, a: the seconds of service received so far, whatever the GPU count."""
    return (job.attained_s,)


def two_dimensional_las(job: PlanJob) -> tuple[float, ...]:
    """Least attained service first, a·g: the GPU-seconds received so far (2D-LAS).

    Source: Muri, section 4.2 (Muri-L), after Tiresias; continuous, without its discrete queues.
    """
    return (job.attained_gpu_s,)


def srsf_or_las(request: PlanRequest) -> PriorityKey:
    """SRSF when every job that may be grouped tells its duration, else 2D-LAS: the two don't mix."""
    known = all(job.remaining_s is not None for job in all_jobs(request) if job.may_share)
    return srsf if known else two_dimensional_las


def all_jobs(request: PlanRequest) -> Iterable[PlanJob]:
    """The jobs that wait and those that run."""
    yield from request.jobs
    for running in request.running:
        yield from running.members


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
