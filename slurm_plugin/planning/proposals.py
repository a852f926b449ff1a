"""Where running jobs are not stopped: who could move to another group, so that its GPUs would be free. Pure."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from muri.policies.types import Plan, PlanRequest, Policy
from muri.slurm_plugin.planning.running import kind_of, why_not_preemptible
from muri.slurm_plugin.records.roles import Role, View

ASK_AGAIN_S: Final = 300.0
"""Who could move is asked for no more often: it takes a plan of the whole queue."""

Moves = Mapping[int, tuple[int, ...]]
"""Those whose GPUs a running job could move to, by the running job's id."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Who could move, as it was found some time ago.

    Attributes:
        asked_s: When, seconds since the epoch.
        moves: What was found.
    """

    asked_s: float = 0.0
    moves: Moves = field(default_factory=dict)

    def is_recent(self, now_s: float) -> bool:
        """Whether there is no need to ask again."""
        return 0 <= now_s - self.asked_s < ASK_AGAIN_S

    def told(self, view: View) -> dict[int, str]:
        """Return what to tell running jobs, by job id, as far as all whom it is about still run."""
        held = {job_id: others for job_id, others in self.moves.items() if {job_id, *others} <= view.group_of.keys()}
        return {job_id: _said(others) for job_id, others in held.items()}


def proposed_moves(request: PlanRequest, view: View, restart_s: float, stopping: Callable[[], Policy]) -> Moves:
    """Return where running jobs would move if they might be stopped.

    Only jobs whose users agreed to be stopped, and whose scripts have declared a checkpoint in this run, are told.

    Args:
        request: What the policy was asked.
        view: The queue.
        restart_s: What stopping a job and starting it again loses.
        stopping: Gives the policy as it is where running jobs may be stopped; not asked where nobody could move.
    """
    movable = {job.job_id for job in view.having(Role.MEMBER) if not why_not_preemptible(job)}
    open_units = [unit for unit in request.running if unit.joinable]
    alike = Counter(kind_of(unit.members[0]) for unit in open_units)
    may_meet = {job.job_id for unit in open_units if alike[kind_of(unit.members[0])] > 1 for job in unit.members}
    if not request.jobs or movable.isdisjoint(may_meet):
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


def _moves(plan: Plan, movable: set[int]) -> Moves:
    found: dict[int, tuple[int, ...]] = {}
    for group in plan.groups:
        others = tuple(job_id for job_id in group.members if job_id not in group.joining)
        found |= dict.fromkeys(movable.intersection(group.joining), others)
    return found


def _said(others: tuple[int, ...]) -> str:
    return (
        f"it has a checkpoint and could move to the GPUs of job {', '.join(map(str, others))}, which would free its "
        "own: preemption.enabled in muri.yaml lets Muri do that"
    )
