"""What becomes of a group whose runtime was ended by an error of the GPU. Pure.

The runtime names in its status file the members whose work may have caused the error; the host passes
that on in its job's comment. They run alone from then on; the others are candidates again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import Action, Restore, ReturnToQueue
from muri.slurm_plugin.model import Job
from muri.slurm_plugin.view import View

FAULT_PREFIX: Final = "muri-fault:"
_LONGEST_CAUSE: Final = 200
"""Characters; a comment should not be longer than 1,024 bytes in all."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a group's runtime ended.

    Attributes:
        cause: The error.
        culprits: Job ids of the members that may have caused it.
    """

    cause: str
    culprits: tuple[int, ...]


def fault_token(status: Mapping[str, Any]) -> str | None:
    """The token for the host job's comment; None when the runtime's status tells of no fault."""
    fault = status.get("fault")
    if not isinstance(fault, dict):
        return None
    told = {"cause": str(fault.get("cause", ""))[:_LONGEST_CAUSE], "culprits": fault.get("culprits", [])}
    return FAULT_PREFIX + tags.format_json(told)


def fault_of(host: Job | None) -> Fault | None:
    """The fault that a host told of; None when there was none, or Slurm has forgotten the host."""
    told = None if host is None else tags.parse_json(tags.token(host.comment, FAULT_PREFIX))
    if told is None:
        return None
    culprits = told.get("culprits")
    ids = culprits if isinstance(culprits, list) else []
    return Fault(str(told.get("cause", "")), tuple(int(each) for each in ids if str(each).isdecimal()))


def after_the_host(view: View, job: Job, host: int) -> Action:
    """What to do with a member whose host has ended.

    Args:
        view: The snapshot by roles.
        job: The member, waiting.
        host: Its host's job id, 0 when the member's own tag does not tell.
    """
    fault = fault_of(view.jobs.get(host))
    if fault is None:
        return Restore(job.job_id, "its group's host job has ended")
    if job.job_id in fault.culprits:
        return Restore(job.job_id, f"its group ended with an error that it may have caused: {fault.cause}")
    return ReturnToQueue(job.job_id, "", f"its group ended with an error that another member caused: {fault.cause}")
