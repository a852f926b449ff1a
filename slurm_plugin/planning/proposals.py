"""Where running jobs are not stopped: who could move to another group, so that its GPUs would be free. Pure."""

from collections.abc import Callable
from dataclasses import replace

from muri.policies.types import Plan, PlanRequest, Policy
from muri.slurm_plugin.planning.running import why_not_preemptible
from muri.slurm_plugin.records.roles import Role, View


def proposed_moves(
    request: PlanRequest, view: View, restart_s: float, stopping: Callable[[], Policy]
) -> dict[int, str]:
    """Return what to tell running jobs that would move to another group if they might be stopped, by job id.

    Only jobs whose users agreed to be stopped, and whose scripts have declared a checkpoint in this run, are told.

    Args:
        request: What the policy was asked.
        view: The queue.
        restart_s: What stopping a job and starting it again loses.
        stopping: Gives the policy as it is where running jobs may be stopped; not asked where nobody could move.
    """
    movable = {job.job_id for job in view.having(Role.MEMBER) if not why_not_preemptible(job)}
    open_units = [unit for unit in request.running if unit.joinable]
    at_work = {job.job_id for unit in open_units for job in unit.members}
    if not request.jobs or len(open_units) < 2 or movable.isdisjoint(at_work):
        return {}
    running = tuple(
        replace(
            unit,
            members=tuple(replace(job, preemptible=job.job_id in movable, restart_s=restart_s) for job in unit.members),
        )
        for unit in request.running
    )
    policy = stopping()
    return {} if policy.supports_packing else _moves(policy.plan(replace(request, running=running)), movable)


def _moves(plan: Plan, movable: set[int]) -> dict[int, str]:
    told = {}
    for group in plan.groups:
        others = ", ".join(str(job_id) for job_id in group.members if job_id not in group.joining)
        for job_id in movable.intersection(group.joining):
            told[job_id] = (
                f"it has a checkpoint and could move to the GPUs of job {others}, which would free its own: "
                "preemption.enabled in muri.yaml lets Muri do that"
            )
    return told
