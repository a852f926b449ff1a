"""Members whose AdminComment somebody has damaged, known from the journal: their own request is not lost. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from muri.slurm_plugin.planning.actions import members_in
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.comment_tags import MemberState
from muri.slurm_plugin.records.gate import REQUEUED_HELD
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_MAY_BE_MEMBERS: Final = frozenset({Role.MEMBER, Role.CANDIDATE, Role.NOT_OURS, Role.RELEASED, Role.OTHER})


def with_known_members(cycle: CycleInput) -> CycleInput:
    """Read of members whose tag is damaged or gone what the journal says of their start.

    Only jobs without GPUs are meant: one that has its own again is no member, whatever the journal says.
    """
    damaged = [
        job for job in cycle.view.jobs.values()
        if job.membership is None and not job.gpu_count and job.state.is_active and _may_be_member(job)
    ]  # fmt: skip
    if not damaged:
        return cycle
    known = _known_members(cycle.intents)
    found: dict[int, ManagedJob] = {
        job.job_id: replace(job, role=Role.MEMBER, membership=known[job.job_id])
        for job in damaged
        if job.job_id in known
    }
    return replace(cycle, view=View(cycle.view.snapshot, {**cycle.view.jobs, **found})) if found else cycle


def _may_be_member(job: ManagedJob) -> bool:
    # A member puts itself back into the queue, held, where it cannot tell that the licence is its gate.
    return job.role in _MAY_BE_MEMBERS or (job.role is Role.USER_HELD and job.reason == REQUEUED_HELD)


def _known_members(intents: tuple[Intent, ...]) -> Mapping[int, MemberState]:
    """What each job asked for when it was last made a member."""
    known: dict[int, MemberState] = {}
    for intent in intents:
        if intent.kind not in {GROUP, JOIN} or intent.submitted_job is None:
            continue
        payload = intent.payload if intent.kind == GROUP else {"members": [intent.payload["member"]]}
        for member in members_in(payload):
            known[member.job_id] = MemberState(intent.submitted_job, member.original, member.accumulate_steps)
    return known
