"""Jobs that run alone but may be joined: each starts behind a pilot job of its own, with room for others. Pure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from muri.policies.types import Group, Plan, PlanJob, Policy, Reason, Solo
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.node_room import NodeRoom
from muri.slurm_plugin.planning.running import may_join
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.starts import release_solo, start_group

MAY_BE_JOINED: Final = "others may join it while it runs"


def joinable_jobs(jobs: Iterable[PlanJob], policy: Policy, config: Config) -> dict[int, PlanJob]:
    """Return the waiting jobs that others may join where they start alone, by job id.

    Args:
        jobs: The waiting jobs.
        policy: The policy in force.
        config: The configuration.
    """
    if not may_join(config) or not _shares(policy):
        return {}
    # Jobs on several GPUs are not joined: each of their GPUs has a runtime of its own.
    return {job.job_id: job for job in jobs if job.may_share and job.profile is not None and job.gpu_count == 1}


def _shares(policy: Policy) -> bool:
    """Whether jobs ever share GPUs under a policy; one of a site's own may not tell its options."""
    rules = getattr(policy, "rules", None)
    return policy.profile_use == "sharing" if rules is None else rules.max_group_size > 1


def start_joinable(
    solo: Solo, job: PlanJob, plan: Plan, cycle: CycleInput, room: SiteRoom, nodes: NodeRoom
) -> StartGroup | ReleaseSolo | None:
    """Return the start of a job alone that others may join.

    Args:
        solo: The plan's word about it.
        job: The job.
        plan: The plan.
        cycle: What the cycle decides on.
        room: What the site's limits allow.
        nodes: CPUs and memory that nodes have free.

    Returns:
        A group of one; its release, where its node has no room for a pilot job; None where the plan leaves it to Slurm
        to find GPUs.
    """
    if not solo.node or job.profile is None:
        return None
    share = nodes.take_joinable(cycle.view.jobs[solo.job_id], solo.node)
    if isinstance(share, str):
        release = release_solo(solo, plan, cycle)
        return replace(release, reasons=(*release.reasons, cannot_be_joined(share)))
    group = Group(
        (job.job_id,),
        solo.gpus,
        job.gpu_count,
        job.profile.iteration_s,
        1.0,
        {job.job_id: 1.0},
        (*solo.reasons, Reason(MAY_BE_JOINED)),
    )
    start = start_group(group, plan, cycle, room)
    if plan.cpu_mem_shares.get(job.job_id):
        return start
    return replace(start, cpu_count=share.cpu_count, mem_per_node_mib=share.mem_mib)


def started_plain(start: StartGroup, why: str) -> ReleaseSolo:
    """Return the release of a job that cannot have a pilot job of its own, and why."""
    reasons = tuple(reason for reason in start.reasons if reason != MAY_BE_JOINED)
    return ReleaseSolo(start.members[0].job_id, (*reasons, cannot_be_joined(why)))


def cannot_be_joined(why: str) -> str:
    """Say for people that a job runs without a pilot job."""
    return f"nobody can join it: {why}"
