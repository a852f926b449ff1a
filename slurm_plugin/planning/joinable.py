"""Jobs that run alone but may be joined: each starts behind a pilot job of its own, with room for others. Pure.

Where nobody may join, such a pilot job still measures models of which nothing is known: without it no group would ever
be worth while.
"""

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
from muri.slurm_plugin.records.cluster import Job

MAY_BE_JOINED: Final = "others may join it while it runs"
IS_MEASURED: Final = "its model is measured while it runs"


def jobs_with_pilots(jobs: Iterable[PlanJob], policy: Policy, cycle: CycleInput) -> dict[int, PlanJob]:
    """Return the waiting jobs that get a pilot job of their own where they start alone, by job id.

    Args:
        jobs: The waiting jobs.
        policy: The policy in force.
        cycle: What the cycle decides on.
    """
    if not shares_gpus(policy):
        return {}
    config, asked = cycle.config, cycle.view.jobs
    known = [job for job in jobs if job.may_share and job.profile is not None]
    fit = [job for job in known if job.gpu_count == 1 or has_a_task_per_gpu(job, asked[job.job_id])]
    return {job.job_id: job for job in fit if may_join(config) or _is_to_be_measured(job, config)}


def has_a_task_per_gpu(planned: PlanJob, job: Job) -> bool:
    """Whether a job on several GPUs of one node surely has a rank for each of them.

    A script that has one process for all its GPUs would be refused by its runtimes, and go back to the queue.
    """
    measured = planned.profile is not None and not planned.profile.is_estimate
    return measured and planned.node_count == 1 and job.task_count == planned.gpu_count


def _is_to_be_measured(job: PlanJob, config: Config) -> bool:
    """Whether a job that nobody may join is measured, so that later jobs of its model can be grouped."""
    estimated = job.profile is not None and job.profile.is_estimate
    return estimated and config.profiling.in_place and config.grouping.max_group_size > 1


def shares_gpus(policy: Policy) -> bool:
    """Whether jobs ever share GPUs under a policy; one of a site's own may not tell its options."""
    rules = getattr(policy, "rules", None)
    return policy.profile_use == "sharing" if rules is None else rules.max_group_size > 1


def start_joinable(
    solo: Solo, job: PlanJob, plan: Plan, cycle: CycleInput, room: SiteRoom, nodes: NodeRoom
) -> StartGroup | ReleaseSolo | None:
    """Return the start of a job alone that others may join, or that is measured.

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
    what = MAY_BE_JOINED if may_join(cycle.config) else IS_MEASURED
    share = nodes.take_joinable(cycle.view.jobs[solo.job_id], solo.node)
    if isinstance(share, str):
        release = release_solo(solo, plan, cycle)
        return replace(release, reasons=(*release.reasons, _in_vain(what, share)))
    group = Group(
        (job.job_id,),
        solo.gpus,
        job.gpu_count,
        job.profile.iteration_s,
        1.0,
        {job.job_id: 1.0},
        (*solo.reasons, Reason(what)),
    )
    start = start_group(group, plan, cycle, room)
    if plan.cpu_mem_shares.get(job.job_id):
        return start
    if what == IS_MEASURED:  # no room for others
        return replace(start, cpu_count=min(start.cpu_count, share.cpu_count))
    return replace(start, cpu_count=share.cpu_count // start.gpus_per_node, mem_per_node_mib=share.mem_mib)


def started_plain(start: StartGroup, why: str) -> ReleaseSolo:
    """Return the release of a job that cannot have a pilot job of its own, and why."""
    what = IS_MEASURED if IS_MEASURED in start.reasons else MAY_BE_JOINED
    reasons = tuple(reason for reason in start.reasons if reason != what)
    return ReleaseSolo(start.members[0].job_id, (*reasons, _in_vain(what, why)))


def _in_vain(what: str, why: str) -> str:
    """Say for people that a job runs without a pilot job."""
    return f"{'it cannot be measured' if what == IS_MEASURED else 'nobody can join it'}: {why}"
