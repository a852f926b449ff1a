"""What a group of several ranks changes for a runtime, its server and its sessions."""

import contextlib
import errno
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

from muri.launcher.hangs.watch import Finding, idle_cause
from muri.launcher.job.environment import task_of
from muri.launcher.job.session import MemberSession
from muri.launcher.ranks.coordination import Ranks
from muri.launcher.ranks.link import Place, RankLinkError
from muri.launcher.ranks.network_order import session_key
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.sessions.setup import call_later
from muri.launcher.wire.protocol import AttachRequest

logger = logging.getLogger("muri.launcher")

PEER_GRACE_S: Final = 10.0
"""How long a member's script may go on after it failed on another rank: its own communication mostly notices first."""

LOSS_GRACE_S: Final = 2.0
"""How long a failed script's exit code is held back: the loss of another rank may have made it fail."""

SILENCE_FACTOR: Final = 2.0
"""How many hang timeouts a rank's runtime may be silent for: a runtime is more likely to be busy than a script."""


class PortTakenError(RankLinkError):
    """Another process listens on the port that rank 0 was told to use."""

    exit_code = errno.EADDRINUSE


class RankGroup:
    """One runtime of several; see `network_order` for the order that they share.

    Attributes:
        place: Rank and address of this runtime.
        arbiter: The arbiter of this rank.

    Args:
        place: Of this runtime.
        table: The sessions.
        end_runtime: Makes the runtime end its sessions and itself.
        peer_grace_s: See `PEER_GRACE_S`.
    """

    def __init__(
        self, place: Place, table: MemberTable, end_runtime: Callable[[], None], peer_grace_s: float = PEER_GRACE_S
    ) -> None:
        self.place = place
        self._lost = threading.Event()
        self._table = table
        self._end_runtime = end_runtime
        self._peer_grace_s = peer_grace_s
        self._errors: dict[str, int] = {}
        self._ranks = Ranks(place, self._peer_failed, self._rank_lost, end_runtime, self._end_hung)
        self.arbiter = self._ranks.arbiter

    @property
    def lost(self) -> bool:
        """Whether another rank was lost, so that this runtime's end is a failure."""
        return self._lost.is_set()

    def cut_short(self, session: MemberSession) -> bool:
        """Whether a session failed because another rank was lost; a lost peer may break a collective first."""
        return session.exit_code != 0 and self._lost.wait(LOSS_GRACE_S)

    def start(self) -> None:
        """Find the other ranks.

        Raises:
            PortTakenError: Another process has rank 0's port: try again with another one.
            RankLinkError: Rank 0 cannot listen at its address.
        """
        where = f"{self.place.host}:{self.place.port}"
        try:
            self._ranks.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTakenError(f"rank 0 cannot listen on {where}: the port is taken") from error
            raise RankLinkError(f"rank 0 cannot listen on {where}: {error.strerror}") from error

    def end(self) -> None:
        """Tell the other ranks that the group ends."""
        self._ranks.end()

    def refusal(self, request: AttachRequest) -> dict[str, str] | None:
        """Why a script cannot run in this group, None when it can."""
        rank, world_size = task_of(request.environment)
        if (rank, world_size) == (self.place.rank, self.place.world_size):
            return None
        return {
            "kind": "ranks",
            "reason": f"it runs as rank {rank} of {world_size}, but its group has one runtime per GPU and this is rank "
            f"{self.place.rank} of {self.place.world_size}; start one `muri run` per GPU with srun or torchrun",
        }

    def announce(self, request: AttachRequest, stderr: int) -> None:
        """Announce a session that is about to start."""
        self.arbiter.announce(request.job_id, session_key(request.environment))
        self._forget_error(request.job_id)
        self._errors[request.job_id] = os.dup(stderr)

    def exchange(self, findings: list[Finding], interval_s: float, timeout_s: float) -> None:
        """Report the findings about the members here to the other ranks."""
        for finding in findings:
            member = finding.session.member
            key = self.arbiter.key_of(member)
            self._ranks.report_idle(member, key, finding.spent_percent, must_work=finding.must_work)
        self._ranks.heartbeat(interval_s, SILENCE_FACTOR * timeout_s)

    def _end_hung(self, member: str, key: str) -> None:
        session = self._running(member, key)
        if session is not None:
            scope = f"on any of its ranks (this is {self.place.rank})"
            session.end_as_hung(idle_cause(scope, obstructs=self.arbiter.obstructs(member)))

    def ended(self, session: MemberSession) -> None:
        """Tell the other ranks that a session ended on this rank."""
        self._forget_error(session.member)
        self._ranks.report_end(session.member, self.arbiter.key_of(session.member), session.exit_code or 0)

    def _forget_error(self, member: str) -> None:
        file = self._errors.pop(member, None)
        if file is not None:
            os.close(file)

    def _rank_lost(self, cause: str) -> None:
        logger.error("rank %d ends, and its members go back to the queue: %s", self.place.rank, cause)
        self._lost.set()
        self._end_runtime()

    def _peer_failed(self, member: str, key: str, rank: int, code: int) -> None:
        session = self._running(member, key)
        if session is not None:
            logger.warning("member %s failed on rank %d with exit code %d", member, rank, code)
            call_later(self._peer_grace_s, self._end_orphan, session, rank, code)

    def _running(self, member: str, key: str) -> MemberSession | None:
        if self.arbiter.key_of(member) != key:
            return None
        return next((session for session in self._table.running() if session.member == member), None)

    def _end_orphan(self, session: MemberSession, rank: int, code: int) -> None:
        if session.ended.is_set():
            return
        text = (
            f"muri: rank {rank} of job {session.member} ended with exit code {code}; rank {self.place.rank} cannot go "
            f"on without it, did not end by itself within {self._peer_grace_s:g} s, and is ended\n"
        )
        with contextlib.suppress(KeyError, OSError):
            os.write(self._errors[session.member], text.encode())
        logger.warning(text.strip())
        session.end(signal.SIGTERM)
