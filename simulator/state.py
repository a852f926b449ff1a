"""What is true of a job and of the GPUs that it runs on, at one moment of a simulation."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import HostShares, NodeShare, PlanJob, Running
from muri.profiler.records import StageProfile
from muri.simulator.model import JobRecord, TraceJob

PARTITION = "all"
"""A simulated cluster is one partition."""


@dataclass(slots=True, eq=False)
class LiveJob:
    """A job between its submission and its end.

    Attributes:
        job: What the trace says of it.
        shape: Number of its true profile and sensitivity; equal ones have one number.
        planned: The profile that policies see.
        gpu_utilization: Share of its GPUs' time that it computes on them when alone, as policies see it.
        sensitivity: Its throughput over CPUs and host memory; None where these are unlimited.
        restart_s: Seconds that a restart costs it.
        service_s: Seconds of service that it needs alone.
        done_s: Of these, what it had received at `since_s`.
        kept_s: What it had received when it last started, as its checkpoint has it.
        since_s: Since when it has run at `speed` in the same company.
        speed: Seconds of service per second, now; 0 while it restarts.
        pace: What its speed is when it does not restart.
        resuming: Whether it is loading its checkpoint.
        resumes_s: Until when.
        version: Grows with every change of speed, which outdates events announced before.
        unit: What it runs in; None while it waits.
        start_s: First start; None before it.
        waiting_since_s: When it was last stopped; None before that.
        run_s: Seconds on GPUs until `since_s`.
        shared_s: Of these, those in a group.
        gpu_share_s: GPU-seconds until `since_s`, those of a group divided among its members.
        restarts: Starts after the first, moves and regroupings.
        out_of_memory: How often it failed for want of GPU memory.
        gpu_mem_request_gib: GPU memory that it asks for since; None before.
        fastest: The highest speed that it has had.
        as_waiting: What policies see of it, kept while it waits, for then nothing of it changes.
    """

    job: TraceJob
    shape: int
    planned: StageProfile
    gpu_utilization: float
    sensitivity: Sensitivity | None
    restart_s: float
    service_s: float
    done_s: float = 0.0
    kept_s: float = 0.0
    since_s: float = 0.0
    speed: float = 0.0
    pace: float = 0.0
    resuming: bool = False
    resumes_s: float = 0.0
    version: int = 0
    unit: "Unit | None" = None
    start_s: float | None = None
    waiting_since_s: float | None = None
    run_s: float = 0.0
    shared_s: float = 0.0
    gpu_share_s: float = 0.0
    restarts: int = 0
    out_of_memory: int = 0
    gpu_mem_request_gib: float | None = None
    fastest: float = 0.0
    as_waiting: PlanJob | None = None

    def settle(self, now_s: float) -> None:
        """Count what it has received at its present speed."""
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
        """Seconds of service that it has received by now."""
        return min(self.service_s, self.done_s + self.speed * (now_s - self.since_s))

    def ends_at(self, now_s: float) -> float:
        """When it ends at its present speed, which is above 0."""
        return now_s + max(0.0, self.service_s - self.done_s) / self.speed

    def as_planned(self, now_s: float, *, durations_known: bool, checkpoints: bool) -> PlanJob:
        """What policies see of it now."""
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
        """What became of it."""
        assert self.start_s is not None
        return JobRecord(self.job, self.start_s, end_s, self.run_s, self.restarts, self.shared_s, self.out_of_memory)


PROPORTIONAL: Final[HostShares] = MappingProxyType({})
"""The host shares of a unit that has as much of the CPUs and memory of its nodes as of their GPUs."""


class Seat(NamedTuple):
    """What a unit holds, and how its members run on it; another one means a restart.

    Attributes:
        gpus: GPUs.
        host_shares: CPUs and memory by member; empty: the GPU-proportional share.
        accumulate_steps: Steps in which each iteration's batch is computed.
        mode: How members share, as in `muri.policies.types.Group`.
    """

    gpus: tuple[NodeShare, ...]
    host_shares: HostShares = PROPORTIONAL
    accumulate_steps: int = 1
    mode: Literal["interleave", "plain"] = "interleave"


@dataclass(slots=True, eq=False)
class Unit:
    """One job, or several that share GPUs.

    Attributes:
        number: In order of starting.
        members: The jobs in the ordering in which they interleave.
        seat: What they hold.
        nodes: Indices of the nodes.
        gpu_count: GPUs that they hold.
        since_s: Since when just these jobs run here.
        given: CPUs and memory of each of its GPUs; None: the GPU-proportional share.
        own_gpus: Of a job that shares GPUs one by one: how many it has, those with n jobs counted as 1/n.
        company: Of such a job: whether others are on one of its GPUs.
        doomed: Of such a job: whether it needs more GPU memory than others have left, and is about to fail.
    """

    number: int
    members: list[LiveJob]
    seat: Seat
    nodes: tuple[int, ...]
    gpu_count: int
    since_s: float
    given: Demand | None = None
    own_gpus: float | None = None
    company: bool = False
    doomed: bool = False

    @property
    def mem_gib(self) -> float:
        """GPU memory that a unit of one job really needs on each of its GPUs."""
        return self.members[0].job.mem_gib_in(self.seat.accumulate_steps)

    def as_running(self, now_s: float, *, durations_known: bool, checkpoints: bool) -> Running:
        """What policies see of it now."""
        seen = [
            live.as_planned(now_s, durations_known=durations_known, checkpoints=checkpoints) for live in self.members
        ]
        seat = self.seat
        return Running(tuple(seen), seat.gpus, seat.host_shares, seat.accumulate_steps, seat.mode)
