"""One runtime of a group of several ranks: its arbiter, lost peers, members that hang or are orphaned."""

import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.job.environment import task_of
from muri.launcher.protocol import AttachRequest
from muri.launcher.runtime.hangs import Finding, IdleTimer, ThreadSample, idle_cause
from muri.launcher.runtime.link import Listener, Message, Place, RankLink, RankLinkError, connect
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.runtime.network_order import Follower, Leader, session_key
from muri.launcher.sessions.setup import MemberSession, call_later

logger = logging.getLogger("muri.launcher")

CONNECT_TIMEOUT_S: Final = 60.0

MOST_ROUNDS: Final = 3
"""A report older than this many rounds of rank 0 no longer counts."""

PEER_GRACE_S: Final = 10.0
"""How long a member's script may go on after it failed on another rank: its own communication mostly notices first."""

SILENCE_FACTOR: Final = 2.0
"""How many hang timeouts a rank's runtime may be silent for: a runtime is more likely to be busy than a script."""


BY_SIGNAL: Final = -1
"""Stands for the exit code of a script's process that has told none: only a signal ends it without."""

Run = tuple[str, str]
"""A member and its session's key, which is the same on all ranks."""


class IdleReports:
    """Rank 0's collection of the ranks' reports on members that may hang; safe to use from several threads.

    A script may wait long for its own peers, and hold the network meanwhile: rank 0 validates, the others wait at a
    barrier. It hangs only if it is idle on *all* ranks on which it runs (one that has ended is not one of them), and
    must work on at least one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = 0
        # By rank the last round in which the session counts as idle, and whether it must work
        self._reports: dict[Run, dict[int, tuple[int, bool]]] = {}

    def add(self, rank: int, run: Run, spent_percent: int, *, must_work: bool) -> None:
        """Take a rank's report of a session: for how much of its timeout it was idle, and whether it must not be."""
        with self._lock:
            until = self._round + MOST_ROUNDS if spent_percent >= 100 else -1
            self._reports.setdefault(run, {})[rank] = until, must_work

    def left(self, rank: int, run: Run) -> None:
        """Note that a session has ended on a rank."""
        with self._lock:
            reports = self._reports.get(run, {})
            reports.pop(rank, None)
            if not reports:
                self._reports.pop(run, None)

    def take_hung(self) -> list[Run]:
        """Return the sessions that hang, each once; called once in every round of rank 0."""
        with self._lock:
            hung = [
                run
                for run, reports in self._reports.items()
                if all(self._round <= until for until, _ in reports.values())
                and any(must for _, must in reports.values())
            ]
            for run in hung:
                del self._reports[run]
            self._round += 1
        return hung


class Ranks:
    """Connects one runtime, at its place, with the others; `arbiter` is the one of this rank.

    `end_runtime` makes the runtime end its sessions and itself; `clock` is for the wait for the other ranks.
    """

    def __init__(
        self, place: Place, table: MemberTable, end_runtime: Callable[[], None], clock: Clock = MACHINE_CLOCK
    ) -> None:
        self.place = place
        self._table = table
        self._end_runtime = end_runtime
        self._clock = clock
        self._links: list[RankLink] = []
        self._lock = threading.Lock()
        self._ending = False
        self.lost = ""  # how another rank was lost, which makes this runtime's end a failure
        self._silence: dict[int, IdleTimer] = {}
        self._heard: Counter[int] = Counter()
        self._idle_reports = IdleReports()
        self._incomplete = clock.lock()
        self._incomplete.acquire()
        self._joined: list[Run] = []
        self._leads = place.rank == 0
        self.arbiter: Leader | Follower = (
            Leader(lambda *run: self._send_all({"grant": list(run)}), frozenset(range(1, place.world_size)))
            if self._leads
            else Follower(self._tell_joined)
        )

    def start(self) -> None:
        """Listen, or connect to rank 0 in the background; a RankLinkError if rank 0 cannot listen at its address."""
        if self._leads:
            try:
                self._listener = Listener(self.place, self._take)
            except OSError as error:
                where = f"{self.place.host}:{self.place.port}"
                raise RankLinkError(f"rank 0 cannot listen on {where}: {error.strerror}") from error
        threading.Thread(target=self._gather, name="gather-ranks", daemon=True).start()

    def end(self) -> None:
        """Tell the other ranks that the group ends: a rank that leaves from now on is not lost."""
        self._ending = True
        if self._leads:
            self._send_all({"end": []})
            self._listener.close()

    def refusal(self, request: AttachRequest) -> dict[str, str] | None:
        """Return why a script cannot run in this group, None when it can."""
        rank, world_size = task_of(request.environment)
        if (rank, world_size) == (self.place.rank, self.place.world_size):
            return None
        return {
            "kind": "ranks",
            "reason": f"it runs as rank {rank} of {world_size}, but its group has one runtime per GPU and this is rank "
            f"{self.place.rank} of {self.place.world_size}; start one `muri run` per GPU with srun or torchrun",
        }

    def announce(self, request: AttachRequest) -> None:
        """Announce a session that is about to start."""
        self.arbiter.announce(request.job_id, session_key(request.environment))

    def ended(self, session: MemberSession, key: str) -> None:
        """Tell the other ranks that a session ended on this rank; `key` is its name on all of them."""
        member, code = session.member, session.exit_code
        if code is None:
            code = 0 if session.lost else BY_SIGNAL
        self._tell_leader({"left": [member, key, code]})

    def exchange(self, findings: list[Finding], interval_s: float, timeout_s: float) -> None:
        """Report the findings of this rank, end members that are idle on all ranks, and notice silent ranks.

        It is called every `interval_s` seconds; a member may be idle for `timeout_s`, 0 for ever.
        """
        for finding in findings:
            member, must_work = finding.session.member, finding.must_work
            key, spent = self.arbiter.key_of(member), finding.spent_percent
            self._tell_leader({"idle": [member, key, spent, int(must_work)]})
        self._send_all({})  # a sign of life
        for member, key in self._idle_reports.take_hung():
            self._send_all({"hung": [member, key]})
            self._end_hung(member, key)
        silence_s = SILENCE_FACTOR * timeout_s
        with self._lock:
            ranks = [link.rank for link in self._links]
        for rank in ranks:
            timer = self._silence.setdefault(rank, IdleTimer(interval_s))
            silent_s = timer.idle_s(ThreadSample(), self._heard[rank])
            if 0 < silence_s <= silent_s:
                self._lose(f"rank {rank} has given no sign of life for {silence_s:g} s: its process or its node hangs")

    def _gather(self) -> None:
        if self._leads:
            if not self._incomplete.acquire(timeout=CONNECT_TIMEOUT_S):
                self._lose(f"not all of the other {self.place.world_size - 1} ranks came in {CONNECT_TIMEOUT_S:g} s")
            return
        try:
            link = connect(self.place, CONNECT_TIMEOUT_S, self._clock)
        except RankLinkError as error:
            self._lose(str(error))
            return
        self._take(link)

    def _take(self, link: RankLink) -> None:
        with self._lock:
            self._links.append(link)
            joined = list(self._joined)
            if len(self._links) == self.place.world_size - 1:
                self._incomplete.release()
        for run in joined:  # sessions that started before this rank was connected
            link.send({"joined": list(run)})
        logger.info("rank %d: connected to rank %d", self.place.rank, link.rank)
        try:
            while True:
                self._handle(link.rank, link.receive())
        except (RankLinkError, TypeError, ValueError) as error:
            self._lose(str(error))

    def _handle(self, rank: int, message: Message) -> None:
        self._heard[rank] += 1
        for kind, values in message.items():
            match self.arbiter, kind, values:
                case Follower() as follower, "grant", [str(member), str(key)]:
                    follower.granted(member, key)
                case Leader() as leader, "joined", [str(member), str(key)]:
                    leader.joined(rank, member, key)
                case Leader(), "idle", [str(member), str(key), int(spent), int(must_work)]:
                    self._idle_reports.add(rank, (member, key), spent, must_work=bool(must_work))
                case Follower(), "hung", [str(member), str(key)]:
                    self._end_hung(member, key)
                case Leader(), "left", [str(member), str(key), int(code)]:
                    self._idle_reports.left(rank, (member, key))
                    if code != 0:
                        self._send_all({"failed": [member, key, rank, code]})
                        self._rank_failed(member, key, rank, code)
                case Follower(), "failed", [str(member), str(key), int(failed), int(code)]:
                    self._rank_failed(member, key, failed, code)
                case Follower(), "end", []:
                    self._ending = True
                    self._end_runtime()
                case _:
                    raise RankLinkError(f"rank {rank} sent {kind!r}, which makes no sense here")

    def _tell_joined(self, member: str, key: str) -> None:
        with self._lock:
            if not self._links:
                self._joined.append((member, key))
        self._send_all({"joined": [member, key]})

    def _tell_leader(self, message: Message) -> None:
        if self._leads:
            self._handle(0, message)
        else:
            self._send_all(message)

    def _send_all(self, message: Message) -> None:
        with self._lock:
            links = list(self._links)
        for link in links:
            link.send(message)

    def _lose(self, cause: str) -> None:
        """End the runtime because another rank is gone: without it the order is lost."""
        with self._lock:
            if self._ending:
                return
            self._ending = True
        logger.error("rank %d ends, and its members go back to the queue: %s", self.place.rank, cause)
        self.lost = cause
        self._end_runtime()

    def _end_hung(self, member: str, key: str) -> None:
        session = self._running(member, key)
        if session is not None:
            scope = f"on any of its ranks (this is {self.place.rank})"
            session.end_as_hung(idle_cause(scope, obstructs=self.arbiter.obstructs(member)))

    def _rank_failed(self, member: str, key: str, rank: int, code: int) -> None:
        session = None if rank == self.place.rank else self._running(member, key)
        if session is not None:
            logger.warning("member %s failed: rank %d %s", member, rank, _ending(code))
            call_later(PEER_GRACE_S, self._end_orphan, session, rank, code)

    def _running(self, member: str, key: str) -> MemberSession | None:
        if self.arbiter.key_of(member) != key:
            return None
        return next((session for session in self._table.running() if session.member == member), None)

    def _end_orphan(self, session: MemberSession, rank: int, code: int) -> None:
        if session.ended.is_set():
            return
        text = (
            f"rank {rank} of job {session.member} {_ending(code)}; rank {self.place.rank} cannot go on without it, did "
            f"not end by itself within {PEER_GRACE_S:g} s, and is ended"
        )
        session.tell(text)
        logger.warning(text)
        session.end(signal.SIGTERM)


def _ending(code: int) -> str:
    return "was ended by a signal" if code == BY_SIGNAL else f"ended with exit code {code}"
