"""The interface of arbiters, which pass tokens for the resources between members, and pauses of members."""

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.job.stage_clock import STAGE_COUNT, TURNS_INDEX, IterationRecord

_sleep: Final = time.sleep
"""The interpreter's own `sleep`: in a runtime `time.sleep` is replaced by one that members' signals can end."""


def give_way() -> None:
    """Let a thread that was just woken have the interpreter, before this one goes on to compute.

    A woken thread still needs the interpreter's lock, which the waking one would keep for a whole switch interval.
    Measured on two cores, this lowers the median from release to running from 1.05 ms to 0.03 ms.
    """
    _sleep(0)


class WaitInterruptedError(Exception):
    """The member was cancelled while it waited for a resource, or it is not present."""


class Waiter:
    """One thread's wait for one resource on behalf of its member; woken by the thread that grants it.

    It began at `since_s`, earlier waits within the same stage included.
    """

    __slots__ = ("_lock", "granted", "member", "resource", "since_s")

    def __init__(self, member: str, resource: int, clock: Clock, since_s: float = 0.0) -> None:
        self.since_s: Final = since_s
        self.member: Final = member
        self.resource: Final = resource
        self.granted: bool | None = None  # None while the wait goes on, False where it was interrupted
        self._lock = clock.lock()
        self._lock.acquire()

    def wake(self, *, granted: bool) -> None:
        """End the wait; called once, under the arbiter's mutex."""
        self.granted = granted
        self.nudge()

    def nudge(self) -> None:
        """Let the waiting thread look again when it must; called under the arbiter's mutex."""
        if self._lock.locked():
            self._lock.release()

    def sleep(self, timeout_s: float = -1) -> bool:
        """Wait to be woken; False when the time is over. A negative timeout means forever."""
        return self._lock.acquire(timeout=timeout_s)


class Arbiter(ABC):
    """Passes the four resources between members.

    A member may ask from several threads; a token of one thread is not granted to another one of the same member
    either. `waiting_hint` has a byte per resource, not 0 while a yield point is to ask, as a member waits, and the byte
    `TURNS_INDEX`. A member in a process of its own reads it in shared memory instead of asking.
    """

    discipline: str = "fair"

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        self.waiting_hint: MutableSequence[int] | mmap.mmap = bytearray(TURNS_INDEX + 1)
        self._now = now
        self._mutex = threading.Lock()

    @property
    def takes_turns(self) -> bool:
        """Return whether members wait for each other."""
        return True

    def set_measuring(self, member: str, *, measuring: bool) -> None:  # noqa: B027 (most disciplines never change)
        """Take turns while this member is measured: stages that others slow down say nothing about it."""

    @abstractmethod
    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start a session of the member.

        Its iteration time alone is learned when None. Its minimum speed is 0 for none, 1 for as fast as alone; `fair`
        keeps it.
        """

    @abstractmethod
    def leave(self, member: str) -> None:
        """End the session: free its tokens and interrupt its waits."""

    @abstractmethod
    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource, and return the seconds waited; see `WaitInterruptedError`."""

    @abstractmethod
    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on; return whether a thread may have been woken, which the caller should `give_way` to."""

    @abstractmethod
    def interrupt(self, member: str) -> None:
        """End the member's waits, if there are any, with `WaitInterruptedError`."""

    def stand_still(self, member: str) -> None:
        """Take back what the member holds, and grant it nothing, because it is paused."""
        self.leave(member)

    def go_on(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """End what `stand_still` began; the terms are those of `join`."""
        self.join(member, solo_iteration_s, min_speed)

    def yield_point(self, member: str, resource: int) -> float:
        """Let a preferred member go first within a long stage; returns the seconds until the resource came back."""
        return 0.0

    def holders(self) -> Sequence[str | None]:
        """Return the member that holds each resource now, the first of several, for the status file."""
        return [None] * STAGE_COUNT

    def obstructs(self, member: str) -> bool:
        """Return whether another member waits for a resource of this one."""
        return False

    def iteration_done(self, member: str, record: IterationRecord) -> None:  # noqa: B027 (lockstep has no use for it)
        """Note that a member finished an iteration."""


class WrappingArbiter(Arbiter):
    """Passes on to an inner arbiter whatever a subclass does not do itself."""

    def __init__(self, inner: Arbiter, now: Clock = MACHINE_CLOCK) -> None:
        self._inner = inner
        super().__init__(now)

    @property
    def takes_turns(self) -> bool:
        """As under the inner arbiter."""
        return self._inner.takes_turns

    @property
    def waiting_hint(self) -> MutableSequence[int] | mmap.mmap:
        """As of the inner arbiter, which knows the waits."""
        return self._inner.waiting_hint

    @waiting_hint.setter
    def waiting_hint(self, hint: MutableSequence[int] | mmap.mmap) -> None:
        self._inner.waiting_hint = hint

    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on."""
        return self._inner.release(member, resource)

    def holders(self) -> Sequence[str | None]:
        """Return the member that holds each resource."""
        return self._inner.holders()

    def obstructs(self, member: str) -> bool:
        """Return whether another member waits for a resource of this one."""
        return self._inner.obstructs(member)

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Note that a member finished an iteration."""
        self._inner.iteration_done(member, record)


class PausingArbiter(WrappingArbiter):
    """Keeps resources from a member while its job is suspended; the others go on and share them.

    A paused member stands still in the inner arbiter, as after its end, until it is resumed: its tokens are free
    at once, and it is out of the rotation. It waits at its next stage or yield point. A stage that is under way until
    then, or that a stopped process finishes after it was continued, overlaps with the others' stages once.

    In a group of several ranks each rank pauses its own process of a member, which Slurm has stopped wherever it was.
    """

    def __init__(self, inner: Arbiter, now: Clock = MACHINE_CLOCK) -> None:
        super().__init__(inner, now)
        self._standing = threading.Lock()  # held while a member joins, leaves, is paused or resumed
        self._resumed = now.condition(self._mutex)
        self._terms: dict[str, tuple[float | None, float]] = {}
        self._paused: set[str] = set()
        self._interrupts: Counter[str] = Counter()
        self._asking: set[tuple[str, int]] = set()

    def pause(self, member: str) -> None:
        """Grant the member nothing until it is resumed."""
        with self._standing:
            if member not in self._terms or member in self._paused:
                return
            self._paused.add(member)  # first: a thread that the inner arbiter wakes must find it
            self._inner.stand_still(member)

    def resume(self, member: str) -> None:
        """Let a paused member go on."""
        with self._standing:
            if member not in self._paused:
                return
            self._inner.go_on(member, *self._terms[member])
            self._end_pause(member)

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start a session."""
        with self._standing:
            self._inner.join(member, solo_iteration_s, min_speed)
            self._terms[member] = (solo_iteration_s, min_speed)

    def leave(self, member: str) -> None:
        """End the session, paused or not."""
        with self._standing:
            self._terms.pop(member, None)
            self._interrupts[member] += 1
            self._end_pause(member)
            self._inner.leave(member)

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the end of the pause, and for the resource."""
        return self._ask(self._inner.acquire, member, resource)

    def interrupt(self, member: str) -> None:
        """End the member's waits, also for the end of a pause."""
        with self._mutex:
            self._interrupts[member] += 1
            self._resumed.notify_all()
        self._inner.interrupt(member)

    def yield_point(self, member: str, resource: int) -> float:
        """Wait here while paused, if the resource may be given back within a stage."""
        return self._ask(self._inner.yield_point, member, resource)

    def waits(self, member: str) -> bool:
        """Return whether a thread of the member waits here, for a resource or for the end of a pause."""
        return any(waiting == member for waiting, _ in list(self._asking))

    def _ask(self, operation: Callable[[str, int], float], member: str, resource: int) -> float:
        """Do it, or acquire the resource anew where a pause comes first or between; return the seconds waited."""
        self._asking.add(asking := (member, threading.get_ident()))
        interrupts, paused_s = self._interrupts.get(member, 0), 0.0
        try:
            while True:
                if member in self._paused:
                    paused_s += self._await_resumption(member, interrupts)
                    operation = self._inner.acquire
                try:
                    return paused_s + operation(member, resource)
                except WaitInterruptedError:
                    if not self._was_pause(member, interrupts):
                        raise
                    operation = self._inner.acquire
        finally:
            self._asking.discard(asking)

    def _was_pause(self, member: str, interrupts: int) -> bool:
        """Return whether only a pause, maybe over, can have interrupted a wait that began with so many interrupts."""
        return member in self._terms and self._interrupts.get(member, 0) == interrupts

    def _await_resumption(self, member: str, interrupts: int) -> float:
        """Wait until the member is paused no more, or its wait is interrupted; returns the seconds."""
        start_s = self._now()
        with self._mutex:
            while member in self._paused and self._interrupts.get(member, 0) == interrupts:
                self._resumed.wait()
            if not self._was_pause(member, interrupts):
                raise WaitInterruptedError(member)
        return self._now() - start_s

    def _end_pause(self, member: str) -> None:
        with self._mutex:
            self._paused.discard(member)
            self._resumed.notify_all()
