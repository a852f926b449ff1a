"""One token per resource: fair passing in normalized progress, and plain sharing without tokens."""

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.arbitration.fairness import DEFAULT_WINDOW_S, FairQueue
from muri.launcher.job.stage_clock import STAGE_COUNT, IterationRecord

GrantOrder = Callable[[list[str]], str | None]
"""Picks the waiting member that gets a resource next; None if it is the turn of one that does not wait yet."""

_sleep: Final = time.sleep
"""The interpreter's own `sleep`: in a runtime `time.sleep` is replaced by one that members' signals can end."""


def give_way() -> None:
    """Let a thread that was just woken have the interpreter.

    Waking a thread does not make it run: it still needs the interpreter's lock, which the waking one
    would keep for a whole switch interval. Measured on two cores with a busy releasing thread, the
    median from release to running falls from 1.05 ms to 0.03 ms.
    """
    _sleep(0)


class WaitInterruptedError(Exception):
    """The member was cancelled while it waited for a resource."""


class Waiter:
    """One thread's wait for one resource on behalf of its member; woken by the thread that grants it.

    Attributes:
        since_s: When it began, earlier waits within the same stage included.
        granted: The resource is the member's.
        interrupted: The wait ended without it.
    """

    __slots__ = ("_lock", "granted", "interrupted", "member", "resource", "since_s")

    def __init__(self, member: str, resource: int, clock: Clock, since_s: float = 0.0) -> None:
        self.since_s: Final = since_s
        self.member: Final = member
        self.resource: Final = resource
        self.granted = False
        self.interrupted = False
        self._lock = clock.lock()
        self._lock.acquire()

    def wake(self, *, granted: bool) -> None:
        """End the wait; called once, under the arbiter's mutex."""
        self.granted, self.interrupted = granted, not granted
        self._lock.release()

    def sleep(self, timeout_s: float = -1) -> bool:
        """Wait to be woken; False when the time is over. A negative timeout means forever."""
        return self._lock.acquire(timeout=timeout_s)


class Arbiter(ABC):
    """Passes the four resources between members.

    A member may ask from several threads, each for a resource of its own; a resource that one of its
    threads holds is not granted to another of them either.

    Attributes:
        discipline: Its name.
        takes_turns: Whether a resource is one member's at a time.
        waiting_hint: A byte per resource, not 0 while a yield point would find a member waiting. A
            member in a process of its own reads it in shared memory instead of asking.
    """

    discipline: str = "fair"
    takes_turns: bool = True

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        self.waiting_hint: MutableSequence[int] | mmap.mmap = bytearray(STAGE_COUNT)
        self._now = now
        self._mutex = threading.Lock()

    @abstractmethod
    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """A session of the member starts."""

    @abstractmethod
    def leave(self, member: str) -> None:
        """End the session: free its tokens and interrupt its waits."""

    @abstractmethod
    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource.

        Returns:
            Seconds waited.

        Raises:
            WaitInterruptedError: The member was cancelled or is not present.
        """

    @abstractmethod
    def release(self, member: str, resource: int) -> None:
        """Pass the resource on."""

    @abstractmethod
    def interrupt(self, member: str) -> None:
        """End the member's waits, if there are any, with `WaitInterruptedError`."""

    def yield_point(self, member: str, resource: int) -> float:
        """Within a long stage, let a member go first that the discipline prefers.

        Returns:
            Seconds waited until the resource came back, 0 if it was kept.
        """
        return 0.0

    def holders(self) -> Sequence[str | None]:
        """Which member holds each resource now, for the status file."""
        return [None] * STAGE_COUNT

    def obstructs(self, member: str) -> bool:
        """Whether another member waits for what this one holds."""
        return False

    def iteration_done(self, member: str, record: IterationRecord) -> None:  # noqa: B027 (lockstep has no use for it)
        """Note that a member finished an iteration."""


class FairArbiter(Arbiter):
    """Work-conserving: a free resource goes to the waiting member that is furthest behind.

    Args:
        now: The clock.
        window_s: Bound of the arrears, see `fairness.DEFAULT_WINDOW_S`.
        orders: Resources that are granted in a given order instead of by fairness. Such a resource is not passed
            on at yield points.
    """

    def __init__(
        self,
        now: Clock = MACHINE_CLOCK,
        window_s: float = DEFAULT_WINDOW_S,
        orders: Mapping[int, GrantOrder] | None = None,
    ) -> None:
        super().__init__(now)
        self._orders = dict(orders or {})
        self._queue = FairQueue(window_s)
        self._members: set[str] = set()
        self._holder: list[str | None] = [None] * STAGE_COUNT
        self._since_s = [0.0] * STAGE_COUNT
        self._waited_s = [0.0] * STAGE_COUNT
        self._waiting: list[list[Waiter]] = [[] for _ in range(STAGE_COUNT)]

    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """Start at the smallest virtual time of those present."""
        with self._mutex:
            self._members.add(member)
            self._queue.join(member, solo_iteration_s)

    def leave(self, member: str) -> None:
        """Free what the member holds."""
        with self._mutex:
            self._members.discard(member)
            self._interrupt(member)
            for resource in range(STAGE_COUNT):
                if self._holder[resource] == member:
                    self._pass_on(resource)
            self._queue.leave(member)

    def acquire(self, member: str, resource: int) -> float:
        """Take the resource if it is free, else wait for the member's turn."""
        with self._mutex:
            if member not in self._members:
                raise WaitInterruptedError(member)
            self._queue.catch_up(member)
            if self._holder[resource] is None and resource not in self._orders:
                self._grant(member, resource)
                return 0.0
            waiter = self._enqueue(member, resource)
            self._dispatch(resource)
        return self._await(waiter)

    def release(self, member: str, resource: int) -> None:
        """Hand the resource to the member that is furthest behind."""
        with self._mutex:
            woken = self._holder[resource] == member and self._pass_on(resource)
        if woken:
            give_way()

    def interrupt(self, member: str) -> None:
        """Wake the member with an interruption."""
        with self._mutex:
            self._interrupt(member)

    def dispatch(self, resource: int) -> None:
        """Grant the resource if it is free and the order from outside has moved on."""
        with self._mutex:
            self._dispatch(resource)

    def yield_point(self, member: str, resource: int) -> float:
        """Hand over to a waiting member that is further behind than this one."""
        if not self._waiting[resource]:  # a stale answer only delays the hand-over
            return 0.0
        with self._mutex:
            others = {waiter.member for waiter in self._waiting[resource]} - {member}
            if self._holder[resource] != member or not others or resource in self._orders:
                return 0.0
            self._count_service(resource)
            waited_s = self._waited_s[resource]
            ages = self._ages(resource) | {member: waited_s}
            if self._queue.first([member, *others], resource, ages) == member:
                return 0.0
            self._pass_on(resource)
            waiter = self._enqueue(member, resource, waited_s)
        return self._await(waiter)

    def holders(self) -> Sequence[str | None]:
        """Which member holds each resource."""
        return list(self._holder)

    def obstructs(self, member: str) -> bool:
        """Whether another member waits for a resource of this one."""
        with self._mutex:
            held = [waiting for who, waiting in zip(self._holder, self._waiting, strict=True) if who == member]
        return any(waiter.member != member for waiting in held for waiter in list(waiting))

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Advance the member's virtual time by a whole iteration."""
        with self._mutex:
            self._queue.iteration_done(member, record.busy_s, record.stage_s)

    def _enqueue(self, member: str, resource: int, waited_s: float = 0.0) -> Waiter:
        waiter = Waiter(member, resource, self._now, self._now() - waited_s)
        self._waiting[resource].append(waiter)
        self.waiting_hint[resource] = 1
        return waiter

    def _await(self, waiter: Waiter) -> float:
        start_s = self._now()
        waiter.sleep()
        if waiter.interrupted:
            raise WaitInterruptedError(waiter.member)
        return self._now() - start_s

    def _grant(self, member: str, resource: int, waited_s: float = 0.0) -> None:
        self._holder[resource] = member
        self._waited_s[resource] = waited_s
        self._since_s[resource] = self._now()

    def _count_service(self, resource: int) -> None:
        holder, now_s = self._holder[resource], self._now()
        if holder is not None:
            self._queue.served(holder, resource, now_s - self._since_s[resource])
        self._since_s[resource] = now_s

    def _pass_on(self, resource: int) -> bool:
        self._count_service(resource)
        self._holder[resource] = None
        return self._dispatch(resource)

    def _dispatch(self, resource: int) -> bool:
        """Grant a free resource; False if no member was woken."""
        waiting = self._waiting[resource]
        if not waiting or self._holder[resource] is not None:
            return False
        order, members = self._orders.get(resource), [waiter.member for waiter in waiting]
        member = self._queue.first(members, resource, self._ages(resource)) if order is None else order(members)
        if member is not None:
            waiter = waiting.pop(members.index(member))
            self._grant(member, resource, self._now() - waiter.since_s)
            waiter.wake(granted=True)
            self.waiting_hint[resource] = bool(waiting)
        return member is not None

    def _ages(self, resource: int) -> dict[str, float]:
        now_s = self._now()
        return {waiter.member: now_s - waiter.since_s for waiter in reversed(self._waiting[resource])}

    def _interrupt(self, member: str) -> None:
        for resource, waiting in enumerate(self._waiting):
            for waiter in waiting:
                if waiter.member == member:
                    waiter.wake(granted=False)
            self._waiting[resource] = [waiter for waiter in waiting if waiter.member != member]
            self.waiting_hint[resource] = bool(self._waiting[resource])


class PlainArbiter(Arbiter):
    """Grants every resource at once, also to several members: no member waits, and none holds anything.

    For members that were measured to run well together in this way (SJF-BSBF shares GPUs like this).

    Args:
        now: The clock.
    """

    discipline = "plain"
    takes_turns = False

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        super().__init__(now)
        self._members: set[str] = set()

    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """Let the member in."""
        with self._mutex:
            self._members.add(member)

    def leave(self, member: str) -> None:
        """Grant the member nothing any more."""
        with self._mutex:
            self._members.discard(member)

    def acquire(self, member: str, resource: int) -> float:
        """Return at once, whichever members use the resource."""
        with self._mutex:
            if member not in self._members:
                raise WaitInterruptedError(member)
        return 0.0

    def release(self, member: str, resource: int) -> None:
        """Nothing to hand over: no member waits."""

    def interrupt(self, member: str) -> None:
        """Do nothing: no member waits here."""
