"""Carry out stops and returns on Slurm. Every step can be repeated."""

import logging
import secrets
from dataclasses import replace

from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import Preempt, ReturnToQueue
from muri.slurm_plugin.gateway import Gateway, NoSuchJobError
from muri.slurm_plugin.host_shares import reset_change
from muri.slurm_plugin.journal import Journal
from muri.slurm_plugin.model import Job, JobChange
from muri.slurm_plugin.preemption import INTENT_KIND

log = logging.getLogger("muri.controller")


def original_request(job: Job) -> JobChange:
    """Return the change that gives a job its own request back and lets it start at once."""
    state = tags.parse_state(job.admin_comment)
    if state is None:
        given = tags.parse_given(job.admin_comment)
        own = JobChange() if given is None else reset_change(job, given.original)
        return replace(own, start_now=True)
    original, per_cpu_mib = state.original, state.original.mem_per_cpu_mib
    return JobChange(
        gpu_request=original.gpu_request,
        required_nodes=original.required_nodes,
        cpu_count=original.cpu_count,
        cpus_per_task=original.cpus_per_task,
        dependency="",
        start_now=True,
        mem_per_node_mib=None if per_cpu_mib else original.mem_per_node_mib or None,
        mem_per_cpu_mib=per_cpu_mib or None,
        time_limit_s=original.time_limit_s or None,
        admin_comment=tags.with_token(job.admin_comment, tags.STATE_PREFIX, None),
    )


def preempt(gateway: Gateway, journal: Journal, action: Preempt, now_s: float) -> None:
    """Stop a running job: Slurm sends SIGTERM, waits for it to be saved (KillWait), and keeps it held.

    Raises:
        GatewayError: Slurm refused; the job runs on.
    """
    why = "; ".join(action.reasons)
    log.info("job %d: stopped, to go on later: %s", action.job_id, why)
    token = action.token or secrets.token_hex(6)
    if not action.token:
        intent = {"job_id": action.job_id, "run": action.run, "why": why, "served_gpu_s": action.served_gpu_s}
        journal.begin(token, INTENT_KIND, intent, now_s)
    try:
        gateway.requeue_hold(action.job_id)
    except NoSuchJobError:
        journal.finish(token, "abandoned")


def return_to_queue(gateway: Gateway, journal: Journal, action: ReturnToQueue, job: Job) -> None:
    """Make a stopped job a candidate again: held, with the request that its user wrote.

    Raises:
        GatewayError: Slurm refused; the next cycle tries again.
    """
    log.info("job %d: back in the queue: %s", action.job_id, action.why)
    try:
        gateway.hold(action.job_id)
        gateway.modify(action.job_id, original_request(job))
    except NoSuchJobError:
        log.info("job %d: gone already", action.job_id)
    if action.token:
        journal.finish(action.token, "done")
