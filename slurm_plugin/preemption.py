"""Stopping running jobs so that they go on later: which may be stopped, and how one comes back to the queue."""

import re
from collections.abc import Iterator

from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import Abandon, Action, Preempt, ReturnToQueue
from muri.slurm_plugin.journal import Intent
from muri.slurm_plugin.model import Job, JobState
from muri.slurm_plugin.records.submit_option import parse_request
from muri.slurm_plugin.view import Role, View

INTENT_KIND = "preempt"


def why_not_preemptible(job: Job, role: Role) -> str:
    """Return why a job must not be stopped, "" when it may be.

    Both are needed: the user's word at submission, and a script that in this very run has told how to save it.
    """
    request = parse_request(job.admin_comment)
    if request is None or role not in {Role.MEMBER, Role.RELEASED}:
        return "it was not submitted with --muri, or Muri has not started it"
    checks = (
        (job.state is not JobState.RUNNING, f"it does not run ({job.state})"),
        (not request.checkpoint, "it was not submitted with --muri=checkpoint=1"),
        (not job.can_requeue, "it was submitted with --no-requeue"),
        (job.array or job.het, "job arrays and heterogeneous jobs are not stopped"),
        (
            _run(job, tags.CHECKPOINT_PREFIX) != job.restart_count,
            "its script has not called muri.checkpoint in this run",
        ),
    )
    return next((reason for applies, reason in checks if applies), "")


def _run(job: Job, prefix: str) -> int | None:
    text = tags.token(job.comment, prefix)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None


def under_way(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the stops that were begun, by job id."""
    return {
        int(intent.payload["job_id"]): intent
        for intent in intents
        if intent.kind == INTENT_KIND and intent.state == "begun"
    }


def served_gpu_s(intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds that jobs had before the controller stopped them, by job id."""
    served: dict[int, float] = {}
    for intent in intents:
        if intent.kind == INTENT_KIND and intent.state != "abandoned":
            job_id = int(intent.payload["job_id"])
            served[job_id] = served.get(job_id, 0.0) + float(intent.payload["served_gpu_s"])
    return served


def resume_stops(view: View, intents: tuple[Intent, ...]) -> Iterator[Action]:
    """Carry on with stops that were begun, and take back into the queue what has stopped."""
    begun = under_way(intents)
    for job_id, intent in begun.items():
        action = _next_step(view.active(job_id), job_id, intent)
        if action is not None:
            yield action
    for job in (*view.having(Role.MEMBER), *view.having(Role.CANDIDATE)):
        if job.job_id not in begun and _stopped_by_itself(job, view):
            yield ReturnToQueue(job.job_id, "", "it was saved and stopped")


def _next_step(job: Job | None, job_id: int, intent: Intent) -> Action | None:
    run = int(intent.payload["run"])
    if job is None:
        return Abandon(intent.token, f"job {job_id} ended before it was stopped")
    if job.state is JobState.PENDING and job.held:
        return ReturnToQueue(job_id, intent.token, str(intent.payload["why"]))
    if job.state is JobState.PENDING or job.restart_count > run:
        return Abandon(intent.token, f"job {job_id} was released by somebody else")
    if job.state is JobState.RUNNING:
        return Preempt(job_id, run, (str(intent.payload["why"]),), intent.token)
    return None  # it is being saved


def _stopped_by_itself(job: Job, view: View) -> bool:
    """Whether a held job was stopped on purpose: by its owner, or because its time was running out."""
    if job.state is not JobState.PENDING or not job.held:
        return False
    if _run(job, tags.STOPPED_PREFIX) != job.restart_count - 1:
        return False
    is_member = tags.token(job.admin_comment, tags.STATE_PREFIX) is not None
    return is_member or job.begin_s > view.snapshot.taken_s
