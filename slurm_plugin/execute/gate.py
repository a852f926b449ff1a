"""Opens and closes the gate of one job, together with a change of its request. Every step can be repeated.

With the license each is one call. With Muri's own hold, the request changes before the hold is lifted, and what a
controller that dies in between leaves behind is a held job that the next cycle starts anew.

CPUs and memory are given to jobs, and taken back, here, too. What a job asked for goes into its AdminComment before
anything of it is changed: a controller that dies in between leaves a held job with that tag, and the next cycle, or
`muri drain`, puts its own request back.
"""

import logging
from dataclasses import replace

from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoSuchJobError, SlurmUnreachableError, job_started
from muri.slurm_plugin.planning.actions import GivenShare
from muri.slurm_plugin.planning.slurm_requests import given_change, given_comment, in_own_place, reset_change
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState
from muri.slurm_plugin.records.roles import (
    OPEN,
    REQUEUED,
    REQUEUED_HELD,
    ManagedJob,
    Role,
    gate_word,
    is_behind_licence,
    with_gate,
    with_word,
    without_gate,
)

log = logging.getLogger("muri.controller")

_NOTHING = JobChange()


def open_gate(gateway: Gateway, job: ManagedJob, change: JobChange = _NOTHING, comment: str | None = None) -> None:
    """Change a waiting job's request and let Slurm start it. A hold that is not Muri's stays.

    Raises:
        NoSuchJobError: It is gone.
        GatewayError: Slurm refused.
    """
    if job.place is not None:
        change = in_own_place(job, change if comment is None else replace(change, admin_comment=comment))
        comment = None
    lifts = job.gated and job.held and not job.held_by_others
    if is_behind_licence(job):
        told = change.admin_comment if comment is None else comment
        change = replace(change, licenses=without_gate(job.licenses), admin_comment=told)
    if lifts and change != _NOTHING and (gate_word(job) == OPEN or job.reason == REQUEUED_HELD):
        # A controller that dies before the release leaves a hold that must look like Muri's own, member or not.
        change = replace(change, admin_comment=with_word(comment or _comment(job, change), REQUEUED))
    if change != _NOTHING:
        gateway.modify(job.job_id, change)
    if lifts:
        gateway.release(job.job_id)
        note_open(gateway, job, comment or _comment(job, change))


def close_gate(gateway: Gateway, job: ManagedJob, change: JobChange = _NOTHING) -> None:
    """Change a job's request and keep it from starting.

    A running job cannot be held: with Muri's own hold as its gate, whoever holds it from now on is not Muri.

    Raises:
        NoSuchJobError: It is gone.
        GatewayError: Slurm refused.
    """
    if job.gate == "licence":
        gateway.modify(job.job_id, replace(change, licenses=with_gate(job.licenses)))
        return
    # Somebody else's hold must not look like Muri's; once they release the job, Slurm decides about it.
    is_open = job.held_by_others or job.state is JobState.RUNNING
    back = job.held and job.reason == REQUEUED_HELD
    word = OPEN if is_open else REQUEUED if back else "hold"
    gateway.modify(job.job_id, replace(change, admin_comment=with_word(_comment(job, change), word)))
    if not is_open and not job.held:
        _hold(gateway, job.job_id)


def note_open(gateway: Gateway, job: ManagedJob, comment: str | None = None) -> None:
    """Say that Muri's hold on a waiting job is lifted, twice if need be: until then its user's hold looks like Muri's.

    Raises:
        NoSuchJobError: It is gone.
        GatewayError: Slurm refused.
    """
    change = JobChange(admin_comment=with_word(job.admin_comment if comment is None else comment, OPEN))
    try:
        gateway.modify(job.job_id, change)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError:
        gateway.modify(job.job_id, change)


def stop(gateway: Gateway, job: ManagedJob) -> None:
    """End a running job's run and put it back into the queue, behind its gate.

    Raises:
        NoSuchJobError: It has ended.
        GatewayError: Slurm refused.
    """
    _expect_back(gateway, job)
    _requeue(gateway, job.job_id, held=job.gate == "hold")


def stop_as_caller(gateway: Gateway, job: ManagedJob) -> None:
    """Do the same for whoever calls, who may be the job's user.

    Slurm lets only administrators change a running job's licenses and AdminComment. A job alone that its user stops has
    no gate, and Slurm starts it again by itself.

    Raises:
        NoSuchJobError: It has ended.
        GatewayError: Slurm refused.
    """
    held = job.gate == "hold"
    try:
        _expect_back(gateway, job)
    except GatewayError:
        held = held and job.role is Role.MEMBER
    _requeue(gateway, job.job_id, held=held)


def _expect_back(gateway: Gateway, job: ManagedJob) -> None:
    """Close a running job's gate, or say that the hold with which it comes back will be Muri's.

    Slurm does not tell such a hold from an administrator's. One with which its user submitted the job is long lifted.
    """
    if job.gate == "hold":
        comment = tags.with_token(job.admin_comment, tags.USER_HOLD, None)
        gateway.modify(job.job_id, JobChange(admin_comment=with_word(comment, REQUEUED)))
    else:
        close_gate(gateway, job)


def _requeue(gateway: Gateway, job_id: int, *, held: bool) -> None:
    (gateway.requeue_hold if held else gateway.requeue)(job_id)


def move_to_licence(gateway: Gateway, job: ManagedJob) -> None:
    """Put a job that Muri holds behind the license instead.

    The hold goes before the word changes: a controller that dies in between leaves a job that is still Muri's to start.

    Raises:
        NoSuchJobError: It is gone.
        GatewayError: Slurm refused.
    """
    if not is_behind_licence(job):
        # Jobs of the oldest versions have no word; beside the license only the word says that the hold is Muri's.
        comment = with_word(job.admin_comment, "hold")
        gateway.modify(job.job_id, JobChange(licenses=with_gate(job.licenses), admin_comment=comment))
    if job.held and not job.held_by_others:
        gateway.release(job.job_id)
    gateway.modify(job.job_id, JobChange(admin_comment=with_word(job.admin_comment, "licence")))


def _comment(job: ManagedJob, change: JobChange) -> str:
    return job.admin_comment if change.admin_comment is None else change.admin_comment


def _hold(gateway: Gateway, job_id: int) -> None:
    """Hold a pending job; one that started just now has its own request and may run."""
    try:
        gateway.hold(job_id)
    except GatewayError as error:
        if not job_started(error):
            raise


def give_share(gateway: Gateway, job: Job, share: GivenShare, now_s: float) -> str:
    """Change what a held job asks for.

    Returns:
        Why it keeps its own request; "" when it was changed.

    Raises:
        NoSuchJobError: It is gone.
        SlurmUnreachableError: slurmctld does not answer; the next cycle repairs what was begun.
        GatewayError: Slurm refused to put its own request back; the next cycle tries again.
    """
    if refusal := _refusal(gateway, job, JobChange(admin_comment=given_comment(job, share, now_s))):
        return refusal
    refusal = _refusal(gateway, job, given_change(job, share))
    if refusal:
        gateway.modify(job.job_id, reset_change(job, share.original))
    return refusal


def _refusal(gateway: Gateway, job: Job, change: JobChange) -> str:
    """Make a change; return Slurm's words where it refuses, "" where it does not."""
    try:
        gateway.modify(job.job_id, change)
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError as error:
        return f"Slurm refused other CPUs or memory: {error}"
    return ""


def reset_request(gateway: Gateway, job: ManagedJob) -> None:
    """Give a pending job its own CPUs, memory and place in the queue back.

    Raises:
        GatewayError: Slurm refused.
    """
    change = _own_change(job)
    if change == JobChange():
        return
    try:
        gateway.modify(job.job_id, change)
    except NoSuchJobError:
        log.info("job %d: gone already", job.job_id)
    except GatewayError as error:
        if not job_started(error):
            raise
        log.info("job %d: has started meanwhile", job.job_id)


def reset_or_release(gateway: Gateway, job: ManagedJob) -> None:
    """Give a job behind the gate its own request back; where Slurm refuses, open the gate with what it was given.

    Raises:
        GatewayError: Slurm refused, and the gate is open unless it refused that too.
    """
    try:
        reset_request(gateway, job)
    except SlurmUnreachableError:
        raise
    except GatewayError:
        open_gate(gateway, job)
        raise


def release_as_asked(gateway: Gateway, job: ManagedJob) -> None:
    """Open a job's gate, with its own request.

    Raises:
        GatewayError: Slurm refused; its gate is open, unless Slurm refused that too.
    """
    try:
        open_gate(gateway, job, _own_change(job))
    except (NoSuchJobError, SlurmUnreachableError):
        raise
    except GatewayError:
        open_gate(gateway, job)
        raise


def _own_change(job: ManagedJob) -> JobChange:
    return in_own_place(job, JobChange() if job.given is None else reset_change(job, job.given.original))
