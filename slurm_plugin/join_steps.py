"""Carry out a join on Slurm. Every step can be repeated."""

import logging

from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import Join
from muri.slurm_plugin.gateway import Gateway, GatewayError, SlurmUnreachableError
from muri.slurm_plugin.model import JobChange
from muri.slurm_plugin.view import View

log = logging.getLogger("muri.controller")


def prepare_group(gateway: Gateway, view: View, action: Join) -> None:
    """Tell the host whom it serves from now on, and give it and its members the time that sharing takes.

    Raises:
        GatewayError: Slurm refused to tell the host: it might end before its new member.
    """
    host = view.jobs[action.host]
    token, members = tags.parse_host(host.admin_comment) or ("", ())
    known = tuple(dict.fromkeys((*members, action.member.job_id)))
    comment = tags.with_token(host.admin_comment, tags.HOST_PREFIX, tags.format_host(token, known))
    gateway.modify(action.host, JobChange(admin_comment=comment, time_limit_s=action.host_limit_s or None))
    for job_id, limit_s in action.others:
        job = view.active(job_id)
        if job is None or not limit_s or limit_s <= job.time_limit_s:
            continue
        try:
            gateway.modify(job_id, JobChange(time_limit_s=limit_s))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("job %d: its time limit stays %d s: %s", job_id, job.time_limit_s, error)
