"""Tokens for the resources: fair passing in normalized progress, and plain sharing without tokens."""

import mmap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.arbitration.fairness import DEFAULT_WINDOW_S, FairQueue, Promises
from muri.launcher.job.stage_clock import SOLE_MEMBER, STAGE_COUNT, TURNS, TURNS_INDEX, IterationRecord
from muri.profiler.records import STAGES

CPU: Final = STAGES.index("preprocess")

GrantOrder = Callable[[list[str]], str | None]
"""Picks the waiting member that gets a resource next; None if it is the turn of one that does not wait yet."""

_sleep: Final = time.sleep
"""The interpreter's own `sleep`: in a runtime `time.sleep` is replaced by one that members' signals can end."""


def give_way() -> None:
    """Let a thread that was just woken have the interpreter, before this one goes on to compute.

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

    __slots__ = ("_lock", "_nudged", "granted", "interrupted", "member", "resource", "since_s")

    def __init__(self, member: str, resource: int, clock: Clock, since_s: float = 0.0) -> None:
        self.since_s: Final = since_s
        self.member: Final = member
        self.resource: Final = resource
        self.granted = False
        self.interrupted = False
        self._nudged = False
        self._lock = clock.lock()
        self._lock.acquire()

    def wake(self, *, granted: bool) -> None:
        """End the wait; called once, under the arbiter's mutex."""
        self.granted, self.interrupted = granted, not granted
        self._release()

    def nudge(self) -> None:
        """Let the waiting thread look again when it must; called under the arbiter's mutex."""
        self._release()

    def looks(self, *, woken: bool) -> None:
        """Note that the waiting thread looks; called under the arbiter's mutex with what `sleep` has returned."""
        if woken:
            self._nudged = False

    @property
    def waits(self) -> bool:
        """Whether the wait goes on."""
        return not self.granted and not self.interrupted

    def _release(self) -> None:
        if not self._nudged:
            self._nudged = True
            self._lock.release()

    def sleep(self, timeout_s: float = -1) -> bool:
        """Wait to be woken; False when the time is over. A negative timeout means forever."""
        return self._lock.acquire(timeout=timeout_s)


class Arbiter(ABC):
    """Passes the four resources between members.

    A member may ask from several threads; a token that one of its threads holds is not granted to another of
    them either.

    Attributes:
        discipline: Its name.
        waiting_hint: A byte per resource, not 0 while a yield point is to ask, as a member waits, and the byte
            `TURNS_INDEX`. A member in a process of its own reads it in shared memory instead of asking.
    """

    discipline: str = "fair"

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        self.waiting_hint: MutableSequence[int] | mmap.mmap = bytearray(TURNS_INDEX + 1)
        self._now = now
        self._mutex = threading.Lock()

    @property
    def takes_turns(self) -> bool:
        """Whether members wait for each other."""
        return True

    def keep_turns_for(self, member: str) -> None:  # noqa: B027 (most disciplines never change)
        """Take turns whenever this member is there, because it shares its process with others."""

    def set_measuring(self, member: str, *, measuring: bool) -> None:  # noqa: B027 (most disciplines never change)
        """Take turns while this member is measured: stages that others slow down say nothing of it."""

    @abstractmethod
    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """A session of the member starts.

        Args:
            member: Its job id.
            solo_iteration_s: Its iteration time when alone; learned when None.
            min_speed: The speed that it was promised, 1 = as fast as alone; 0: none. Only `fair` enforces it.
        """

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
    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on.

        Returns:
            Whether a thread may have been woken. A caller that goes on to compute in Python should `give_way` to it.
        """

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
        """Which member holds each resource now, the first of several, for the status file."""
        return [None] * STAGE_COUNT

    def obstructs(self, member: str) -> bool:
        """Whether another member waits for what this one holds."""
        return False

    def iteration_done(self, member: str, record: IterationRecord) -> None:  # noqa: B027 (lockstep has no use for it)
        """Note that a member finished an iteration."""


@dataclass(slots=True, eq=False)
class _Hold:
    """A token in use.

    Attributes:
        member: Whose.
        granted_s: Since when it is the member's.
        since_s: Since when its time is not counted yet.
        waited_s: How long the member has waited for it within its stage.
        offered_s: The latest yield point that asked; None before the first one.
        longest_s: The longest time between two of them, or from the grant to the first one.
    """

    member: str
    granted_s: float
    since_s: float
    waited_s: float
    offered_s: float | None = None
    longest_s: float = 0.0


class FairArbiter(Arbiter):
    """A free token goes to the waiting member that is furthest behind.

    That is work-conserving, but for promised speeds: see `promises`.

    Args:
        now: The clock.
        window_s: Bound of the arrears, see `fairness.DEFAULT_WINDOW_S`.
        orders: Resources that are granted in a given order instead of by fairness. Such a resource is not passed
            on at yield points.
        cpus: Tokens of the CPU: so many members preprocess at once. Other resources have one.
        asks_sole_member: Whether a process that is the only member asks for resources all the same: not needed where
            nobody else could hold them.
        keeps_free: Whether it may keep a resource free for a member that is about to need it to have its promised
            speed. Not in a group of several ranks: what is free on one could keep a collective on another from ending.
    """

    def __init__(
        self,
        now: Clock = MACHINE_CLOCK,
        window_s: float = DEFAULT_WINDOW_S,
        orders: Mapping[int, GrantOrder] | None = None,
        cpus: int = 1,
        *,
        asks_sole_member: bool = True,
        keeps_free: bool = True,
    ) -> None:
        super().__init__(now)
        self._asks_sole_member = asks_sole_member
        self._keeps_free = keeps_free
        self._orders = dict(orders or {})
        self._queue = FairQueue(window_s)
        self._promises = Promises()
        self._members: set[str] = set()
        self._tokens = [cpus if resource == CPU else 1 for resource in range(STAGE_COUNT)]
        self._holds: list[list[_Hold]] = [[] for _ in range(STAGE_COUNT)]
        self._waiting: list[list[Waiter]] = [[] for _ in range(STAGE_COUNT)]

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start at the smallest virtual time of those present."""
        with self._mutex:
            self._members.add(member)
            self._note_members()
            self._queue.join(member, solo_iteration_s)
            self._promises.join(member, min_speed, solo_iteration_s, self._now())

    def leave(self, member: str) -> None:
        """Free what the member holds."""
        with self._mutex:
            self._members.discard(member)
            self._note_members()
            self._interrupt(member)
            for resource in range(STAGE_COUNT):
                while (hold := self._hold_of(member, resource)) is not None:
                    self._pass_on(resource, hold, self._now())
            self._queue.leave(member)
            self._promises.leave(member)
            for resource in range(STAGE_COUNT):  # what was kept free for it
                self._dispatch(resource)

    def acquire(self, member: str, resource: int) -> float:
        """Take a token if one is free, else wait for the member's turn."""
        with self._mutex:
            if member not in self._members:
                raise WaitInterruptedError(member)
            self._queue.catch_up(member)
            self._promises.asks(member, resource, self._now())
            if self._is_free(resource) and resource not in self._orders and not self._promises:
                self._grant(member, resource, self._now())
                return 0.0
            waiter = self._enqueue(member, resource)
            self._dispatch(resource)
        return self._await(waiter)

    def release(self, member: str, resource: int) -> bool:
        """Hand a token to the member that is furthest behind."""
        with self._mutex:
            hold = self._hold_of(member, resource)
            if hold is None:
                return False
            now_s = self._now()
            self._promises.leaves(member, resource, now_s)
            return self._pass_on(resource, hold, now_s)

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
        if not self.waiting_hint[resource]:  # a stale answer only delays the hand-over
            return 0.0
        with self._mutex:
            others = {waiter.member for waiter in self._waiting[resource]} - {member}
            hold = self._hold_of(member, resource)
            if hold is None:
                return 0.0
            self._note_offer(resource, hold)
            if not others or resource in self._orders:
                return 0.0
            self._count_service(resource, hold, self._now())
            ages = self._ages(resource) | {member: hold.waited_s}
            if self._choose([member, *others], resource, ages, holder=member) == member:
                return 0.0
            self._pass_on(resource, hold, self._now())
            waiter = self._enqueue(member, resource, hold.waited_s)
        return self._await(waiter)

    def holders(self) -> Sequence[str | None]:
        """Which member holds each resource."""
        return [holds[0].member if holds else None for holds in map(tuple, self._holds)]

    def obstructs(self, member: str) -> bool:
        """Whether another member waits for a resource of this one."""
        with self._mutex:
            held = [self._waiting[r] for r in range(STAGE_COUNT) if self._hold_of(member, r) is not None]
        return any(waiter.member != member for waiting in held for waiter in list(waiting))

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Advance the member's virtual time by a whole iteration."""
        with self._mutex:
            self._queue.iteration_done(member, record.busy_s, record.stage_s)
            self._promises.iteration_done(member, record.busy_s, self._now())

    def _note_members(self) -> None:
        if not self._asks_sole_member:
            self.waiting_hint[TURNS_INDEX] = SOLE_MEMBER if len(self._members) == 1 else TURNS

    def _is_free(self, resource: int) -> bool:
        return len(self._holds[resource]) < self._tokens[resource]

    def _hold_of(self, member: str, resource: int) -> _Hold | None:
        """The member's token, the one it holds longest; None if it has none."""
        for hold in self._holds[resource]:
            if hold.member == member:
                return hold
        return None

    def _enqueue(self, member: str, resource: int, waited_s: float = 0.0) -> Waiter:
        waiter = Waiter(member, resource, self._now, self._now() - waited_s)
        self._waiting[resource].append(waiter)
        self._promises.begins_to_wait(member, self._now())
        self._note_waiting(resource)
        return waiter

    def _note_waiting(self, resource: int) -> None:
        """Tell yield points whether to ask. Beside promises the first one of a stage does: so it is known of."""
        holds = self._holds[resource] if self._promises else ()
        self.waiting_hint[resource] = bool(self._waiting[resource]) or any(hold.offered_s is None for hold in holds)

    def _await(self, waiter: Waiter) -> float:
        start_s, timeout_s = self._now(), -1.0
        while waiter.waits:  # it may also have ended while this thread looked
            woken = waiter.sleep(timeout_s)
            if waiter.waits:
                timeout_s = self._look(waiter, woken=woken)
        if waiter.interrupted:
            raise WaitInterruptedError(waiter.member)
        return self._now() - start_s

    def _look(self, waiter: Waiter, *, woken: bool) -> float:
        """Grant a resource that need not be kept free any more.

        Returns:
            How long to sleep until the next look; -1, forever, if the resource is taken: its release wakes somebody.
        """
        with self._mutex:
            waiter.looks(woken=woken)
            if waiter.waits:
                self._dispatch(waiter.resource, nudge=False)
            if not waiter.waits or not self._is_free(waiter.resource):
                return -1.0
            return self._promises.look_again_in_s(self._ages(waiter.resource), waiter.resource, self._now())

    def _grant(self, member: str, resource: int, now_s: float, waited_s: float = 0.0) -> None:
        self._holds[resource].append(_Hold(member, now_s, now_s, waited_s))
        self._note_waiting(resource)

    def _count_service(self, resource: int, hold: _Hold, now_s: float) -> None:
        self._queue.served(hold.member, resource, now_s - hold.since_s)
        hold.since_s = now_s

    def _note_offer(self, resource: int, hold: _Hold) -> None:
        """Note how long a member held a resource until this yield point."""
        now_s = self._now()
        hold.longest_s = max(hold.longest_s, now_s - self._unoffered_since_s(hold))
        hold.offered_s = now_s
        self._note_waiting(resource)

    def _unoffered_since_s(self, hold: _Hold) -> float:
        return hold.granted_s if hold.offered_s is None else hold.offered_s

    def _note_piece(self, resource: int, hold: _Hold, now_s: float) -> None:
        """Note the longest piece of a hold that ends; nobody saw yield points after the first one if nobody waited."""
        since_s = self._unoffered_since_s(hold)
        if hold.offered_s is not None:
            since_s = max(since_s, min((waiter.since_s for waiter in self._waiting[resource]), default=now_s))
        self._promises.held(hold.member, resource, max(hold.longest_s, now_s - since_s))

    def _pass_on(self, resource: int, hold: _Hold, now_s: float) -> bool:
        self._count_service(resource, hold, now_s)
        self._note_piece(resource, hold, now_s)
        self._holds[resource].remove(hold)
        woken = self._dispatch(resource)
        if not woken:
            self._note_waiting(resource)
        return woken

    def _dispatch(self, resource: int, *, nudge: bool = True) -> bool:
        """Grant free tokens; False if no member was woken.

        Args:
            resource: Which one.
            nudge: Whether somebody has yet to look again in time if a token is kept free.
        """
        waiting, woken = self._waiting[resource], False
        while waiting and self._is_free(resource):
            waiter = self._next(resource)
            if waiter is None:
                if resource not in self._orders and nudge:
                    waiting[0].nudge()
                break
            waiting.remove(waiter)
            now_s = self._now()
            self._promises.ends_to_wait(waiter.member, now_s)
            self._grant(waiter.member, resource, now_s, now_s - waiter.since_s)
            waiter.wake(granted=True)
            woken = True
        return woken

    def _next(self, resource: int) -> Waiter | None:
        """Of those that wait for a resource, whose turn it is; None if it stays free for now."""
        waiting, order = self._waiting[resource], self._orders.get(resource)
        if len(waiting) == 1 and order is None and not self._promises:
            return waiting[0]  # as in a group of two, nearly always
        members = [waiter.member for waiter in waiting]
        member = self._choose(members, resource, self._ages(resource)) if order is None else order(members)
        return None if member is None else waiting[members.index(member)]

    def _choose(
        self, members: list[str], resource: int, waited_s: Mapping[str, float], holder: str | None = None
    ) -> str | None:
        """Who goes first of those that want a resource; None if it is kept free for one that is about to need it."""
        order = self._queue.order(dict.fromkeys(members), resource, waited_s)
        if not self._promises or self._tokens[resource] - len(self._holds[resource]) > 1:
            return order[0]
        waiting_s = {member: seconds for member, seconds in waited_s.items() if member != holder}
        return self._promises.choose(order, resource, waiting_s, self._now(), may_keep=self._keeps_free)

    def _ages(self, resource: int) -> dict[str, float]:
        now_s = self._now()
        return {waiter.member: now_s - waiter.since_s for waiter in reversed(self._waiting[resource])}

    def _interrupt(self, member: str) -> None:
        for resource, waiting in enumerate(self._waiting):
            for waiter in waiting:
                if waiter.member == member:
                    self._promises.ends_to_wait(member, self._now())
                    waiter.wake(granted=False)
            self._waiting[resource] = [waiter for waiter in waiting if waiter.member != member]
            self._note_waiting(resource)
            self._dispatch(resource)  # it may have been the one to look again


class PlainArbiter(Arbiter):
    """Grants every resource at once, also to several members: no member waits, and none holds anything.

    For members that run well together in this way (SJF-BSBF shares GPUs like this).

    Args:
        now: The clock.
    """

    discipline = "plain"

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        super().__init__(now)
        self._members: set[str] = set()

    @property
    def takes_turns(self) -> bool:
        """No member waits."""
        return False

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
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

    def release(self, member: str, resource: int) -> bool:
        """Nothing to hand over: no member waits."""
        return False

    def interrupt(self, member: str) -> None:
        """Do nothing: no member waits here."""
