"""Members that come to a group that runs already, because the controller has put them there."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

from muri.errors import MuriError
from muri.launcher import protocol
from muri.launcher.accumulation.planned import STEPS_VARIABLE
from muri.launcher.member_session import MemberSession
from muri.launcher.members import MemberTable
from muri.launcher.membership import Membership, load_membership

logger = logging.getLogger("muri.launcher")

SAVE_PATIENCE_S: Final = 60.0
"""A script that has a checkpoint, but no process to stand for it any more, may work on until it is saved."""


class Door:
    """Lets new members into a runtime.

    The connection's other end is known to be the same user's; that the job belongs here is what the
    controller has written into the job's AdminComment, which users cannot.

    Args:
        host_job: The job that the runtime runs in, None when nobody can join.
        table: The members.
        discipline: How they take turns.
        membership: Whom to ask; loaded when first needed.
        accumulate_steps: Into how many micro-batches the batches of the first members are to be split.
    """

    def __init__(
        self,
        host_job: str | None,
        table: MemberTable,
        discipline: str,
        membership: Callable[[], Membership] = load_membership,
        accumulate_steps: Mapping[str, int] | None = None,
    ) -> None:
        self.host_job = host_job
        self._table = table
        self._discipline = discipline
        self._membership = membership
        self._lock = threading.Lock()
        self._accumulate_steps = dict(accumulate_steps or {})

    def environment(self, job_id: str) -> dict[str, str]:
        """Variables that tell a member's script what the scheduler chose for it."""
        steps = self._accumulate_steps.get(job_id, 1)
        return {STEPS_VARIABLE: str(steps)} if steps > 1 else {}

    def refusal(self, job_id: str) -> str:
        """Why a job that is no member yet cannot become one, "" when it is one now."""
        if job_id in self._table:
            return ""
        if self.host_job is None:
            return f"job {job_id} is no member of this group"
        if self._discipline == "lockstep":
            return f"job {job_id} has no place in the rotation of this group"
        try:
            membership = self._membership()
            host, steps = membership.host_of(job_id), membership.accumulate_steps(job_id)
        except MuriError as error:
            return f"nobody could say whether job {job_id} belongs to this group: {error}"
        if host != self.host_job:
            return f"job {job_id} is no member of this group"
        with self._lock:
            self._table.add(job_id)
            self._accumulate_steps[job_id] = steps
        logger.info("job %s joins the group%s", job_id, f", with batches in {steps} parts" if steps > 1 else "")
        return ""


def cancel(session: MemberSession, signum: int) -> None:
    """End a script whose own process is gone; one that has a checkpoint is saved first."""
    if session.checkpointed:
        session.deliver(signum)
        session.ended.wait(SAVE_PATIENCE_S)
    if not session.ended.is_set():
        session.end(signum)
    session.ended.wait()


def last_frame(session: MemberSession, *, shared: bool = False, end_cause: str | None = None) -> protocol.Frame:
    """What a member's process is told at the end of its script.

    Args:
        session: The script's session.
        shared: Whether other members are at work in the runtime.
        end_cause: Why the runtime ends, if it was not told to.
    """
    if session.lost:
        return {"type": "lost", "reason": end_cause or "the runtime was told to end"}
    if session.stopped_at is not None:
        return {"type": "preempted", "code": session.exit_code, "iteration": session.stopped_at}
    short = {"out_of_memory": True} if session.out_of_memory and shared else {}
    return {"type": "exit", "code": session.exit_code, **short}
