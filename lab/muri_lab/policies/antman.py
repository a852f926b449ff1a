"""AntMan: opportunistic jobs live on what guaranteed ones leave over."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import SlurmQueue
from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.queue import Bucket, line_up
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import TO_THE_END, QueuePolicy
from muri.policies.siblings.packed import keeps_promise, with_promises
from muri.policies.speed import Shape, figures_of, shape_of
from muri.policies.types import (
    Group,
    NodeShare,
    Plan,
    PlanJob,
    PlanRequest,
    PriorityKey,
    Reason,
    Running,
    Solo,
    Waiting,
)

GUARANTEED_SPEED: Final = 0.95
"""Minimum speed of a running guaranteed job. Hand-overs and the scatter of measured speeds take the rest: a minimum of
1 would count as broken beside any job, and even alone.
"""

_NOT_STOPPED = Reason("antman stops nothing that runs")
_NO_PROFILE = Reason("it runs alone until its model is profiled")


class LeftoverPace:
    """True speeds in a simulation: the first at full speed, the others at the rest."""

    def speeds(self, members: tuple[Shape, ...]) -> tuple[float, ...]:
        """Speed of each, 1 = as fast as alone."""
        return (1.0, *(leftover_speed(members[0], other) for other in members[1:]))

    def order(self, planned: Sequence[Shape]) -> tuple[int, ...]:
        """The members as they are."""
        return tuple(range(len(planned)))


class AntMan(QueuePolicy):
    """Guaranteed jobs at full speed; opportunistic ones take what is left over.

    Guaranteed jobs go first, in order of submission, and nothing is ever stopped. GPUs hold at most one guaranteed and
    one opportunistic job, of one bucket. A job takes free GPUs, else it joins one of the other class, so an
    opportunistic job never keeps out a guaranteed one that leaves it something. Jobs without a profile run alone. The
    runtime gives a guaranteed job `GUARANTEED_SPEED`; an opportunistic job's own `min_speed` only limits its partners.

    Source: AntMan (Xiao et al., OSDI 2020), its two classes of jobs. AntMan itself measures and adjusts while jobs run.
    """

    name = "antman"
    order = "class, submit time"
    fixed = TO_THE_END
    pace = LeftoverPace()

    def key(self, request: PlanRequest) -> PriorityKey:
        """Guaranteed jobs before opportunistic ones."""
        return lambda job: (float(job.opportunistic),)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request)
        request = with_promises(request, self.rules.min_speed)
        cycle = AntManCycle(self.rules, request)
        # What runs comes first, because nothing is stopped and waiting jobs may join it.
        for unit in sorted(request.running, key=lambda unit: min(job.job_id for job in unit.members)):
            cycle.seat(Seat(list(unit.members), unit.gpus, kept=True, runs=unit))
        for contender in line_up(request, self.key(request), self.rules).contenders:
            cycle.decide(contender.job)
        return replace(cycle.result(self.name), promises=_promises(request))


def _promises(request: PlanRequest) -> dict[int, float]:
    """What each waiting job is promised once it runs; what was promised to a job that runs stays."""
    return {job.job_id: 0.0 if job.opportunistic else max(GUARANTEED_SPEED, job.min_speed) for job in request.jobs}


def shape_to_share(job: PlanJob) -> Shape | None:
    """What sharing depends on; None for a job that must be alone or whose stage times are unknown."""
    if not job.may_share or job.profile is None or sum(job.profile.stage_s) <= 0:
        return None
    return shape_of(job.profile)


def leftover_speed(guaranteed: Shape, opportunistic: Shape) -> float:
    """Return the speed of an opportunistic job that gets the rest of a guaranteed one at full speed.

    With u^j for the share of its time alone during which a job uses resource j:

        s = min(1, min over j with u_o^j > 0 of  (1 - u_g^j) / u_o^j)

    so the resource that is scarcest for it decides; 0 where the guaranteed job never lets go of one it needs.
    """
    share: Sequence[Sequence[float]] = figures_of((guaranteed, opportunistic)).share.tolist()
    return max(0.0, min(1.0, *((1 - of_first) / of_second for of_first, of_second in share if of_second > 0)))


@dataclass(slots=True)
class Seat:
    """GPUs, and who is on them."""

    jobs: list[PlanJob]  # One job, or a guaranteed and an opportunistic one
    gpus: tuple[NodeShare, ...]
    kept: bool = False  # Whether just these jobs run there already
    runs: Running | None = None  # What runs there already; None for GPUs that were free

    @property
    def gpu_count(self) -> int:
        """How many GPUs these are."""
        return self.jobs[0].gpu_count

    @property
    def joining(self) -> tuple[int, ...]:
        """Those that join what runs there."""
        at_work = () if self.runs is None else self.runs.members
        return () if self.runs is None else tuple(job.job_id for job in self.jobs if job not in at_work)

    def takes(self, job: PlanJob) -> bool:
        """Whether what runs there lets a job in."""
        unit = self.runs
        if unit is None:
            return True
        return unit.joinable and job.job_id not in unit.closed_to and job.mem_gib <= unit.spare_mem_gib

    def join(self, job: PlanJob) -> None:
        """Put a second job on it."""
        self.jobs = sorted([*self.jobs, job], key=lambda member: member.opportunistic)
        self.kept = False


@dataclass(slots=True)
class OpenSeats:
    """Seats that one job of the other class may join."""

    same_user: bool  # Whether both must have one owner
    min_speedup: float  # Least sum of both speeds
    gpu_mem_gib: Mapping[str, float]  # Memory of a GPU by node; 0 when unknown
    _open: dict[tuple[Bucket, bool], dict[Shape, list[Seat]]] = field(default_factory=dict)
    _leftover: dict[tuple[Shape, Shape], float] = field(default_factory=dict)

    def offer(self, seat: Seat) -> None:
        """Let others join the one job of a seat, if enough is known of it."""
        job = seat.jobs[0]
        shape = shape_to_share(job)
        if len(seat.jobs) == 1 and shape is not None:
            seats = self._open.setdefault((Bucket.of(job, same_user=self.same_user), job.opportunistic), {})
            seats.setdefault(shape, []).append(seat)

    def take(self, job: PlanJob) -> Seat | None:
        """Give the seat on which the opportunistic one of the two gets on fastest; the first offered on a tie."""
        shape = shape_to_share(job)
        if shape is None:
            return None
        seats = self._open.get((Bucket.of(job, same_user=self.same_user), not job.opportunistic), {})
        best: tuple[float, list[Seat], Seat] | None = None
        for other, offered in seats.items():
            speed = self._speed(other, shape) if job.opportunistic else self._speed(shape, other)
            if speed <= 0 or 1 + speed < self.min_speedup or (best is not None and speed <= best[0]):
                continue
            needed_gib = shape.gpu_mem_gib + other.gpu_mem_gib
            fitting = (seat for seat in offered if seat.takes(job) and self._has_memory(seat, needed_gib))
            # The other of the two keeps its full speed.
            seat = next(
                (seat for seat in fitting if keeps_promise(job if job.opportunistic else seat.jobs[0], speed)), None
            )
            best = best if seat is None else (speed, offered, seat)
        if best is None:
            return None
        best[1].remove(best[2])
        return best[2]

    def _speed(self, guaranteed: Shape, opportunistic: Shape) -> float:
        pair = (guaranteed, opportunistic)
        if pair not in self._leftover:
            self._leftover[pair] = leftover_speed(*pair)
        return self._leftover[pair]

    def _has_memory(self, seat: Seat, needed_gib: float) -> bool:
        known = [self.gpu_mem_gib[share.node] for share in seat.gpus if self.gpu_mem_gib[share.node]]
        return all(needed_gib <= capacity_gib for capacity_gib in known)


def _group(seat: Seat) -> Group:
    """Two jobs that share: the guaranteed one at full speed, the other at the rest.

    A group that another policy started may have more guaranteed jobs: the first is given full speed here.
    """
    shapes = [Shape((0.0,) * 4, 1.0) if job.profile is None else shape_of(job.profile) for job in seat.jobs]
    speeds = [1.0, *(leftover_speed(shapes[0], shape) for shape in shapes[1:])]
    used = sum(speed * _busy(shape) for speed, shape in zip(speeds, shapes, strict=True))
    first, second = seat.jobs[:2]
    why = Reason(
        "{} keeps its full speed; {} gets on at {:.2f} of its own with what is left over",
        (first.job_id, second.job_id, speeds[1]),
    )
    return Group(
        members=tuple(job.job_id for job in seat.jobs),
        gpus=seat.gpus,
        gpu_count=seat.gpu_count,
        period_s=0.0,
        efficiency=min(1.0, used),
        speed={job.job_id: speed for job, speed in sorted(zip(seat.jobs, speeds, strict=True), key=_job_id)},
        reasons=(why, _where(seat)),
        kept=seat.kept,
        joining=seat.joining,
    )


def _where(seat: Seat) -> Reason:
    """On which GPUs a pair is, and who came there last."""
    if seat.runs is not None and not seat.kept:
        others = [job.job_id for job in seat.runs.members]
        return reasons.joined(seat.joining, others, seat.gpu_count, seat.gpus)
    return (reasons.kept if seat.kept else reasons.sharing)(seat.gpu_count, seat.gpus)


def _solo(seat: Seat) -> Solo:
    """A job that has its GPUs to itself."""
    (job,) = seat.jobs
    if seat.kept:
        return Solo(job.job_id, (reasons.kept(seat.gpu_count, seat.gpus), _NOT_STOPPED), seat.gpus, kept=True)
    return Solo(job.job_id, (reasons.given(job, seat.gpus),), seat.gpus)


def _waiting(job: PlanJob, no_gpus: Reason, *, sharing: bool) -> Waiting:
    """A job that finds neither free GPUs nor anybody to join."""
    if not sharing:
        return Waiting(job.job_id, (no_gpus,))
    if not job.may_share:
        return Waiting(job.job_id, (no_gpus, reasons.must_run_alone(job)))
    if job.profile is None:
        return Waiting(job.job_id, (no_gpus, _NO_PROFILE))
    other = "guaranteed" if job.opportunistic else "opportunistic"
    nobody = Reason("no {} job of the same user, partition and GPU count can share its GPUs with it", (other,))
    return Waiting(job.job_id, (no_gpus, nobody))


def _job_id(item: tuple[PlanJob, float]) -> int:
    return item[0].job_id


def _busy(shape: Shape) -> float:
    """Mean share of a resource's time that the job uses alone."""
    return sum(min(1.0, stage_s / shape.iteration_s) for stage_s in shape.stage_s) / len(shape.stage_s)


class AntManCycle:
    """The decisions so far."""

    def __init__(self, rules: PolicyOptions, request: PlanRequest) -> None:
        self._sharing = min(rules.max_group_size, request.max_group_size) > 1
        self._free = FreeGpus(request.nodes, whole_nodes=request.larger_than_a_node != "slurm")
        memory = {node.name: node.gpu_mem_gib for node in request.nodes}
        self._open = OpenSeats(request.same_user, rules.min_speedup, memory)
        self._seats: list[Seat] = []
        self._released: list[Solo] = []
        self._slurm = SlurmQueue(request, self._free, rules.max_wait_s, self._released, self._free.set_aside)
        self._waiting: list[PlanJob] = []

    def seat(self, seat: Seat) -> None:
        """Put jobs on GPUs of their own, or keep them there."""
        self._seats.append(seat)
        if self._sharing:
            self._open.offer(seat)

    def decide(self, job: PlanJob) -> None:
        """Choose free GPUs, else those of one other job, else Slurm's own queue after `max_wait_s`, else waiting."""
        if self._slurm.takes_larger(job):
            return
        gpus = self._slurm.gpus_alone(job)
        if gpus is not None:
            self.seat(Seat([job], gpus))
            return
        seat = self._open.take(job)
        if seat is not None:
            seat.join(job)
        elif not self._slurm.takes_overdue(job):
            self._waiting.append(job)

    def result(self, name: str) -> Plan:
        """The plan."""
        shared = tuple(_group(seat) for seat in self._seats if len(seat.jobs) > 1)
        alone = tuple(_solo(seat) for seat in self._seats if len(seat.jobs) == 1)
        return Plan(name, shared, (*alone, *self._released), tuple(self._explain_waiting()))

    def _explain_waiting(self) -> Iterator[Waiting]:
        why = reasons.WaitingReasons(self._free, whole_nodes=not self._slurm.is_there)
        for job in self._waiting:
            yield _waiting(job, why.of(job), sharing=self._sharing)
            why.count(job)
