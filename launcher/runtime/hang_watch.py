"""Finds members that hang, and ends them.

Two findings make a member hang, each only if it holds for the whole timeout:

- *Stopped*: a signal (SIGSTOP) has stopped the script's own process, or its supervisor. Where Slurm suspends the pilot
  job, this watch is stopped as well; where it suspends the member's job, the member is paused and not watched.
- *Idle*: none of it works, though it holds a resource for which others wait, or has begun to train: no thread or
  subprocess runs, is ready to run, or waits for a disk, and together they use less CPU than `IDLE_SHARE`. A
  member that waits for its turn at a resource is not idle.

Time in a stage is no evidence: a validation epoch or a checkpoint is work. A member that obstructs no other may wait as
long as it likes before its first iteration. In a group of several ranks an idle member may wait for its own peers: see
`coordination.IdleReports`.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.job.environment import HANG_TIMEOUT_VARIABLE, hang_timeout_s
from muri.launcher.job.session import MURIS_OWN, MemberSession, Roots, children_of, threads_of, threads_of_trees

logger = logging.getLogger("muri.launcher")

STOPPED: Final = "T"
_AT_WORK: Final = frozenset("RDt")
"""Running or waiting for a CPU; waiting for a disk or file server; held by a debugger."""

IDLE_SHARE: Final = 0.0002
"""Threads that use less of a core than this do no work. The thread of a progress bar, or a loop that polls a dead
worker every few seconds, uses a tenth of it; a download of 15 KB a second uses all of it."""

ASKING_NS: Final = 50_000
"""A thread that uses less of a CPU than this each time it wakes up at a lock only asks for it. Python's ask for the
interpreter takes 10 µs; the least that Python code does takes more."""

LEAST_WAKES: Final = 2
"""A thread that wakes up less often between two samples does not ask again and again."""

_SLACK_NS: Final = 2_000_000
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ThreadSample:
    """What some threads were doing at one moment.

    Attributes:
        states: Their states, as letters of proc(5).
        cpu_ns: How long they have run on a CPU so far, nanoseconds.
    """

    states: frozenset[str] = frozenset()
    cpu_ns: int = 0

    @property
    def at_work(self) -> bool:
        """Whether one of them runs, is ready to run, waits for a disk or file server, or is held by a debugger."""
        return bool(self.states & _AT_WORK)

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped all of them."""
        return self.states == {STOPPED}


@dataclass(frozen=True, slots=True)
class _Reading:
    """One thread at one moment; `asked_ns` of its CPU time went into asking for a lock again and again."""

    cpu_ns: int
    wakes: int
    at_lock: bool
    asks: bool = False
    asked_ns: int = 0


class ThreadMeter:
    """Samples threads again and again, and leaves out Muri's own and those that only ask for a lock all the time.

    While C code keeps the interpreter of a process, its other Python threads do that: every few milliseconds each of
    them wakes up for some microseconds.
    """

    def __init__(self) -> None:
        self._before: dict[Path, _Reading] = {}

    def sample(self, threads: Iterable[Path]) -> ThreadSample:
        """Sample threads, given as directories `/proc/PID/task/TID`; one that has ended does not count."""
        readings, states, cpu_ns = {}, set(), 0
        for thread in threads:
            with contextlib.suppress(OSError, IndexError, ValueError):
                name, fields = _stat(thread)
                if name == MURIS_OWN:
                    continue
                reading = readings[thread] = self._read(thread, fields[0], _cpu_ns(thread, fields))
                cpu_ns += reading.cpu_ns - reading.asked_ns
                if not reading.asks:
                    states.add(fields[0])
        self._before = readings
        return ThreadSample(frozenset(states), cpu_ns)

    def _read(self, thread: Path, state: str, cpu_ns: int) -> _Reading:
        before = self._before.get(thread)
        if before is not None and cpu_ns == before.cpu_ns:
            return replace(before, asks=False)
        at_lock = "futex" in (thread / "wchan").read_text()
        now = _Reading(cpu_ns, _wakes(thread), at_lock)
        if before is None:
            return now
        used_ns, wakes = cpu_ns - before.cpu_ns, now.wakes - before.wakes
        asks = wakes >= LEAST_WAKES and used_ns <= ASKING_NS * wakes and (at_lock or (state == "R" and before.at_lock))
        # One that is met while it runs was at the lock before, and will be there again.
        return replace(now, asks=asks, at_lock=at_lock or asks, asked_ns=before.asked_ns + used_ns * asks)


def sample(threads: Iterable[Path]) -> ThreadSample:
    """Sample threads once; see `ThreadMeter.sample`."""
    return ThreadMeter().sample(threads)


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped all threads of a process; False if it has ended."""
    states = set()
    for thread in threads_of(pid):
        with contextlib.suppress(OSError, IndexError):
            states.add(_stat(thread)[1][0])
    return states == {STOPPED}


def _stat(thread: Path) -> tuple[str, list[str]]:
    """A thread's name, and what proc(5) tells of it from its state on."""
    named, _, rest = (thread / "stat").read_text().rpartition(")")
    return named.partition("(")[2], rest.split()


def _wakes(thread: Path) -> int:
    """How often a thread has gone to sleep by itself."""
    status = (thread / "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def _cpu_ns(thread: Path, stat: list[str]) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except OSError:  # a kernel without schedstat counts in ticks
        return (int(stat[11]) + int(stat[12])) * 1_000_000_000 // _TICKS_PER_S


def has_in_environment(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with a variable of this value."""
    with contextlib.suppress(OSError):
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def sampling_interval_s(timeout_s: float) -> float:
    """Seconds between two samples for a timeout; 0 is not a timeout."""
    return min(5.0, timeout_s / 10) if timeout_s else 5.0


class IdleTimer:
    """Adds up how long threads have been idle.

    Only time between samples counts, and at most two intervals of it: a machine that was suspended, or too busy to
    run the sampler, makes no thread look idle.

    Args:
        interval_s: Seconds between two samples.
        now: Clock in seconds.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._progress: object = None
        self._cpu_ns = 0
        self._sampled_s = 0.0
        self._idle_s = 0.0

    def idle_s(self, threads: ThreadSample, progress: object = True) -> float:
        """Seconds since the last sign of life, 0 if there is one now.

        Args:
            threads: The sample.
            progress: What else must stay equal, for example how many iterations were done.
        """
        now_s = self._now()
        watched_s = min(now_s - self._sampled_s, 2 * self._interval_s)
        self._sampled_s = now_s
        used_ns = threads.cpu_ns - self._cpu_ns
        allowed_ns = IDLE_SHARE * 1e9 * (self._idle_s + watched_s) + _SLACK_NS
        if threads.at_work or progress != self._progress or not 0 <= used_ns <= allowed_ns:
            self._progress, self._cpu_ns, self._idle_s = progress, threads.cpu_ns, 0.0
        else:
            self._idle_s += watched_s
        return self._idle_s


WARNING_FACTOR: Final = 50
"""A script that works and does no iteration for so many times its longest one is worth a warning."""

HINT: Final = f"{HANG_TIMEOUT_VARIABLE} sets the time, 0: never"


@dataclass(frozen=True, slots=True)
class Finding:
    """The evidence about one member.

    Attributes:
        session: Its session.
        idle_s: How long none of it has worked.
        stopped_s: How long its process has been stopped.
        obstructs: Whether others wait for what it holds.
        timeout_s: How long until it counts as hanging; 0: it never does.
    """

    session: MemberSession
    idle_s: float
    stopped_s: float
    obstructs: bool
    timeout_s: float

    @property
    def must_work(self) -> bool:
        """Whether it must not be idle: others wait for what it holds, or it has begun to train and holds its GPUs."""
        return self.obstructs or self.session.clock.iterations > 0

    @property
    def stopped(self) -> bool:
        """Whether its process has been stopped for too long."""
        return 0 < self.timeout_s <= self.stopped_s

    @property
    def spent_percent(self) -> int:
        """The share of the timeout for which it has been idle; 0 without a timeout."""
        return int(100 * self.idle_s / self.timeout_s) if self.timeout_s else 0


class Peers(Protocol):
    """The other ranks of a group, which have a say in whether a member hangs."""

    def exchange(self, findings: list[Finding], interval_s: float, timeout_s: float) -> None:
        """Report the findings of this rank, and end members that are idle on all ranks."""


@dataclass(slots=True)
class _Timers:
    """What the watch remembers of a session between two checks."""

    idle: IdleTimer
    stopped: IdleTimer
    timeout_s: float
    threads: ThreadMeter
    iterations: int = 0
    iterated_s: float = 0.0
    longest_s: float = 0.0
    warned: bool = False


class HangWatch:
    """Checks a runtime's members every few seconds.

    Args:
        running: The sessions under way.
        arbiter: Knows which member obstructs others, and which one waits for its turn.
        timeout_s: How long a member may be idle, unless its environment says otherwise.
        peers: The other ranks of the group, if it has several.
        now: Clock in seconds.
    """

    def __init__(
        self,
        running: Callable[[], list[MemberSession]],
        arbiter: PausingArbiter,
        timeout_s: float,
        peers: Peers | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._running = running
        self._arbiter = arbiter
        self._timeout_s = timeout_s
        self._peers = peers
        self._timers: dict[MemberSession, _Timers] = {}

    def start(self) -> None:
        """Watch in the background."""
        threading.Thread(target=self._watch, name="hangs", daemon=True).start()

    def check(self) -> float:
        """Check all members and end those that hang; returns the seconds until the next check."""
        watched = [session for session in self._running() if not session.hung]
        roots = {session: session.roots() for session in watched}
        sessions = [session for session in watched if not session.paused]
        self._timers = {session: self._timers.get(session) or self._begin(session) for session in sessions}
        findings = [self._find(session, roots) for session in sessions]
        for session in sessions:
            self._warn(session, self._timers[session])
        for finding in findings:
            if finding.stopped:
                finding.session.end_as_hung(
                    f"the script's process was stopped by a signal (SIGSTOP), was not continued for "
                    f"{finding.timeout_s:g} s, and is ended ({HINT})"
                )
            elif self._peers is None and finding.must_work and finding.spent_percent >= 100:
                finding.session.end_as_hung(idle_cause(f"for {finding.timeout_s:g} s", obstructs=finding.obstructs))
        shortest_s = min([t.timeout_s for t in self._timers.values() if t.timeout_s] or [self._timeout_s])
        interval_s = sampling_interval_s(shortest_s)
        if self._peers is not None:
            self._peers.exchange(findings, interval_s, self._timeout_s)
        return interval_s

    def _watch(self) -> None:
        pause = threading.Event()
        interval_s = sampling_interval_s(self._timeout_s)
        while not pause.wait(interval_s):
            try:
                interval_s = self.check()
            except Exception:  # a failing watch must end neither the members nor itself
                logger.exception("looking for members that hang failed")

    def _warn(self, session: MemberSession, timers: _Timers) -> None:
        """Say once that a script does no iterations any more: it may validate, or compute for ever."""
        now_s, iterations = self._now(), session.clock.iterations
        if iterations != timers.iterations:
            recent_s = [record.iteration_s for record in list(session.clock.recent)]
            timers.longest_s = max([timers.longest_s, *recent_s])
            timers.iterations, timers.iterated_s, timers.warned = iterations, now_s, False
        still_s = now_s - timers.iterated_s
        if iterations and not timers.warned and still_s > max(timers.timeout_s, WARNING_FACTOR * timers.longest_s) > 0:
            timers.warned = True
            logger.warning(
                "member %s has done no iteration for %.0f s; its longest so far took %.3g s. It is not ended, because "
                "it may be at work", session.member, still_s, timers.longest_s,
            )  # fmt: skip

    def _begin(self, session: MemberSession) -> _Timers:
        timeout_s = self._timeout_s
        try:
            timeout_s = hang_timeout_s(session.environment(), timeout_s)
        except UsageError as error:
            logger.warning("member %s: %s", session.member, error)
        interval_s = sampling_interval_s(timeout_s)
        return _Timers(IdleTimer(interval_s, self._now), IdleTimer(interval_s, self._now), timeout_s, ThreadMeter())

    def _find(self, session: MemberSession, roots: Mapping[MemberSession, Roots]) -> Finding:
        timers, own = self._timers[session], roots[session]
        others = [other for who, other in roots.items() if who is not session]
        obstructs, waits = self._arbiter.obstructs(session.member), self._arbiter.waits(session.member)
        threads = timers.threads.sample(threads_of_member(session.member, own, others))
        idle_s = timers.idle.idle_s(threads, (session.clock.iterations, obstructs, waits))
        if waits and not obstructs:
            idle_s = 0.0
        stopped = any(is_stopped(pid) for pid in (own.process, own.supervisor) if pid)
        stopped_s = timers.stopped.idle_s(ThreadSample(), stopped)
        return Finding(session, idle_s, stopped_s if stopped else 0.0, obstructs, timers.timeout_s)


def idle_cause(scope: str, *, obstructs: bool) -> str:
    """Why a member that is idle is ended.

    Args:
        scope: For how long, or where, nothing of it has worked.
        obstructs: Whether others wait for what it holds.
    """
    what = "holds a resource for which other jobs wait" if obstructs else "has stopped in the middle of its training"
    return f"the script {what}, and nothing of it has worked {scope}: it hangs and is ended ({HINT})"


def threads_of_member(member: str, roots: Roots, others: Sequence[Roots]) -> list[Path]:
    """All threads that work for a member, those of its subprocesses included.

    The owner of a worker that was forked by a thread which has ended is unknown: the worker counts for every member.

    Args:
        member: Its job id, which its subprocesses have in their environment.
        roots: Where its threads and processes begin.
        others: The roots of the other members.
    """
    if roots.supervisor:
        return list(threads_of_trees([roots.supervisor]))
    own = _threads_here(roots.threads)
    theirs = {child for other in others for child in children_of(_threads_here(other.threads))}
    mine = set(children_of(own))
    for child in set(children_of(threads_of(os.getpid()))) - theirs - mine:
        if has_in_environment(child, "SLURM_JOB_ID", member) or _is_fork(child):
            mine.add(child)
    return [*own, *threads_of_trees(mine)]


def _threads_here(numbers: Iterable[int]) -> list[Path]:
    return [Path(f"/proc/{os.getpid()}/task/{number}") for number in numbers]


def _is_fork(pid: int) -> bool:
    """Whether a process is a fork of this one that runs no other program."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return False
