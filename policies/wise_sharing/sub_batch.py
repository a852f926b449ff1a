"""In how many accumulation steps a job's batch may be computed, and what each number costs."""

from typing import NamedTuple

from muri.policies.cycle.packed import mem_gib_of
from muri.policies.types import PlanJob


class SubBatch(NamedTuple):
    """One way of computing a job's iterations.

    Attributes:
        accumulate_steps: Steps of each iteration.
        mem_gib: Memory that it needs on each GPU; 0 while unknown, which fits anywhere.
        speed: Speed alone, 1 = with the undivided batch.
    """

    accumulate_steps: int
    mem_gib: float
    speed: float


def sub_batches(job: PlanJob) -> tuple[SubBatch, ...]:
    """The ways that a job can be run, by halving its batch: the undivided one first.

    Source: SJF-BSBF, its search for a sub-batch. The steps stay within what the script can accumulate, and a
    step keeps at least one sample.
    """
    batch = job.batch
    found = [SubBatch(1, mem_gib_of(job), 1.0)]
    steps = 2
    while batch is not None and steps <= min(batch.max_accumulate_steps, batch.batch_size):
        found.append(SubBatch(steps, mem_gib_of(job, steps), batch.speed(steps)))
        steps *= 2
    return tuple(found)


def alone_s(job: PlanJob, accumulate_steps: int) -> float:
    """Seconds that a job of known duration still needs alone, in so many steps."""
    assert job.remaining_s is not None
    if accumulate_steps == 1 or job.batch is None:
        return job.remaining_s
    return job.remaining_s / job.batch.speed(accumulate_steps)
