"""From a plan to starts: groups and jobs alone, with the CPUs and memory that the plan gives them. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from muri.clock import MIB_PER_GIB
from muri.policies.types import CpuMemShare, Group, NodeShare, Plan, Solo, sentences
from muri.profiler.estimates import why_estimated
from muri.profiler.records import StageProfile, dangers_text
from muri.slurm_plugin.config import Allocation, Config
from muri.slurm_plugin.planning.actions import GivenShare, Join, MemberPlan, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.cycle_input import Knowledge
from muri.slurm_plugin.planning.gathered import Gathered, KnownJob
from muri.slurm_plugin.planning.node_loads import Need
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S, SiteRoom
from muri.slurm_plugin.planning.slurm_requests import as_submitted, asked_by, pilot_mem_mib
from muri.slurm_plugin.records.cluster import Job, Node, NodeIndex
from muri.slurm_plugin.records.nodes import folded
from muri.slurm_plugin.records.roles import ManagedJob, RunningGroup


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a member runs."""

    kind: Literal["thread", "process"] = "process"  # As in `MemberSpec.isolation`
    why: str = ""  # For people; "" on a site without threads


@dataclass(frozen=True, slots=True)
class _Home:
    """What threads of one process must have in common."""

    python: str
    environment: str


def isolations(members: Sequence[KnownJob], mode: str, knowledge: Knowledge, config: Config) -> list[Isolation]:
    """Return how the members of a new group run: as threads the most that may share a process, if there are two."""
    if config.grouping.isolation == "process":
        return [Isolation()] * len(members)
    against = [_why_process(known.job, known.planned_profile, mode) for known in members]
    homes = [None if why else _home(known, knowledge) for known, why in zip(members, against, strict=True)]
    together = Counter(home for home in homes if home is not None).most_common(1)
    return [
        Isolation("process", why) if why else _among(home, *together[0]) if together else Isolation("process", _UNKNOWN)
        for home, why in zip(homes, against, strict=True)
    ]


_UNKNOWN = "its Python or its environment is not known"


def joins_later(config: Config) -> Isolation:
    """Return how a job runs that joins a group at work."""
    return Isolation() if config.grouping.isolation == "process" else Isolation("process", "it joined later")


def _why_process(job: ManagedJob, profile: StageProfile, mode: str) -> str:
    found = profile.detail.dangers
    if mode == "plain":
        return "members that share without turns have processes"
    if job.gpu_count > 1:
        return "a job on several GPUs has processes"
    if found is None:
        return "its runs were not looked at for what threads cannot keep apart"
    return f"its runs used {dangers_text(found)}" if found else ""


def _home(known: KnownJob, knowledge: Knowledge) -> _Home | None:
    python, facts = knowledge.pythons.of_job(known.job, known.key), known.job.facts
    return None if python is None or facts is None or not facts.environment else _Home(python, facts.environment)


def _among(home: _Home | None, most: _Home, count: int) -> Isolation:
    if home is None:
        return Isolation("process", _UNKNOWN)
    if count < 2:
        return Isolation("process", "no partner could share a process with it")
    if home != most:
        return Isolation("process", "its Python or its environment is not that of the group's threads")
    return Isolation("thread", "its runs showed no danger; the site allows it")


# Absorbs the rounding of figures such as 3 × 16 / 3 before they are cut to whole CPUs.
_SLACK: Final = 1e-6


def release_solo(solo: Solo, plan: Plan, cycle: Gathered) -> ReleaseSolo:
    """Return the release of a job that runs alone, with the CPUs and memory that the plan gives it."""
    known = cycle.known[solo.job_id]
    measured = cycle.knowledge.traits.is_measured(known.key)
    planned = plan.cpu_mem_shares.get(solo.job_id, ())
    threads = max((node.threads_per_core for node in _nodes(planned, cycle.view.node_index)), default=1)
    share = share_of(known.job, planned, cycle.config.allocation, measured=measured, threads_per_core=threads)
    reasons = sentences(solo.reasons)
    if share is not None:
        asked = share.original
        text = given_text(asked.cpu_count, share.cpu_count, asked.mem_per_node_mib, share.mem_per_node_mib)
        reasons = (*reasons, f"it gets {text}")
    return ReleaseSolo(solo.job_id, reasons, share)


def start_group(group: Group, plan: Plan, cycle: Gathered) -> StartGroup:
    """Return the start of a group."""
    known = [cycle.known[job_id] for job_id in group.members]
    jobs = [each.job for each in known]
    nodes = _nodes(group.gpus, cycle.view.node_index)
    kinds = isolations(known, group.mode, cycle.knowledge, cycle.config)
    members = tuple(
        _member_plan(
            Joiner.of(each, group, plan),
            cycle.knowledge,
            cycle.room.member_limit_s(each.job, len(group.members)),
            kind,
        )
        for each, kind in zip(known, kinds, strict=True)
    )
    threads = [each for each, kind in zip(known, kinds, strict=True) if kind.kind == "thread"]
    whys = ((each.job.job_id, why_estimated(each.planned_profile)) for each in known)
    estimated = (f"job {job_id}: {why}" for job_id, why in whys if why)
    gpus_per_node = group.gpu_count // len(nodes)
    first = jobs[0]
    limits = [member.time_limit_s for member in members]
    pilot = pilot_size(members, [each.job for each in threads], nodes, gpus_per_node, plan, cycle)
    return StartGroup(
        members=members,
        node=folded({node.name for node in nodes}),
        uid=first.uid,
        gid=first.gid,
        user=first.user,
        partition=first.partition,
        account=first.account,
        qos=first.qos,
        gpu_request=first.gpu_request,
        cpu_count=pilot.cpus,
        mem_per_node_mib=pilot.mem_mib,
        time_limit_s=0 if 0 in limits else max(limits) + PILOT_EXTRA_S,
        efficiency=group.efficiency,
        period_s=group.period_s,
        reasons=(*sentences(group.reasons), *estimated),
        node_count=len(nodes),
        gpus_per_node=gpus_per_node,
        mode=group.mode,
        reservation=first.reservation,
        python=cycle.knowledge.pythons.of_job(threads[0].job, threads[0].key) or "" if threads else "",
    )


def pilot_size(
    members: Sequence[MemberPlan],
    threads: Sequence[Job],
    nodes: Sequence[Node],
    gpus_per_node: int,
    plan: Plan,
    cycle: Gathered,
) -> Need:
    """Return the CPUs of each of a pilot's tasks, one for each GPU, and its memory on each node.

    It needs little for itself; `threads` work in it, with their requests or the plan's shares.
    """
    partition = cycle.view.snapshot.limits.partition(cycle.view.jobs[members[0].job_id].partition)
    if threads:
        shares, allocation = [plan.cpu_mem_shares.get(job.job_id, ()) for job in threads], cycle.config.allocation
        beside = (member.cpu_count for member in members if member.isolation == "process")
        taken = sum(-(-cpus // len(nodes)) for cpus in beside) if partition.oversubscribe < 2 else 0
        cpus = cpus_of_a_rank(threads, nodes, gpus_per_node, taken, group_cpus(shares, allocation))
        return Need(cpus, group_mem_mib(threads, shares, allocation))
    return Need(1, pilot_mem_mib([member.original for member in members], gpus_per_node, partition))


def _nodes(shares: Sequence[NodeShare | CpuMemShare], index: NodeIndex) -> list[Node]:
    """The nodes of a plan's shares, by name."""
    return [index.by_name[name] for name in sorted({share.node for share in shares})]


class Joiner(NamedTuple):
    """A job that becomes a member of a group."""

    known: KnownJob
    speed: float  # Its predicted speed there, 1 = as fast as alone
    min_speed: float  # Its promised speed there; 0: none

    @classmethod
    def of(cls, known: KnownJob, group: Group, plan: Plan) -> "Joiner":
        """A job in a plan's group, with the speeds that the plan says."""
        job_id = known.job.job_id
        return cls(known, group.speed[job_id], plan.promises.get(job_id, known.min_speed))


def _member_plan(joiner: Joiner, knowledge: Knowledge, time_limit_s: int, isolation: Isolation) -> MemberPlan:
    """Return the plan of a job in a group; 0 means no time limit."""
    job, profile = joiner.known.job, joiner.known.planned_profile
    return MemberPlan(
        job_id=job.job_id,
        original=asked_by(job),
        solo_iteration_s=None if profile.says_nothing_of_model else profile.iteration_s,
        speed=joiner.speed,
        time_limit_s=time_limit_s,
        cpu_count=job.task_count if isolation.kind == "thread" else job.given_cpus,
        gpu_mem_gib=knowledge.gpu_mem_gib.get(job.job_id, profile.gpu_mem_gib),
        estimated=profile.is_estimate,
        min_speed=joiner.min_speed,
        isolation=isolation.kind,
        isolation_why=isolation.why,
    )


def cpus_of_a_rank(
    threads: Sequence[Job], nodes: Sequence[Node], gpus_per_node: int, taken: int = 0, planned: int = 0
) -> int:
    """Return the CPUs of each task of a pilot in which members run as threads, as far as the nodes have them.

    Each thread's own job needs a CPU per task beside the pilot, other members have `taken` some on each node.
    """
    kept = sum(-(-job.task_count // len(nodes)) for job in threads)
    spare = min(node.cpu_count - node.cpus_allocated for node in nodes) - kept - taken
    wanted = max(-(-job.given_cpus // (len(nodes) * gpus_per_node)) for job in threads)
    if planned:
        wanted = (planned - kept) // gpus_per_node
    return max(1, min(wanted, spare // gpus_per_node))


def share_of(
    job: Job, planned: Sequence[CpuMemShare], allocation: Allocation, *, measured: bool, threads_per_core: int = 1
) -> GivenShare | None:
    """Return a job's share when it starts, None where its own request stays as it is."""
    # What Slurm would lay out differently from the plan is left alone. So are special requests: a changed count of CPUs
    # does not reach the steps of a job that asks for them per GPU, and srun refuses memory both per GPU and per node.
    per_gpu = job.special or job.cpus_per_gpu
    if not planned or len(planned) != max(1, job.node_count) or job.unknown_task or job.het or per_gpu:
        return None
    cpus = min(share.cpus for share in planned)
    cpus_per_task = _cpus_per_task(job, cpus, threads_per_core, allocation, measured=measured)
    mem_mib = _mem_mib(job, min(share.mem_gib for share in planned), allocation)
    if allocation.cpus == allocation.memory == "off":
        return None
    names = job.required_nodes or folded({share.node for share in planned})
    return GivenShare(cpus_per_task * job.task_count, cpus_per_task, mem_mib, names, asked_by(job))


def _cpus_per_task(job: Job, cpus: float, threads_per_core: int, allocation: Allocation, *, measured: bool) -> int:
    tasks_per_node = -(-job.task_count // max(1, job.node_count))
    wanted = max(1, math.floor((cpus + _SLACK) / tasks_per_node))
    if wanted >= threads_per_core:
        wanted -= wanted % threads_per_core
    if allocation.cpus == "off" or not cpus:
        return job.cpus_per_task
    if allocation.cpus == "raise-only" or not measured:
        return max(job.cpus_per_task, wanted)
    return wanted


def _mem_mib(job: Job, mem_gib: float, allocation: Allocation) -> int:
    """Memory per node: never less than the job asked for; 0 leaves it alone, for then it may mean all of the node's."""
    if not job.mem_per_node_mib or allocation.memory == "off":
        return job.mem_per_node_mib
    return max(job.mem_per_node_mib, math.floor(mem_gib * MIB_PER_GIB + _SLACK))


def group_cpus(shares: Sequence[Sequence[CpuMemShare]], allocation: Allocation) -> int:
    """Return the CPUs on each node that a plan gives a group's threads together, 0 where it does not say."""
    if allocation.cpus == "off" or not all(shares):
        return 0
    return math.floor(sum(min(share.cpus for share in planned) for planned in shares) + _SLACK)


def group_mem_mib(jobs: Sequence[Job], shares: Sequence[Sequence[CpuMemShare]], allocation: Allocation) -> int:
    """Return the memory on each node for a group's threads: their requests, or the plan's share if that is more."""
    asked_mib = sum(job.mem_per_node_mib for job in jobs)
    if allocation.memory == "off" or not asked_mib or not all(shares):
        return asked_mib
    planned_gib = sum(min(share.mem_gib for share in planned) for planned in shares)
    return max(asked_mib, math.floor(planned_gib * MIB_PER_GIB + _SLACK))


def given_text(asked_cpus: int, cpus: int, asked_mem_mib: int, mem_mib: int) -> str:
    """Describe CPUs and memory, and the request where it differs; memory is per node, 0 where nothing is set."""
    text = f"{asked_cpus} → {cpus} CPUs" if cpus != asked_cpus else f"{cpus} CPUs"
    if not mem_mib:
        return text
    asked_gib, gib = asked_mem_mib / MIB_PER_GIB, mem_mib / MIB_PER_GIB
    memory = f"{asked_gib:.1f} → {gib:.1f}" if mem_mib != asked_mem_mib else f"{gib:.1f}"
    return f"{text} and {memory} GiB of memory on each node"


def joins_together(
    joiners: Sequence[Joiner], group: RunningGroup, cycle: Gathered, reasons: tuple[str, ...]
) -> tuple[Join, ...]:
    """Return the joins of jobs to a group in one cycle.

    Each of them says what all need together, so that they may be carried out one by one, in any order.
    """
    pilot, room, size = group.pilot, cycle.room, len(group.members) + len(joiners)
    others = tuple((other.job_id, _limit_beside(other, pilot, size, room)) for other in group.members)
    ran_s = int(max(0.0, cycle.now_s - pilot.start_s))
    members = [
        _member_plan(each, cycle.knowledge, room.member_limit_s(each.known.job, size, ran_s), joins_later(cycle.config))
        for each in joiners
    ]
    # The pilot outlives all of its members; 0 leaves its time limit as it is.
    ends_s = [*(ran_s + member.time_limit_s for member in members), *(limit_s for _, limit_s in others)]
    needed_s = max(ends_s) + PILOT_EXTRA_S
    pilot_limit_s = needed_s if pilot.time_limit_s and needed_s > pilot.time_limit_s else 0
    return tuple(
        Join(
            pilot.job_id,
            pilot.nodes,
            member,
            others,
            pilot_limit_s,
            (*reasons, *filter(None, (why_estimated(joiner.known.planned_profile),))),
            joining=len(joiners),
            oversubscribe=pilot.oversubscribe,
        )
        for joiner, member in zip(joiners, members, strict=True)
    )


def _limit_beside(member: ManagedJob, pilot: Job, size: int, room: SiteRoom) -> int:
    """A member's time limit in a group of that size, never less than it has."""
    original_s = member.membership.original.time_limit_s if member.membership is not None else 0
    if not original_s:
        return 0
    late_s = int(max(0.0, member.start_s - pilot.start_s))
    return max(member.time_limit_s, room.member_limit_s(as_submitted(member, pilot), size, late_s))
