"""Whom a host job serves: the members it started with, less those that left for good, and those that joined."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from muri.slurm_plugin import tags
from muri.slurm_plugin.gateway import NoSuchJobError
from muri.slurm_plugin.node_commands import active_jobs, job_field


def present_members(known: Iterable[int], status: Mapping[str, Any], *, late: bool) -> dict[int, str]:
    """Return the states of the members that still wait or run.

    A job that was stopped and went back to the queue is a member no more, whatever becomes of it: its
    AdminComment names this host no longer. That is only looked at when no member is at work, and not of
    members that have yet to come: the controller tags them a moment after the host was submitted.

    Args:
        known: The members that the host started with.
        status: The members' part of the runtime's status.
        late: Whether members should have come by now.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    host = int(os.environ["SLURM_JOB_ID"])
    members = dict.fromkeys(known)
    with contextlib.suppress(NoSuchJobError):
        members |= dict.fromkeys((tags.parse_host(job_field(host, "admin_comment")) or ("", ()))[1])
    states = active_jobs(list(members))
    at_work = {name: member.get("state") for name, member in status.items()}
    if "running" in at_work.values():
        return states
    came = {job_id for job_id in states if late or at_work.get(str(job_id)) == "ended"}
    return {job_id: state for job_id, state in states.items() if job_id not in came or _serves(host, job_id)}


def _serves(host: int, job_id: int) -> bool:
    try:
        comment = job_field(job_id, "admin_comment")
    except NoSuchJobError:
        return False
    state = tags.parse_state(comment)
    return state is not None and state.host == host
