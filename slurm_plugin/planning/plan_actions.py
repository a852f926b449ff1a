"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from muri.policies.types import Plan, PlanJob
from muri.slurm_plugin.planning.actions import Action, Join, started
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.joins import joins_of, start_joinable, started_plain
from muri.slurm_plugin.planning.node_room import NodeRoom
from muri.slurm_plugin.planning.placement import starts_by_itself
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.starts import release_solo, start_group
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import ManagedJob, Role


def actions_of(
    plan: Plan, cycle: CycleInput, room: SiteRoom, nodes: NodeRoom, with_pilots: Mapping[int, PlanJob]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Turn a plan into actions, groups first, in the plan's order.

    Args:
        plan: The plan, without what stays as it is.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        nodes: CPUs and memory that nodes have free; what the actions take is taken from them.
        with_pilots: The waiting jobs that get a pilot job of their own where they start alone.

    Returns:
        The actions; and of groups for which their nodes have too little left, why, by job id.
    """
    actions: list[Action] = []
    crowded: dict[int, str] = {}
    for group in plan.groups:
        if group.joining:
            actions += joins_of(group, plan, cycle, room)
            continue
        start = start_group(group, plan, cycle, room)
        counts_mem = cycle.view.snapshot.limits.partition(start.partition).counts_mem
        why = nodes.take_group(start, counts_mem=counts_mem)
        if why and len(start.members) > 1:
            crowded |= dict.fromkeys(started((start,)), why)
        actions.append(started_plain(start, why) if why and len(start.members) == 1 else start)
    # A job's room for others takes nothing that another job of this plan asks for.
    for solo in plan.solo:
        nodes.take_alone(cycle.view.jobs[solo.job_id], solo.gpus)
    for solo in plan.solo:
        planned = with_pilots.get(solo.job_id)
        with_pilot = None if planned is None else start_joinable(solo, planned, plan, cycle, room, nodes)
        actions.append(with_pilot or release_solo(solo, plan, cycle))
    return tuple(actions), crowded


def idle_gpus_first(starts: Sequence[Action]) -> tuple[Action, ...]:
    """Return what starts on idle GPUs, and then what joins groups, whose GPUs are at work; each in the plan's order."""
    return tuple(sorted(starts, key=lambda action: isinstance(action, Join)))


LATER = "more than enough jobs of its partition wait for Slurm already (slurm_backlog); it is let go as they start"


def to_let_go(jobs: Sequence[ManagedJob], cycle: CycleInput) -> tuple[ManagedJob, ...]:
    """Return the jobs that Slurm gets now: of each partition those of the highest priority, of these the oldest.

    A partition gets one for each idle CPU and `slurm_backlog` more, less those that compete there already. So a job is
    held back only behind more jobs of a higher priority than Slurm's schedulers look at. What has been let go and waits
    for something else than resources, such as a limit, keeps nobody back.

    Args:
        jobs: Those that are left to Slurm.
        cycle: What the cycle decides on.
    """
    by_priority = sorted(jobs, key=lambda job: (-job.own_priority, job.submit_s, job.job_id))
    partitions = {job.partition for job in jobs}
    competing = Counter(job.partition for job in cycle.view.having(Role.RELEASED) if _competes(job))
    room = {each: _idle_cpus(each, cycle) + cycle.config.slurm_backlog - competing[each] for each in partitions}
    taken: Counter[str] = Counter()
    chosen: list[ManagedJob] = []
    for job in by_priority:
        if taken[job.partition] < room[job.partition]:
            taken[job.partition] += 1
            chosen.append(job)
    return tuple(chosen)


def _competes(job: ManagedJob) -> bool:
    return job.state is JobState.PENDING and starts_by_itself(job)


def _idle_cpus(partition: str, cycle: CycleInput) -> int:
    """Return an upper bound of how many jobs could start in a partition, or one of several, at once."""
    names = set(partition.split(","))
    nodes = (node for node in cycle.nodes if node.usable and not names.isdisjoint(node.partitions))
    return sum(max(0, node.cpu_count - node.cpus_allocated) for node in nodes)
