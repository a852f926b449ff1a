"""Members that hang, or are suspended.

A member hangs that is idle for the whole timeout, though it holds a resource for which others wait, or has begun to
train: no thread or subprocess of it runs, is ready to run, or waits for a disk, and together they use less CPU than
`IDLE_SHARE`. A member that waits for its turn at a resource is not idle. One that Slurm has suspended, or that a signal
has stopped (SIGSTOP), is paused and holds nothing: it obstructs no other, and is not watched.

Time in a stage proves nothing: a validation epoch or a checkpoint is work. A member that obstructs no other may wait as
long as it likes before its first iteration. In a group of several ranks an idle member may wait for its own peers: see
`ranks.IdleReports`.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.job.environment import (
    HANG_TIMEOUT_VARIABLE,
    MURIS_OWN,
    seconds_of,
    stat_of,
    threads_of,
)
from muri.launcher.sessions.setup import MemberSession

logger = logging.getLogger("muri.launcher")

SUSPENSION_INTERVAL_S: Final = 1.0
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")

_STOPPED: Final = "T"
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
    """The states of some threads at one moment, as letters of proc(5), and their CPU time so far."""

    states: frozenset[str] = frozenset()
    cpu_ns: int = 0

    @property
    def at_work(self) -> bool:
        """Return whether one of them runs, is ready to run, waits for a disk, or is held by a debugger."""
        return bool(self.states & _AT_WORK)


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
                name, fields = stat_of(thread)
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
        status = (thread / "status").read_text()
        now = _Reading(cpu_ns, int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]), at_lock)
        if before is None:
            return now
        used_ns, wakes = cpu_ns - before.cpu_ns, now.wakes - before.wakes
        asks = wakes >= LEAST_WAKES and used_ns <= ASKING_NS * wakes and (at_lock or (state == "R" and before.at_lock))
        # One that is met while it runs was at the lock before, and will be there again.
        return replace(now, asks=asks, at_lock=at_lock or asks, asked_ns=before.asked_ns + used_ns * asks)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped all threads of a process; False if it has ended."""
    states = set()
    for thread in threads_of(pid):
        with contextlib.suppress(OSError, IndexError):
            states.add(stat_of(thread)[1][0])
    return states == {_STOPPED}


def _cpu_ns(thread: Path, stat: list[str]) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except OSError:  # a kernel without schedstat counts in ticks
        return (int(stat[11]) + int(stat[12])) * 1_000_000_000 // _TICKS_PER_S


def sampling_interval_s(timeout_s: float) -> float:
    """Return the seconds between two samples for a timeout; 0 is not a timeout."""
    return min(5.0, timeout_s / 10) if timeout_s else 5.0


class IdleTimer:
    """Adds up how long threads have been idle.

    Only time between samples counts, and at most two intervals of it: a machine that was suspended, or too busy to run
    the sampler, makes no thread look idle.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._progress: object = None
        self._cpu_ns = 0
        self._sampled_s = 0.0
        self._idle_s = 0.0

    def idle_s(self, threads: ThreadSample, progress: object = True) -> float:
        """Return the seconds since the last sign of life, 0 if there is one now.

        `progress` is anything else that must stay equal, for example how many iterations were done.
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


HINT: Final = f"{HANG_TIMEOUT_VARIABLE} sets the time, 0: never"


@dataclass(frozen=True, slots=True)
class Finding:
    """The evidence about one member."""

    session: MemberSession
    idle_s: float  # how long none of it has worked
    obstructs: bool  # whether others wait for a resource of it
    timeout_s: float  # how long until it counts as hanging; 0: it never does

    @property
    def must_work(self) -> bool:
        """Return whether it must not be idle: others wait for it, or it has begun to train and holds its GPUs."""
        return self.obstructs or self.session.clock.iterations > 0

    @property
    def spent_percent(self) -> int:
        """Return the share of the timeout for which it has been idle; 0 without a timeout."""
        return int(100 * self.idle_s / self.timeout_s) if self.timeout_s else 0


@dataclass(slots=True)
class _Timers:
    idle: IdleTimer
    timeout_s: float
    threads: ThreadMeter


def _look_again_and_again(check: Callable[[], float], interval_s: float, name: str, over: threading.Event) -> None:
    """Call a check in the background until it is `over`; it returns the seconds until the next call."""

    def watch(pause_s: float) -> None:
        while not over.wait(pause_s):
            try:
                pause_s = check()
            except Exception:  # a failing watch must end neither the members nor itself
                logger.exception("looking for members in trouble failed (%s)", name)

    threading.Thread(target=watch, args=(interval_s,), name=name, daemon=True).start()


class HangWatch:
    """Checks a runtime's members every few seconds.

    A member may be idle for `timeout_s`, unless its environment says otherwise. In a group of several ranks `exchange`
    decides, together with the others; see `ranks.Ranks.exchange`.
    """

    def __init__(
        self,
        running: Callable[[], list[MemberSession]],
        arbiter: PausingArbiter,
        timeout_s: float,
        exchange: Callable[[list[Finding], float, float], None] | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._running = running
        self._arbiter = arbiter
        self._timeout_s = timeout_s
        self._exchange = exchange
        self._timers: dict[MemberSession, _Timers] = {}

    def start(self) -> None:
        """Watch in the background."""
        _look_again_and_again(self.check, sampling_interval_s(self._timeout_s), "hangs", threading.Event())

    def check(self) -> float:
        """Check all members and end those that hang; returns the seconds until the next check."""
        sessions = [session for session in self._running() if not session.hung and not session.paused]
        self._timers = {session: self._timers.get(session) or self._begin(session) for session in sessions}
        findings = [self._find(session) for session in sessions]
        for finding in findings:
            if self._exchange is None and finding.must_work and finding.spent_percent >= 100:
                finding.session.end_as_hung(idle_cause(f"for {finding.timeout_s:g} s", obstructs=finding.obstructs))
        shortest_s = min([t.timeout_s for t in self._timers.values() if t.timeout_s] or [self._timeout_s])
        interval_s = sampling_interval_s(shortest_s)
        if self._exchange is not None:
            self._exchange(findings, interval_s, self._timeout_s)
        return interval_s

    def _begin(self, session: MemberSession) -> _Timers:
        timeout_s = self._timeout_s
        try:
            timeout_s = seconds_of(session.request.environment, HANG_TIMEOUT_VARIABLE, timeout_s)
        except UsageError as error:
            logger.warning("member %s: %s", session.member, error)
        interval_s = sampling_interval_s(timeout_s)
        return _Timers(IdleTimer(interval_s, self._now), timeout_s, ThreadMeter())

    def _find(self, session: MemberSession) -> Finding:
        timers, threads = self._timers[session], session.working_threads()
        obstructs, waits = self._arbiter.obstructs(session.member), self._arbiter.waits(session.member)
        idle_s = timers.idle.idle_s(timers.threads.sample(threads), (session.clock.iterations, obstructs, waits))
        if not threads or (waits and not obstructs):
            idle_s = 0.0
        return Finding(session, idle_s, obstructs, timers.timeout_s)


def idle_cause(scope: str, *, obstructs: bool) -> str:
    """Return why an idle member is ended; `scope` says for how long, or where, nothing of it has worked."""
    what = "holds a resource for which other jobs wait" if obstructs else "has stopped in the middle of its training"
    return f"the script {what}, and nothing of it has worked {scope}: it hangs and is ended ({HINT})"


class SuspensionWatch:
    """Pauses a member while its job is suspended.

    `scontrol suspend` stops the processes of a job. One of them is known from the socket: the script, or a thread's
    `muri run`.
    Depending on ProctrackType Slurm stops it by SIGSTOP or by the freezer of its control group; the kernel shows both.
    """

    def __init__(
        self,
        running: Callable[[], list[MemberSession]],
        arbiter: PausingArbiter,
        is_suspended: Callable[[int], bool] = lambda pid: is_stopped(pid) or frozen(pid),
    ) -> None:
        self._running = running
        self._arbiter = arbiter
        self._is_suspended = is_suspended
        self._closed = threading.Event()
        self._lock = threading.Lock()  # held while members are paused and resumed

    def start(self) -> None:
        """Watch in the background."""
        _look_again_and_again(self.check, SUSPENSION_INTERVAL_S, "suspension", self._closed)

    def close(self) -> None:
        """Resume all members for good: the runtime ends, and their scripts have to act on that."""
        self._closed.set()
        self.check()

    def check(self) -> float:
        """Pause and resume members as their processes are; returns the seconds until the next check."""
        with self._lock:
            for session in self._running():
                pid = session.client_pid
                if pid and not self._closed.is_set() and not session.ended.is_set() and self._is_suspended(pid):
                    self._pause(session)
                else:
                    self._resume(session)
        return SUSPENSION_INTERVAL_S

    def _pause(self, session: MemberSession) -> None:
        self._arbiter.pause(session.member)
        if not session.paused:
            session.paused = True
            logger.info("member %s is paused: its job is suspended", session.member)

    def _resume(self, session: MemberSession) -> None:
        if session.paused:
            session.clock.note_pause()
            self._arbiter.resume(session.member)
            session.paused = False
            logger.info("member %s goes on", session.member)


def frozen(pid: int, groups: Path = _CONTROL_GROUPS, processes: Path = Path("/proc")) -> bool:
    """Return whether the freezer of control groups has stopped a process; False where that cannot be seen."""
    with contextlib.suppress(OSError):
        for line in (processes / str(pid) / "cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if not controllers:  # version 2 of control groups
                place, mark = groups / path.lstrip("/") / "cgroup.events", "frozen 1"
            elif "freezer" in controllers.split(","):
                place, mark = groups / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN"
            else:
                continue
            with contextlib.suppress(OSError):
                if mark in place.read_text().splitlines():
                    return True
    return False
