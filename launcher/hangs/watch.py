"""Finds members that hang, and has them ended.

Two findings make a member hang, each only if it holds for the whole timeout:

- *Stopped*: a script's own process, or its supervisor, was stopped by a signal (SIGSTOP). Where Slurm suspends the job,
  this watch is stopped as well.
- *Still*: the member holds a resource for which others wait, and nothing of it works: none of its threads and
  subprocesses runs, wants to run, or waits for a disk, and together they use less CPU than `patience.IDLE_SHARE`.

Time in a stage is no evidence: a validation epoch or a checkpoint works. A member that waits for something and is in
nobody's way may do so. In a group of several ranks a still member may wait for its own peers: see `ranks.stillness`.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.hangs.evidence import (
    IdleTimer,
    Look,
    children_of,
    has_in_environment,
    interval_of,
    look_at,
    threads_of,
    trees,
)
from muri.launcher.job.environment import HANG_TIMEOUT_VARIABLE, hang_timeout_s
from muri.launcher.job.session import MemberSession, Roots

logger = logging.getLogger("muri.launcher")

HINT: Final = f"{HANG_TIMEOUT_VARIABLE} sets the time, 0: never"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out about a member.

    Attributes:
        session: Its session.
        still_s: For how long nothing of it has worked.
        stopped_s: For how long its process has been stopped.
        in_the_way: Whether others wait for what it holds.
        timeout_s: How long that is borne; 0: for ever.
    """

    session: MemberSession
    still_s: float
    stopped_s: float
    in_the_way: bool
    timeout_s: float

    @property
    def stopped(self) -> bool:
        """Whether its process has been stopped for too long."""
        return 0 < self.timeout_s <= self.stopped_s

    @property
    def spent_percent(self) -> int:
        """How much of the timeout it has been still for; 0 where there is none."""
        return int(100 * self.still_s / self.timeout_s) if self.timeout_s else 0


class Peers(Protocol):
    """The other ranks of a group, which have a say in whether a member hangs."""

    def exchange(self, findings: list[Finding], interval_s: float, timeout_s: float) -> None:
        """Tell what was found here, and end what is still on all ranks."""


@dataclass(slots=True)
class _Watched:
    """What is remembered of a session between looks."""

    still: IdleTimer
    stopped: IdleTimer
    timeout_s: float = field(default=0.0)


class HangWatch:
    """Looks at a runtime's members every few seconds.

    Args:
        running: The sessions under way.
        arbiter: Knows who is in whose way.
        timeout_s: How long a member may be still, where it does not say otherwise.
        peers: The other ranks of the group, if it has several.
        now: Clock in seconds.
    """

    def __init__(
        self,
        running: Callable[[], list[MemberSession]],
        arbiter: Arbiter,
        timeout_s: float,
        peers: Peers | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._running = running
        self._arbiter = arbiter
        self._timeout_s = timeout_s
        self._peers = peers
        self._watched: dict[MemberSession, _Watched] = {}

    def start(self) -> None:
        """Watch in the background."""
        threading.Thread(target=self._watch, name="hangs", daemon=True).start()

    def look(self) -> float:
        """Look at all members and end those that hang; returns the seconds until the next look."""
        sessions = [session for session in self._running() if not session.hung]
        self._watched = {session: self._watched.get(session) or self._begin(session) for session in sessions}
        roots = {session: session.roots() for session in sessions}
        findings = [self._find(session, roots) for session in sessions]
        for finding in findings:
            if finding.stopped:
                finding.session.end_as_hung(
                    f"the script's process was stopped by a signal (SIGSTOP), nobody has continued it for "
                    f"{finding.timeout_s:g} s, and it is ended ({HINT})"
                )
            elif self._peers is None and finding.in_the_way and finding.spent_percent >= 100:
                finding.session.end_as_hung(still_cause(f"for {finding.timeout_s:g} s"))
        interval_s = interval_of(min([w.timeout_s for w in self._watched.values() if w.timeout_s] or [self._timeout_s]))
        if self._peers is not None:
            self._peers.exchange(findings, interval_s, self._timeout_s)
        return interval_s

    def _watch(self) -> None:
        pause = threading.Event()
        interval_s = interval_of(self._timeout_s)
        while not pause.wait(interval_s):
            try:
                interval_s = self.look()
            except Exception:  # a watch that fails must not end what it watches, nor itself
                logger.exception("looking for members that hang failed")

    def _begin(self, session: MemberSession) -> _Watched:
        timeout_s = self._timeout_s
        try:
            timeout_s = hang_timeout_s(session.environment(), timeout_s)
        except UsageError as error:
            logger.warning("member %s: %s", session.member, error)
        interval_s = interval_of(timeout_s)
        return _Watched(IdleTimer(interval_s, self._now), IdleTimer(interval_s, self._now), timeout_s)

    def _find(self, session: MemberSession, roots: Mapping[MemberSession, Roots]) -> Finding:
        watched, own = self._watched[session], roots[session]
        others = [other for who, other in roots.items() if who is not session]
        held = self._arbiter.obstructs(session.member)
        look = look_at(family_of(session.member, own, others))
        still_s = watched.still.still_s(look, (session.clock.iterations, held))
        processes = [look_at(threads_of(pid)) for pid in (own.process, own.supervisor) if pid]
        stopped = any(process.stopped for process in processes)
        stopped_s = watched.stopped.still_s(Look(frozenset(), 0), stopped)
        return Finding(session, still_s, stopped_s if stopped else 0.0, held, watched.timeout_s)


def still_cause(scope: str) -> str:
    """Why a member that is still and in the way is ended.

    Args:
        scope: For how long, or where, nothing of it has worked.
    """
    return (
        f"the script holds a resource for which other jobs wait, and nothing of it has worked {scope}: it hangs and is "
        f"ended ({HINT})"
    )


def own_threads(numbers: Iterable[int]) -> list[Path]:
    """Threads of this process."""
    return [Path(f"/proc/{os.getpid()}/task/{number}") for number in numbers]


def family_of(member: str, roots: Roots, others: Sequence[Roots]) -> list[Path]:
    """All threads that work for a member, those of its subprocesses included.

    A worker that was forked by a thread which has ended belongs to nobody any more: it counts for every member.

    Args:
        member: Its job id, which its subprocesses have in their environment.
        roots: Where to begin.
        others: The roots of the other members.
    """
    if roots.supervisor:
        return list(trees([roots.supervisor]))
    own = own_threads(roots.threads)
    theirs = {child for other in others for child in children_of(own_threads(other.threads))}
    mine = set(children_of(own))
    for child in set(children_of(threads_of(os.getpid()))) - theirs - mine:
        if has_in_environment(child, "SLURM_JOB_ID", member) or _is_fork(child):
            mine.add(child)
    return [*own, *trees(mine)]


def _is_fork(pid: int) -> bool:
    """Whether a process is a fork of this one that runs no other program."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
