"""Members that come to a group that runs already, because the controller has put them there."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.launcher import protocol, rendezvous
from muri.launcher.member_session import MemberSession
from muri.launcher.members import MemberTable
from muri.launcher.membership import Membership, load_membership

logger = logging.getLogger("muri.launcher")

SAVE_PATIENCE_S: Final = 60.0
"""A script that has a checkpoint, but no process to stand for it any more, may work on until it is saved."""


def host_socket(run_dir: Path, host_job: str) -> Path:
    """The name under which a new member finds the runtime of a host job."""
    return run_dir / f"host-{host_job}.sock"


def find_host_runtime(environment: Mapping[str, str], host_job: str) -> socket.socket | None:
    """Connect to the runtime of a host job on this node; None when there is none.

    Raises:
        RendezvousError: The run directory cannot be trusted.
        ProtocolError: The runtime belongs to another user.
    """
    run_dir = rendezvous.default_run_dir(environment)
    if not run_dir.is_symlink() and not run_dir.exists():
        return None
    rendezvous.verify_run_dir(run_dir)
    connection = rendezvous.connect(host_socket(run_dir, host_job))
    if connection is not None:
        protocol.require_same_user(connection)
    return connection


class Door:
    """Lets new members into a runtime.

    The connection's other end is known to be the same user's; that the job belongs here is what the
    controller has written into the job's AdminComment, which users cannot.

    Args:
        host_job: The job that the runtime runs in, None when nobody can join.
        table: The members.
        discipline: How they take turns.
        membership: Whom to ask; loaded when first needed.
    """

    def __init__(
        self,
        host_job: str | None,
        table: MemberTable,
        discipline: str,
        membership: Callable[[], Membership] = load_membership,
    ) -> None:
        self.host_job = host_job
        self._table = table
        self._discipline = discipline
        self._membership = membership
        self._lock = threading.Lock()

    def refusal(self, job_id: str) -> str:
        """Why a job that is no member yet cannot become one, "" when it is one now."""
        if job_id in self._table:
            return ""
        if self.host_job is None:
            return f"job {job_id} is no member of this group"
        if self._discipline == "lockstep":
            return f"job {job_id} has no place in the rotation of this group"
        try:
            host = self._membership().host_of(job_id)
        except MuriError as error:
            return f"nobody could say whether job {job_id} belongs to this group: {error}"
        if host != self.host_job:
            return f"job {job_id} is no member of this group"
        with self._lock:
            self._table.add(job_id)
        logger.info("job %s joins the group", job_id)
        return ""


def cancel(session: MemberSession, signum: int) -> None:
    """End a script whose own process is gone; one that has a checkpoint is saved first."""
    if getattr(session, "checkpointed", False):
        session.deliver(signum)
        session.ended.wait(SAVE_PATIENCE_S)
    if not session.ended.is_set():
        session.end(signum)
    session.ended.wait()


def last_frame(session: MemberSession) -> protocol.Frame:
    """What a member's process is told at the end of its script."""
    if session.lost:
        return {"type": "lost", "reason": "the runtime was told to end"}
    stopped_at = getattr(session, "stopped_at", None)
    if stopped_at is not None:
        return {"type": "preempted", "code": session.exit_code, "iteration": stopped_at}
    return {"type": "exit", "code": session.exit_code}
