"""Give jobs CPUs and memory on Slurm, and take them back. Every step can be repeated.

What a job asked for goes into its AdminComment before anything of it is changed. A controller that dies in between
leaves a held job with that tag, and the next cycle, or `muri drain`, puts its own request back.
"""

import logging

from muri.slurm_plugin.execute.gate import open_gate
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoSuchJobError, SlurmUnreachableError, job_started
from muri.slurm_plugin.planning.actions import GivenShare
from muri.slurm_plugin.planning.slurm_requests import given_change, given_comment, in_own_place, reset_change
from muri.slurm_plugin.records.cluster import Job, JobChange
from muri.slurm_plugin.records.roles import ManagedJob

log = logging.getLogger("muri.controller")


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
