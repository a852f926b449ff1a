"""Virtual time for threads that wait for each other: no test of logic sleeps, or depends on how fast the machine is."""

import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from muri.clock import Clock

_REAL_LIMIT_S = 240.0
"""Only a thread that computes without an end, or waits for something else than this clock, takes that long."""

_LONGEST_S = 86_400.0  # No test lasts longer in virtual time: a thread that still sleeps then polls in vain

_clocks: "weakref.WeakSet[VirtualClock]" = weakref.WeakSet()


def end_threads() -> list[threading.Thread]:
    """End the threads that still wait for a clock of an ended test; returns them."""
    return [thread for clock in list(_clocks) for thread in clock.abandon()]


class VirtualClock(Clock):
    """Time that goes on only while every thread waits: for a time, or for a lock or a condition of this clock.

    The test's own thread counts, as do the threads that `start` makes. While one of them runs, time stands still; when
    all wait, it jumps to the first end of a wait.
    """

    def __init__(self) -> None:
        self.state = threading.Condition()
        self.running = 1
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Wait]] = []
        self._numbers = itertools.count()
        self._under_way: set[threading.Thread] = set()
        self._waits: set[_Wait] = set()
        self.is_abandoned = False
        _clocks.add(self)

    def __call__(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def lock(self) -> "VirtualLock":
        """A lock whose waits this clock knows."""
        return VirtualLock(self)

    def condition(self, lock: threading.Lock) -> "VirtualCondition":
        """A condition whose waits this clock knows; its lock may be a real one, if no thread waits holding it."""
        return VirtualCondition(self, lock)

    def start(self, work: Callable[..., object], *arguments: object) -> threading.Thread:
        """Run in a thread of this clock."""

        def run() -> None:
            try:
                work(*arguments)
            except _AbandonedError:
                pass
            finally:
                with self.state:
                    self._under_way.discard(threading.current_thread())
                    self.pause()

        thread = threading.Thread(target=run, daemon=True)
        with self.state:
            self.running += 1
            self._under_way.add(thread)
        thread.start()
        return thread

    def is_under_way(self, thread: threading.Thread) -> bool:
        """Whether a thread has work left; `Thread.is_alive` says so a little longer."""
        return thread in self._under_way

    def sleep(self, seconds: float) -> None:
        """Let time go on."""
        assert self._now_s < _LONGEST_S, "it waits for what never comes"
        lock = self.lock()
        lock.acquire()
        lock.acquire(timeout=seconds)

    def settle(self) -> None:
        """Wait, without letting time go on, until all other threads wait or have ended."""
        with self.state:
            assert self.state.wait_for(lambda: self.running == 1, _REAL_LIMIT_S), "a thread goes on without an end"

    def finish(self, *threads: threading.Thread) -> None:
        """Let time go on until the threads have ended; fail if they wait for what never comes."""
        self.settle()
        while self._under_way & set(threads):
            with self.state:
                due_s = self._first_due_s()
            assert due_s is not None, "they wait for each other"
            self.sleep(due_s - self._now_s)
            self.settle()

    def abandon(self) -> list[threading.Thread]:
        """End the threads that still wait, once the others have ended; returns those that waited."""
        with self.state:
            self.state.wait_for(lambda: self.running <= 1, _REAL_LIMIT_S)
            left = list(self._under_way)
            self.is_abandoned = True
            for wait in self._waits:
                wait.woken.set()
        for thread in left:
            thread.join(_REAL_LIMIT_S)
        return left

    def wait(self, wait: "_Wait", timeout_s: float) -> None:
        """Note, with `state` held, that the calling thread begins to wait."""
        self._waits.add(wait)
        if timeout_s >= 0:
            heapq.heappush(self._timers, (self._now_s + timeout_s, next(self._numbers), wait))
        self.pause()

    def pause(self) -> None:
        """Note, with `state` held, that a thread waits or has ended; time goes on if it was the last one."""
        self.running -= 1
        while self.running == 0 and (due_s := self._first_due_s()) is not None:
            self._now_s = due_s
            self.end(heapq.heappop(self._timers)[2], in_time=False)
        self.state.notify_all()

    def end(self, wait: "_Wait", *, in_time: bool) -> None:
        """Let a thread that waits go on; with `state` held."""
        self._waits.remove(wait)
        self.running += 1
        wait.end(in_time=in_time)

    def _first_due_s(self) -> float | None:
        while self._timers and self._timers[0][2].over:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None


class _AbandonedError(BaseException):
    """Ends a thread of an abandoned clock."""


class _Wait:
    """A thread's wait for a lock."""

    def __init__(self, lock: "VirtualLock") -> None:
        self.lock = lock
        self.over = self.granted = False
        self.woken = threading.Event()

    def end(self, *, in_time: bool) -> None:
        """Let the thread go on."""
        self.over, self.granted = True, in_time
        self.lock.waits.remove(self)
        self.woken.set()


class VirtualLock:
    """`threading.Lock`, whose waits take virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.waits: list[_Wait] = []
        self._held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it; a timeout of -1 means for ever."""
        with self.clock.state:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            if self.clock.is_abandoned:
                raise _AbandonedError
            wait = _Wait(self)
            self.waits.append(wait)
            self.clock.wait(wait, timeout)
        assert wait.woken.wait(_REAL_LIMIT_S), "a wait without an end"
        if not wait.over:
            raise _AbandonedError
        return wait.granted

    def locked(self) -> bool:
        """Whether a thread has it."""
        return self._held

    def release(self) -> None:
        """Give it to the thread that has waited longest."""
        with self.clock.state:
            if self.waits:
                self.clock.end(self.waits[0], in_time=True)
            else:
                self._held = False


class VirtualCondition:
    """`threading.Condition`, whose waits take virtual time."""

    def __init__(self, clock: VirtualClock, lock: Any) -> None:
        self._clock = clock
        self._lock = lock
        self._waiting: list[VirtualLock] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Wait to be notified, the lock released meanwhile."""
        own = self._clock.lock()
        own.acquire()
        self._waiting.append(own)
        self._lock.release()
        try:
            return own.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        """Wake all that wait."""
        for own in self._waiting:
            own.release()
        self._waiting.clear()
