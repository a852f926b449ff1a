"""Jobs at one moment of a simulation: their service, the units that run them, and the queue of waiting jobs."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from muri.policies.cycle.planner import JOINERS_PER_SEAT
from muri.policies.cycle.queue import full_key
from muri.policies.schedulers import FixedOrder, QueuePolicy, SrsfOrLas
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import CpuMemShares, NodeShare, PlanJob, PlanRequest, Policy, PriorityKey, Running, waited_s
from muri.profiler.records import StageProfile
from muri.simulator.model import JobRecord, TraceJob

PARTITION = "all"
"""A simulated cluster is one partition."""

_TIMELESS: Final = (FixedOrder.key, SrsfOrLas.key)
"""Orders of waiting jobs that do not change while they wait."""


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job between its submission and its end."""

    job: TraceJob  # The job of the trace
    shape: int  # Number of its true profile and sensitivity; equal ones have one number
    planned: StageProfile  # The profile that policies see
    gpu_utilization: float  # Share of its GPUs' time that it computes on them when alone, as policies see it
    sensitivity: Sensitivity | None  # Its throughput over CPUs and host memory; None where these are unlimited
    restart_s: float  # Seconds that a restart costs it
    service_s: float  # Seconds of service that it needs alone
    done_s: float = 0.0  # Of these, the seconds received until `since_s`
    kept_s: float = 0.0  # Seconds of service in its checkpoint, which it made when it last started
    since_s: float = 0.0  # Since when it has run at `speed` with the same partners
    speed: float = 0.0  # Seconds of service per second, now; 0 while it restarts
    pace: float = 0.0  # What its speed is when it does not restart
    resuming: bool = False  # Whether it is loading its checkpoint
    resumes_s: float = 0.0  # When that ends
    version: int = 0  # Grows with every change of speed, which outdates events announced before
    unit: "Unit | None" = None  # The unit that it runs in; None while it waits
    start_s: float | None = None  # First start; None before it
    waiting_since_s: float | None = None  # When it was last stopped; None before the first stop
    run_s: float = 0.0  # Seconds on GPUs until `since_s`
    shared_s: float = 0.0  # Of these, those in a group
    gpu_share_s: float = 0.0  # GPU-seconds until `since_s`, those of a group divided among its members
    restarts: int = 0  # Starts after the first, moves and regroupings
    out_of_memory: int = 0  # How often it failed because GPU memory was short
    gpu_mem_request_gib: float | None = None  # GPU memory that it has asked for since; None before the first failure
    fastest: float = 0.0  # The highest speed that it has had
    # What policies see of it; computed once, because nothing of a waiting job changes
    as_waiting: PlanJob | None = None

    def settle(self, now_s: float) -> None:
        """Count the service received at the present speed."""
        elapsed_s = now_s - self.since_s
        self.since_s = now_s
        if self.unit is None or elapsed_s <= 0:
            return
        unit, companions = self.unit, len(self.unit.members)
        self.done_s += self.speed * elapsed_s
        self.run_s += elapsed_s
        own = self.job.gpu_count / companions if unit.own_gpus is None else unit.own_gpus
        self.gpu_share_s += elapsed_s * own
        if companions > 1 or unit.company:
            self.shared_s += elapsed_s

    def done_at(self, now_s: float) -> float:
        """Seconds of service received by now."""
        return min(self.service_s, self.done_s + self.speed * (now_s - self.since_s))

    def ends_at(self, now_s: float) -> float:
        """End at the present speed, which is above 0."""
        return now_s + max(0.0, self.service_s - self.done_s) / self.speed

    def as_planned(self, now_s: float, *, durations_known: bool, checkpoints: bool) -> PlanJob:
        """What policies see now."""
        job, done_s = self.job, self.done_at(now_s)
        return PlanJob(
            job_id=job.job_id,
            user=job.user,
            partition=PARTITION,
            gpu_count=job.gpu_count,
            submit_s=job.submit_s,
            profile=self.planned,
            remaining_s=self.service_s - done_s if durations_known else None,
            attained_gpu_s=done_s * job.gpu_count,
            waiting_since_s=self.waiting_since_s if self.unit is None else None,
            restart_s=self.restart_s,
            preemptible=checkpoints,
            opportunistic=job.opportunistic,
            sensitivity=self.sensitivity,
            batch=job.batch,
            gpu_utilization=self.gpu_utilization,
            gpu_mem_request_gib=self.gpu_mem_request_gib,
        )

    def record(self, end_s: float) -> JobRecord:
        """The record of the ended job."""
        assert self.start_s is not None
        return JobRecord(self.job, self.start_s, end_s, self.run_s, self.restarts, self.shared_s, self.out_of_memory)


PROPORTIONAL: Final[CpuMemShares] = MappingProxyType({})
"""The host shares of a unit whose share of CPUs and memory is that of the GPUs."""


class Seat(NamedTuple):
    """The resources of a unit, and how its members share them; another one means a restart."""

    gpus: tuple[NodeShare, ...]  # GPUs
    cpu_mem_shares: CpuMemShares = PROPORTIONAL  # CPUs and memory by member; empty: the GPU-proportional share
    accumulate_steps: int = 1  # Steps in which each iteration's batch is computed
    mode: Literal["interleave", "plain"] = "interleave"  # How members share, as in `muri.policies.types.Group`


@dataclass(slots=True, eq=False)
class Unit:
    """One job, or several that share GPUs."""

    number: int  # In order of starting
    members: list[LiveJob]  # The jobs in the ordering in which they interleave
    seat: Seat
    nodes: tuple[int, ...]  # Indices of the nodes
    gpu_count: int  # GPUs that they hold
    since_s: float  # Since when just these jobs run here
    given: Demand | None = None  # CPUs and memory of each of its GPUs; None: the GPU-proportional share
    # Of a job that shares GPUs one by one: the number of its GPUs, each with n jobs counted as 1/n
    own_gpus: float | None = None
    company: bool = False  # Of such a job: whether it shares any of its GPUs
    doomed: bool = False  # Of such a job: whether it needs more GPU memory than others leave, and is about to fail

    @property
    def mem_gib(self) -> float:
        """GPU memory that a unit of one job really needs on each of its GPUs."""
        return self.members[0].job.mem_gib_in(self.seat.accumulate_steps)

    def as_running(self, now_s: float, *, durations_known: bool, checkpoints: bool) -> Running:
        """What policies see now."""
        seen = [
            live.as_planned(now_s, durations_known=durations_known, checkpoints=checkpoints) for live in self.members
        ]
        seat = self.seat
        # Members with CPUs and memory of their own have none for others.
        joinable = not seat.cpu_mem_shares
        return Running(tuple(seen), seat.gpus, seat.cpu_mem_shares, seat.accumulate_steps, seat.mode, joinable=joinable)


def planned_profiles(jobs: Sequence[TraceJob], noise: float, seed: int) -> dict[int, StageProfile]:
    """The profiles that policies see, by job id; equal ones are one object, because planning looks at each object once.

    Every stage of every job gets a factor of its own from U[1 − n_p, 1 + n_p], drawn from the seed and the job's
    id alone. The iteration time changes as the sum of the stages does.
    """
    if noise <= 0:
        same: dict[StageProfile, StageProfile] = {}
        return {job.job_id: same.setdefault(job.profile, job.profile) for job in jobs}
    return {job.job_id: _noisy(job, noise, seed) for job in jobs}


def _noisy(job: TraceJob, noise: float, seed: int) -> StageProfile:
    true = job.profile
    factors = np.random.default_rng((seed, job.job_id)).uniform(1.0 - noise, 1.0 + noise, len(true.stage_s)).tolist()
    stages = [stage_s * factor for stage_s, factor in zip(true.stage_s, factors, strict=True)]
    busy_s = sum(true.stage_s)
    stretch = sum(stages) / busy_s if busy_s > 0 else 1.0
    if stretch <= 0:
        return true
    return replace(
        true,
        load_s=stages[0],
        preprocess_s=stages[1],
        propagate_s=stages[2],
        synchronize_s=stages[3],
        iteration_s=true.iteration_s * stretch,
    )


Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How much of the queue a plan needs."""

    # Jobs that may share with each other, so of one GPU count, and of one user where users do not mix, for each set of
    # that many GPUs; None: the whole queue
    per_slot: int | None = None
    timeless: bool = False  # Whether the order among waiting jobs never changes
    max_wait_s: float = float("inf")  # The aging bound
    # Order of priority for a request; None where the whole queue is seen
    key: Callable[[PlanRequest], PriorityKey] | None = None


def view_of(policy: Policy, *, checkpoints: bool = False) -> View:
    """The part of the queue that a policy needs: all of it where the policy has a `plan` of its own."""
    if not isinstance(policy, QueuePolicy) or type(policy).plan is not QueuePolicy.plan:
        return View()
    rules = policy.rules
    endless = rules.max_wait_s == float("inf")
    size = rules.max_group_size
    # Where everything that runs is up for decision, nothing takes jobs beside those that groups are chosen from.
    joined = rules.join and not (rules.preemption and checkpoints)
    considered = max(size, JOINERS_PER_SEAT * (size - 1)) if joined else size
    return View(considered + 1, endless and type(policy).key in _TIMELESS, rules.max_wait_s, policy.key)


class _Sharers(NamedTuple):
    """What waiting jobs that may share with each other have in common."""

    gpu_count: int
    user: str


class WaitingJobs:
    """The queue."""

    def __init__(self, view: View, *, any_user: bool = True) -> None:
        self._view = view
        self._any_user = any_user
        self._jobs: dict[int, LiveJob] = {}
        self._sorted: dict[_Sharers, list[tuple[Key, LiveJob]]] = {}
        self._keys: dict[int, Key] = {}
        self._key: PriorityKey | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._jobs)

    def __iter__(self) -> Iterable[LiveJob]:
        """The waiting jobs, in the order in which they began to wait."""
        return iter(self._jobs.values())

    def add(self, live: LiveJob) -> None:
        """Add a job, whose `as_waiting` is up to date."""
        assert live.as_waiting is not None
        self._jobs[live.job.job_id] = live
        if self._view.timeless:
            key = self._fixed_key(live.as_waiting)
            self._keys[live.job.job_id] = key
            insort(self._sorted.setdefault(self._sharers(live), []), (key, live))

    def remove(self, live: LiveJob) -> None:
        """Remove a job."""
        del self._jobs[live.job.job_id]
        if self._view.timeless:
            sharers = self._sharers(live)
            ranked = self._sorted[sharers]
            key = self._keys.pop(live.job.job_id)
            del ranked[bisect_left(ranked, key, key=lambda item: item[0])]
            if not ranked:
                del self._sorted[sharers]

    def reduce(self, request: PlanRequest, gpu_count: int) -> PlanRequest:
        """Add the waiting jobs that matter to a request."""
        if self._view.per_slot is None:
            return replace(request, jobs=tuple([job for job in self._seen() if job.gpu_count <= gpu_count]))
        ranked = self._sorted if self._view.timeless else self._ranked_now(request, gpu_count)
        jobs: list[PlanJob] = []
        for sharers in sorted(ranked):
            limit = self._view.per_slot * (gpu_count // sharers.gpu_count)
            jobs += [live.as_waiting for _, live in ranked[sharers][:limit] if live.as_waiting is not None]
        return replace(request, jobs=tuple(jobs))

    def _ranked_now(self, request: PlanRequest, gpu_count: int) -> dict[_Sharers, list[tuple[Key, LiveJob]]]:
        assert self._view.key is not None
        assert self._view.per_slot is not None
        key = self._view.key(replace(request, jobs=tuple(self._seen())))
        found: dict[_Sharers, list[tuple[Key, LiveJob]]] = {}
        for live in self._jobs.values():
            job = live.as_waiting
            assert job is not None
            young = waited_s(job, request.now_s) <= self._view.max_wait_s
            found.setdefault(self._sharers(live), []).append(((float(young), *full_key(key, job)), live))
        limit = {sharers: self._view.per_slot * (gpu_count // sharers.gpu_count) for sharers in found}
        return {sharers: nsmallest(limit[sharers], jobs) for sharers, jobs in found.items()}

    def _sharers(self, live: LiveJob) -> _Sharers:
        return _Sharers(live.job.gpu_count, "" if self._any_user else live.job.user)

    def _seen(self) -> list[PlanJob]:
        return [live.as_waiting for live in self._jobs.values() if live.as_waiting is not None]

    def _fixed_key(self, job: PlanJob) -> Key:
        if self._key is None:
            assert self._view.key is not None
            self._key = self._view.key(PlanRequest((job,), (), 0.0))
        return full_key(self._key, job)
