"""The queue of one cycle: every job that GPUs can be given to, the most urgent first, and the selection from it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.validation import RequestError
from muri.policies.options import PolicyOptions
from muri.policies.speed import Shape, shape_of
from muri.policies.types import PlanJob, PlanRequest, PriorityKey, Running, waited_s

REFERENCE_GPU_S: Final = 3600.0  # A job with this many GPU-seconds of service left has worth 1
_LEAST_REMAINING_S: Final = 1.0
_LEAST_ATTAINED_GPU_S: Final = 60.0  # Service below which jobs count as equally short, so that no worth is infinite


class Bucket(NamedTuple):
    """Properties that members of a group must have in common; the user is empty where users may mix."""

    user: str
    partition: str
    gpu_count: int
    node_count: int = 1
    domain: str = ""

    @property
    def size(self) -> tuple[str, int, int]:
        """Partition, GPUs and nodes: jobs of equal size fit in the same places."""
        return self.partition, self.gpu_count, self.node_count

    @staticmethod
    def of(job: PlanJob, *, same_user: bool) -> "Bucket":
        """The bucket of a job; `same_user`: whether members must have one owner."""
        return Bucket(job.user if same_user else "", job.partition, job.gpu_count, job.node_count, job.domain)


class Contender(NamedTuple):
    """A job and its place in the queue.

    Attributes:
        rank: 0 for the most urgent job.
        job: The job.
        bucket: The jobs that it may share with.
        shape: Index of its shape in the queue's; None for a job that cannot share.
        unit: Its running unit; None for a waiting job.
    """

    rank: int
    job: PlanJob
    bucket: Bucket
    shape: int | None
    unit: Running | None


Members = tuple[Contender, ...]  # The members of one group by rank


class Queue(NamedTuple):
    """The jobs of a request: those that GPUs can be given to, by rank, running units that are not up for decision
    (ranks count within each), and the distinct shapes, sorted.
    """

    contenders: tuple[Contender, ...]
    fixed: tuple[tuple[Contender, ...], ...]
    shapes: tuple[Shape, ...]


def line_up(request: PlanRequest, key: PriorityKey, options: PolicyOptions) -> Queue:
    """All jobs in order of urgency, whatever order they come in; ties go to the earlier, then the lower id."""
    movable = [unit for unit in request.running if is_movable(unit, request, options)]
    unit_of = {job.job_id: unit for unit in movable for job in unit.members}
    jobs = [*request.jobs, *(job for unit in movable for job in unit.members)]
    jobs.sort(key=_order(request, key, options.max_wait_s))
    table = ShapeTable([*request.jobs, *(job for unit in request.running for job in unit.members)])
    buckets = _Buckets(same_user=request.same_user)
    # One list comprehension, because a queue may have a hundred thousand jobs.
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
    """Whether a running unit competes with waiting jobs; Slurm keeps jobs larger than a node that it placed."""
    spans = len(unit.gpus) > 1 and request.larger_than_a_node == "slurm"
    return options.preemption and unit.preemptible and not spans


def full_key(key: PriorityKey, job: PlanJob) -> tuple[float, ...]:
    """A job's key with tie-breakers: the earlier submission, then the lower id.

    Raises:
        RequestError: The key has a NaN, which is neither before nor after anything.
    """
    own = key(job)
    if [part for part in own if part != part]:  # noqa: PLR0124 (so is NaN told apart, whatever a key is made of)
        raise RequestError(f"the policy's key of job {job.job_id} is not a number (NaN): {own}", job.job_id)
    return (*own, job.submit_s, job.job_id)


def worth_of(job: PlanJob) -> float:
    """The worth of a second of a job's full-speed progress: the inverse of its remaining service.

    This is Smith's rule, which shortens the mean completion time. Where the duration is unknown, the service attained
    so far stands in, as in 2D-LAS.
    """
    if job.remaining_s is not None:
        return REFERENCE_GPU_S / (max(_LEAST_REMAINING_S, job.remaining_s) * job.gpu_count)
    return REFERENCE_GPU_S / max(_LEAST_ATTAINED_GPU_S, job.attained_gpu_s)


class ShapeTable:
    """The distinct shapes of a request's jobs, sorted; the jobs must outlive the table."""

    def __init__(self, jobs: Iterable[PlanJob]) -> None:
        profiles = {id(job.profile): job.profile for job in jobs}
        known = [
            (key, profile) for key, profile in profiles.items() if profile is not None and sum(profile.stage_s) > 0
        ]
        shapes = {key: shape_of(profile) for key, profile in known}
        self.shapes = tuple(sorted(set(shapes.values())))
        number = {shape: index for index, shape in enumerate(self.shapes)}
        self._of_profile = {key: number[shape] for key, shape in shapes.items()}

    def index(self, job: PlanJob) -> int | None:
        """Index of the job's shape; None for a job that cannot share, or of unknown shape."""
        return self._of_profile.get(id(job.profile)) if job.groupable and job.largest_group > 1 else None


class _Buckets:
    """Equal buckets are one object."""

    def __init__(self, *, same_user: bool) -> None:
        self._same_user = same_user
        self._known: dict[tuple[str, str, int, int, str], Bucket] = {}

    def of(self, job: PlanJob) -> Bucket:
        # Looked up by a plain tuple, which takes a tenth of the time of making a bucket.
        user = job.user if self._same_user else ""
        fields = (user, job.partition, job.gpu_count, job.node_count, job.domain)
        bucket = self._known.get(fields)
        if bucket is None:
            bucket = self._known[fields] = Bucket(*fields)
        return bucket


def _order(request: PlanRequest, key: PriorityKey, max_wait_s: float) -> Callable[[PlanJob], tuple[float, ...]]:
    """The key, preceded by whether the job is over the aging bound where Slurm doesn't take such jobs.

    A running job counts as aged only where it still has `waiting_since_s` from before its start.
    """
    if request.larger_than_a_node == "slurm" or max_wait_s == float("inf"):
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


def groups_needed(sizes: Mapping[int, int]) -> int:
    """The fewest groups that take in all jobs, given the number of jobs by the largest group that they may be in.

    Those that may only be in small groups form groups of their own; free places in their last group go to the next.
    """
    groups = spare = 0
    for size, count in sorted(sizes.items()):
        left = max(0, count - spare)
        more = -(-left // size)
        spare = max(0, spare - count) + more * size - left
        groups += more
    return groups


@dataclass(slots=True)
class Choice:
    """The jobs of one bucket that a cycle considers.

    Attributes:
        members: The jobs by rank.
        slots: Number of members with reserved GPUs, so of groups that fit.
        limited: Number of members that may only be in smaller groups than the cycle forms, by the largest size.
    """

    members: list[Contender] = field(default_factory=list)
    slots: int = 0
    limited: Counter[int] = field(default_factory=Counter)

    def has_seat(self, job: PlanJob, group_size: int) -> bool:
        """Whether the groups that fit, of at most `group_size` members, can take in one more job."""
        count = len(self.members)
        if not self.limited and job.largest_group >= group_size:
            return count < self.slots * group_size
        sizes = self.limited + Counter({group_size: count - self.limited.total()})
        sizes[min(job.largest_group, group_size)] += 1
        return groups_needed(sizes) <= self.slots

    def with_joiners(self, waiting: Iterable[Contender], count: int) -> "Choice":
        """The same with the `count` most urgent other waiting jobs, who get no GPUs but may join running units."""
        ranks = {member.rank for member in self.members}
        others = islice((item for item in waiting if item.rank not in ranks), count)
        return Choice(sorted((*self.members, *others)), self.slots)

    def add(self, contender: Contender, group_size: int) -> None:
        """Consider a job, which is less urgent than the others."""
        self.members.append(contender)
        if contender.job.largest_group < group_size:
            self.limited[contender.job.largest_group] += 1


@dataclass(frozen=True, slots=True)
class Selection:
    """The jobs that a cycle considers.

    Attributes:
        alone: Jobs that cannot share and have GPUs reserved, by rank.
        buckets: The others.
        complete: Whether no job was passed over.
    """

    alone: tuple[Contender, ...]
    buckets: dict[Bucket, Choice]
    complete: bool

    @property
    def room_for_all(self) -> bool:
        """Whether every job can have GPUs of its own."""
        return self.complete and all(choice.slots == len(choice.members) for choice in self.buckets.values())


class _Trial:
    """Reservations on a copy; sizes that no longer fit are remembered, since free GPUs only get fewer."""

    def __init__(self, free: FreeGpus) -> None:
        self._free = free.copy()
        self._full: set[tuple[str, int, int]] = set()
        self.left = free.everywhere()  # GPUs that are not reserved

    def reserve(self, bucket: Bucket) -> bool:
        if bucket.gpu_count > self.left or bucket.size in self._full:
            return False
        if self._free.take(bucket.partition, bucket.gpu_count, node_count=bucket.node_count) is None:
            self._full.add(bucket.size)
            return False
        self.left -= bucket.gpu_count
        return True


def select(contenders: Iterable[Contender], free: FreeGpus, group_size: int) -> Selection:
    """Take jobs in order of priority until groups of `group_size` would fill the free GPUs, which are not changed.

    A job that finds GPUs reserves them and opens seats for the next jobs of its bucket. A job that finds neither a seat
    nor GPUs is passed over, so smaller jobs behind it are considered (backfill). GPUs that are left then go to jobs
    that have only a seat.

    Source: Muri, section 4.2: the first n jobs, with n such that groups of k fill the cluster.
    """
    trial = _Trial(free)
    buckets: dict[Bucket, Choice] = {}
    alone: list[Contender] = []
    seated: list[tuple[Bucket, Choice]] = []
    complete = True
    for contender in contenders:
        if group_size == 1 and not trial.left:
            complete = False
            break
        bucket = contender.bucket
        if contender.shape is None:
            if trial.reserve(bucket):
                alone.append(contender)
            else:
                complete = False
            continue
        choice = buckets.get(bucket)
        if choice is None:
            choice = buckets[bucket] = Choice()
        if choice.has_seat(contender.job, group_size):
            seated.append((bucket, choice))
        elif trial.reserve(bucket):
            choice.slots += 1
        else:
            complete = False
            continue
        choice.add(contender, group_size)
    # Only now, so that a seat never takes GPUs from a job further down that has no seat.
    for bucket, choice in seated:
        if trial.reserve(bucket):
            choice.slots += 1
    return Selection(tuple(alone), {bucket: choice for bucket, choice in buckets.items() if choice.slots}, complete)


def pools(request: PlanRequest) -> tuple[frozenset[str], ...]:
    """Sets of partitions that share no node with each other: each is planned by itself.

    A running job ties its partition to those of the nodes that it runs on.
    """
    partitions = {node.partitions for node in request.nodes} | {(job.partition,) for job in request.jobs}
    partitions |= {(job.partition,) for unit in request.running for job in unit.members}
    if len(partitions) == 1:
        return (frozenset(partitions.pop()),)
    of_node = {node.name: frozenset(node.partitions) for node in request.nodes}
    named = {frozenset({partition}) for partition in {job.partition for job in request.jobs}}
    named |= set(of_node.values())
    for unit in request.running:
        own = frozenset(job.partition for job in unit.members)
        named.add(own.union(*(of_node[share.node] for share in unit.gpus)))
    return tuple(sorted(_merged(named), key=sorted))


def _merged(named: Iterable[frozenset[str]]) -> Iterable[frozenset[str]]:
    """The sets, those that touch made one; there may be as many as jobs, so each is looked at once."""
    pool_of: dict[str, set[str]] = {}
    for partitions in named:
        touching = {id(pool): pool for partition in partitions if (pool := pool_of.get(partition)) is not None}
        # The smaller ones move into the largest, so that no partition moves often.
        smaller = sorted(touching.values(), key=len)
        pool = smaller.pop() if smaller else set()
        moving = partitions.union(*smaller).difference(pool)
        pool |= moving
        pool_of.update(dict.fromkeys(moving, pool))
    return [frozenset(pool) for pool in {id(pool): pool for pool in pool_of.values()}.values()]
