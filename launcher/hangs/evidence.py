"""What the kernel shows of threads that may hang: their states, CPU time and idle time."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.launcher.job.process_tree import MURIS_OWN, threads_of

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
    """Seconds between two samples for a timeout; 0 is no timeout."""
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
