"""From a plan to actions: groups that start, jobs that join, and jobs alone, which others may join. Pure."""

from collections.abc import Mapping, Sequence

from muri.policies.types import Plan, PlanJob
from muri.slurm_plugin.planning.actions import Action, Join, started
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.joinable import start_joinable, started_plain
from muri.slurm_plugin.planning.joins import joins_of
from muri.slurm_plugin.planning.node_room import NodeRoom
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.starts import release_solo, start_group


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
