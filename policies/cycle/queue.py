"""The queue of one cycle: every job that GPUs can be given to, the most urgent first."""

from collections.abc import Callable
from typing import NamedTuple

from muri.policies.cycle.bucket import Bucket, ShapeTable
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.speed.model import Shape
from muri.policies.types import PlanJob, PlanRequest, Running


class Contender(NamedTuple):
    """A job and its place in the queue.

    Attributes:
        rank: 0 for the most urgent job.
        job: The job.
        bucket: Whom it may share with.
        shape: Index of its shape in the queue's; None for a job that cannot share.
        unit: What it runs in now, None for a waiting job.
    """

    rank: int
    job: PlanJob
    bucket: Bucket
    shape: int | None
    unit: Running | None


class Queue(NamedTuple):
    """The jobs of a request, looked up once.

    Attributes:
        contenders: The jobs that GPUs can be given to, by rank.
        fixed: The running units that are not up for decision; ranks count within each.
        shapes: The distinct shapes, sorted.
    """

    contenders: tuple[Contender, ...]
    fixed: tuple[tuple[Contender, ...], ...]
    shapes: tuple[Shape, ...]


def line_up(request: PlanRequest, key: PriorityKey, options: PolicyOptions) -> Queue:
    """All jobs in order of urgency, whatever order they come in; ties go to the earlier, then the lower id.

    Args:
        request: The waiting jobs, and what runs.
        key: Order of priority.
        options: Whether what runs competes with them, and the aging bound.
    """
    movable = [unit for unit in request.running if is_movable(unit, request, options)]
    unit_of = {job.job_id: unit for unit in movable for job in unit.members}
    jobs = [*request.jobs, *(job for unit in movable for job in unit.members)]
    jobs.sort(key=_order(request, key, options.max_wait_s))
    table = ShapeTable([*request.jobs, *(job for unit in request.running for job in unit.members)])
    buckets = _Buckets(same_user=request.same_user)
    # One list comprehension, for this is done for every job of a long queue.
    contenders = tuple(
        [
            Contender(rank, job, buckets.of(job), table.index(job), unit_of.get(job.job_id))
            for rank, job in enumerate(jobs)
        ]
    )
    fixed = [
        tuple(Contender(rank, job, buckets.of(job), table.index(job), unit) for rank, job in enumerate(unit.members))
        for unit in request.running
        if unit.members[0].job_id not in unit_of
    ]
    return Queue(contenders, tuple(sorted(fixed, key=lambda members: members[0].job.job_id)), table.shapes)


def is_movable(unit: Running, request: PlanRequest, options: PolicyOptions) -> bool:
    """Whether a running unit competes with the waiting jobs.

    Where Slurm places jobs larger than a node, it also keeps them.
    """
    spans = len(unit.gpus) > 1 and request.larger_than_a_node == "slurm"
    return options.preemption and unit.preemptible and not spans


class _Buckets:
    """Equal buckets are one object."""

    def __init__(self, *, same_user: bool) -> None:
        self._same_user = same_user
        self._known: dict[tuple[str, str, int, int], Bucket] = {}

    def of(self, job: PlanJob) -> Bucket:
        name = (job.user if self._same_user else "", job.partition, job.gpu_count, job.node_count)
        bucket = self._known.get(name)
        if bucket is None:
            bucket = self._known[name] = Bucket(*name)
        return bucket


def waited_s(job: PlanJob, now_s: float) -> float:
    """Seconds since a job last received service, or since its submission."""
    return now_s - (job.submit_s if job.waiting_since_s is None else job.waiting_since_s)


def _order(request: PlanRequest, key: PriorityKey, max_wait_s: float) -> Callable[[PlanJob], tuple[float, ...]]:
    """The key, and before it whether the job is over the aging bound where Slurm doesn't take such jobs.

    A running job counts as aged only where it still carries `waiting_since_s` from before its start.
    """
    if request.larger_than_a_node == "slurm":
        return lambda job: full_key(key, job)
    now_s = request.now_s
    waiting = {job.job_id for job in request.jobs if waited_s(job, now_s) > max_wait_s}
    waiting |= {
        job.job_id
        for unit in request.running
        for job in unit.members
        if job.waiting_since_s is not None and waited_s(job, now_s) > max_wait_s
    }
    return lambda job: (0.0 if job.job_id in waiting else 1.0, *full_key(key, job))


def full_key(key: PriorityKey, job: PlanJob) -> tuple[float, ...]:
    """A job's key and what breaks ties: the earlier submission, then the lower id."""
    return (*key(job), job.submit_s, job.job_id)
