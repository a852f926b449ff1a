"""What the kernel tells of processes and threads that may hang: their states, and how long they ran on a CPU."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STOPPED: Final = "T"
_AT_WORK: Final = frozenset("RDt")
"""Running or waiting for a CPU; waiting for a disk or file server; held by a debugger."""

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


IDLE_SHARE: Final = 0.0002
"""Who uses less of a core than this does not work: a progress bar's thread and a loop that asks every few seconds
whether a dead worker has sent something use a tenth of it; a download of 15 KB a second uses it up."""

_SLACK_NS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Look:
    """What some threads were seen doing.

    Attributes:
        states: Their states, as letters of proc(5).
        cpu_ns: How long they have run on a CPU so far, nanoseconds.
    """

    states: frozenset[str]
    cpu_ns: int

    @property
    def at_work(self) -> bool:
        """Whether one of them runs, wants to, waits for a disk or file server, or is held by a debugger."""
        return bool(self.states & _AT_WORK)

    @property
    def stopped(self) -> bool:
        """Whether all of them were stopped by a signal."""
        return self.states == {STOPPED}


def look_at(threads: Iterable[Path]) -> Look:
    """Look at threads, given as directories `/proc/PID/task/TID`; one that is gone does not count."""
    states, cpu_ns = set(), 0
    for thread in threads:
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            states.add(fields[0])
            cpu_ns += _cpu_ns(thread, fields)
    return Look(frozenset(states), cpu_ns)


def _cpu_ns(thread: Path, stat: list[str]) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except OSError:  # a kernel without it counts in ticks
        return (int(stat[11]) + int(stat[12])) * 1_000_000_000 // _TICKS_PER_S


def threads_of(pid: int) -> list[Path]:
    """All threads of a process; none if it is gone."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []


def children_of(threads: Iterable[Path]) -> Iterator[int]:
    """The processes that these threads have started and that are still there."""
    for thread in threads:
        with contextlib.suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


def trees(pids: Iterable[int]) -> Iterator[Path]:
    """All threads of these processes and of all that these have started."""
    waiting = list(pids)
    while waiting:
        threads = threads_of(waiting.pop())
        yield from threads
        waiting.extend(children_of(threads))


def has_in_environment(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with a variable of this value."""
    with contextlib.suppress(OSError):
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def interval_of(timeout_s: float) -> float:
    """Seconds between two looks for a timeout; 0 is none."""
    return min(5.0, timeout_s / 10) if timeout_s else 5.0


class IdleTimer:
    """Adds up for how long what is looked at has been still.

    Only time that was watched counts: however long after the last look one comes, it adds at most twice the
    interval. A machine that was suspended, or so busy that the watcher did not run, makes nothing look still.

    Args:
        interval_s: Seconds between two looks.
        now: Clock in seconds.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._since: object = None
        self._cpu_ns = 0
        self._looked_s = 0.0
        self._still_s = 0.0

    def still_s(self, look: Look, state: object = True) -> float:
        """Seconds since the last sign of life, 0 if there is one now.

        Args:
            look: What was seen.
            state: What else must stay equal, for example how many iterations were done.
        """
        now_s = self._now()
        watched_s = min(now_s - self._looked_s, 2 * self._interval_s)
        self._looked_s = now_s
        used_ns, allowed_ns = look.cpu_ns - self._cpu_ns, IDLE_SHARE * 1e9 * (self._still_s + watched_s) + _SLACK_NS
        if look.at_work or state != self._since or not 0 <= used_ns <= allowed_ns:
            self._since, self._cpu_ns, self._still_s = state, look.cpu_ns, 0.0
        else:
            self._still_s += watched_s
        return self._still_s
