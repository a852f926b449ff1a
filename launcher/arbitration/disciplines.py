"""The disciplines: fair passing in normalized progress, plain sharing without tokens, and the paper's lockstep."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import Arbiter, Waiter, WaitInterruptedError
from muri.launcher.arbitration.fairness import FairQueue, Promises
from muri.launcher.job.stage_clock import PREPROCESS, SOLE_MEMBER, STAGE_COUNT, TURNS, TURNS_INDEX, IterationRecord

DEFAULT_IDLE_LIMIT_S: Final = 1.0
"""How long lockstep waits for a member that runs outside of any stage; then the others go on without it."""

GrantOrder = Callable[[list[str]], str | None]
"""Picks the waiting member that gets a resource next; None if it is the turn of one that does not wait yet."""


@dataclass(slots=True, eq=False)
class _Hold:
    """A token in use."""

    member: str
    granted_s: float
    since_s: float  # its time is not counted yet from then on
    waited_s: float = 0.0  # how long the member has waited for it within its stage
    offered_s: float | None = None  # the latest yield point that asked
    longest_s: float = 0.0  # the longest time between two of them, or from the grant to the first one


class FairArbiter(Arbiter):
    """A free token goes to the waiting member that is furthest behind in normalized progress.

    That is work-conserving, but for minimum speeds: see `fairness`. The resources in `orders` are granted in a given
    order instead, and not passed on at yield points. The CPU has `cpus` tokens, other resources have one.

    With `several_ranks` a process that is the only member asks all the same, and no resource is kept free for a member
    that is about to need it to have its minimum speed: that could keep a collective on another rank from ending.
    """

    def __init__(
        self,
        now: Clock = MACHINE_CLOCK,
        orders: Mapping[int, GrantOrder] | None = None,
        cpus: int = 1,
        *,
        several_ranks: bool = False,
    ) -> None:
        super().__init__(now)
        self._several_ranks = several_ranks
        self._orders = dict(orders or {})
        self._queue = FairQueue()
        self._promises = Promises()
        self._tokens = [cpus if resource == PREPROCESS else 1 for resource in range(STAGE_COUNT)]
        self._holds: list[list[_Hold]] = [[] for _ in range(STAGE_COUNT)]
        self._waiting: list[list[Waiter]] = [[] for _ in range(STAGE_COUNT)]

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Start at the smallest virtual time of those present."""
        with self._mutex:
            self._queue.join(member, solo_iteration_s)
            self._note_members()
            self._promises.join(member, min_speed, solo_iteration_s, self._now())

    def leave(self, member: str) -> None:
        """Free what the member holds."""
        with self._mutex:
            self._interrupt(member)
            for resource in range(STAGE_COUNT):
                while (hold := self._hold_of(member, resource)) is not None:
                    self._pass_on(resource, hold, self._now())
            self._queue.leave(member)
            self._note_members()
            self._promises.leave(member)
            for resource in range(STAGE_COUNT):  # what was kept free for it
                self._dispatch(resource)

    def acquire(self, member: str, resource: int) -> float:
        """Take a token if one is free, else wait for the member's turn."""
        with self._mutex:
            if member not in self._queue.members:
                raise WaitInterruptedError(member)
            self._queue.catch_up(member)
            now_s = self._now()
            self._promises.asks(member, resource, now_s)
            if self._is_free(resource) and resource not in self._orders and not self._promises:
                self._holds[resource].append(_Hold(member, now_s, now_s))
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
            now_s = self._now()
            unoffered_since_s = hold.granted_s if hold.offered_s is None else hold.offered_s
            hold.longest_s, hold.offered_s = max(hold.longest_s, now_s - unoffered_since_s), now_s
            self._note_waiting(resource)
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
        """Return the member that holds each resource."""
        return [holds[0].member if holds else None for holds in map(tuple, self._holds)]

    def obstructs(self, member: str) -> bool:
        """Return whether another member waits for a resource of this one."""
        with self._mutex:
            held = [self._waiting[r] for r in range(STAGE_COUNT) if self._hold_of(member, r) is not None]
        return any(waiter.member != member for waiting in held for waiter in list(waiting))

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Advance the member's virtual time by a whole iteration."""
        with self._mutex:
            self._queue.iteration_done(member, record.busy_s, record.stage_s)
            self._promises.iteration_done(member, record.busy_s, self._now())

    def _note_members(self) -> None:
        if not self._several_ranks:
            self.waiting_hint[TURNS_INDEX] = SOLE_MEMBER if len(self._queue.members) == 1 else TURNS

    def _is_free(self, resource: int) -> bool:
        return len(self._holds[resource]) < self._tokens[resource]

    def _hold_of(self, member: str, resource: int) -> _Hold | None:
        """Return the token that the member has held longest, None if it has none."""
        return next((hold for hold in self._holds[resource] if hold.member == member), None)

    def _enqueue(self, member: str, resource: int, waited_s: float = 0.0) -> Waiter:
        waiter = Waiter(member, resource, self._now, self._now() - waited_s)
        self._waiting[resource].append(waiter)
        self._promises.begins_to_wait(member, self._now())
        self._note_waiting(resource)
        return waiter

    def _note_waiting(self, resource: int) -> None:
        """Set the hint for yield points; beside minimum speeds the first yield point of a stage asks, and is noted."""
        holds = self._holds[resource] if self._promises else ()
        self.waiting_hint[resource] = bool(self._waiting[resource]) or any(hold.offered_s is None for hold in holds)

    def _await(self, waiter: Waiter) -> float:
        start_s, timeout_s = self._now(), -1.0
        while waiter.granted is None:  # it may also have ended while this thread looked
            waiter.sleep(timeout_s)
            if waiter.granted is None:
                timeout_s = self._look(waiter)
        if not waiter.granted:
            raise WaitInterruptedError(waiter.member)
        return self._now() - start_s

    def _look(self, waiter: Waiter) -> float:
        """Grant a resource that need not be kept free any more; return the time until the next look.

        It is -1, forever, if the resource is taken: its release wakes a waiting thread.
        """
        with self._mutex:
            if waiter.granted is None:
                self._dispatch(waiter.resource, nudge=False)
            if waiter.granted is not None or not self._is_free(waiter.resource):
                return -1.0
            return self._promises.look_again_in_s(self._ages(waiter.resource), waiter.resource, self._now())

    def _count_service(self, resource: int, hold: _Hold, now_s: float) -> None:
        self._queue.served(hold.member, resource, now_s - hold.since_s)
        hold.since_s = now_s

    def _pass_on(self, resource: int, hold: _Hold, now_s: float) -> bool:
        self._count_service(resource, hold, now_s)
        since_s = hold.granted_s
        if hold.offered_s is not None:  # while no member waited, later yield points did not ask
            since_s = max(hold.offered_s, min((waiter.since_s for waiter in self._waiting[resource]), default=now_s))
        self._promises.held(hold.member, resource, max(hold.longest_s, now_s - since_s))
        self._holds[resource].remove(hold)
        return self._dispatch(resource)

    def _dispatch(self, resource: int, *, nudge: bool = True) -> bool:
        """Grant free tokens; return whether a member was woken.

        With `nudge` one of the waiting threads looks again in time if a token is kept free.
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
            self._holds[resource].append(_Hold(waiter.member, now_s, now_s, now_s - waiter.since_s))
            waiter.wake(granted=True)
            woken = True
        self._note_waiting(resource)
        return woken

    def _next(self, resource: int) -> Waiter | None:
        """Return the wait that ends next, None if the resource stays free for now."""
        waiting, order = self._waiting[resource], self._orders.get(resource)
        if len(waiting) == 1 and order is None and not self._promises:
            return waiting[0]  # as in a group of two, nearly always
        members = [waiter.member for waiter in waiting]
        member = self._choose(members, resource, self._ages(resource)) if order is None else order(members)
        return None if member is None else waiting[members.index(member)]

    def _choose(
        self, members: list[str], resource: int, waited_s: Mapping[str, float], holder: str | None = None
    ) -> str | None:
        """Return the first of the members that want a resource; None to keep it free for one that soon needs it."""
        order = self._queue.order(dict.fromkeys(members), resource, waited_s)
        if not self._promises or self._tokens[resource] - len(self._holds[resource]) > 1:
            return order[0]
        waiting_s = {member: seconds for member, seconds in waited_s.items() if member != holder}
        return self._promises.choose(order, resource, waiting_s, self._now(), may_keep=not self._several_ranks)

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
            self._dispatch(resource)  # it may have been the one to look again


class PlainArbiter(Arbiter):
    """Grants every resource at once, also to several members: no member waits, and none holds a token.

    For members that run well together in this way (SJF-BSBF shares GPUs like this).
    """

    discipline = "plain"

    def __init__(self, now: Clock = MACHINE_CLOCK) -> None:
        super().__init__(now)
        self._members: set[str] = set()

    @property
    def takes_turns(self) -> bool:
        """Return False: no member waits."""
        return False

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Let the member in."""
        self._members.add(member)

    def leave(self, member: str) -> None:
        """Grant the member nothing any more."""
        self._members.discard(member)

    def acquire(self, member: str, resource: int) -> float:
        """Return at once, whichever members use the resource."""
        if member not in self._members:
            raise WaitInterruptedError(member)
        return 0.0

    def release(self, member: str, resource: int) -> bool:
        """Return False: no member waits."""
        return False

    def interrupt(self, member: str) -> None:
        """Do nothing: no member waits here."""


@dataclass(slots=True, eq=False)
class _Place:
    position: int
    holds: bool = False  # one of its threads uses the resource of this step
    left_s: float = -math.inf  # when one last did; the barrier waits for the next stage, for a bounded time
    waiters: list[Waiter] = field(default_factory=list)  # of threads that ask for the resource of a later step
    done_with_step: int = -1


class LockstepArbiter(Arbiter):
    """The paper's lockstep: at step j the member at position i holds resource (i + j) mod 4 (Muri, section 4.2, Eq. 3).

    A step ends when every member in the rotation is done with it. A member passes over a resource that its script does
    not use. One that has not started, has ended, or runs outside of stages for longer than `idle_limit_s` leaves the
    rotation until it asks again. `ordering` has the members by position, None for an empty place.
    """

    discipline = "lockstep"

    def __init__(
        self, ordering: Sequence[str | None], now: Clock = MACHINE_CLOCK, idle_limit_s: float = DEFAULT_IDLE_LIMIT_S
    ) -> None:
        super().__init__(now)
        if len(ordering) > STAGE_COUNT:
            raise UsageError(f"lockstep takes at most {STAGE_COUNT} members, not {len(ordering)}; use fair")
        self._positions = {member: index for index, member in enumerate(ordering) if member is not None}
        self._idle_limit_s = idle_limit_s
        self._places: dict[str, _Place] = {}
        self._step = 0

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Take the planned position, or a free one; the member enters the rotation with its first request."""
        reserved = sorted(self._positions.values())
        unplanned = [position for position in range(STAGE_COUNT) if position not in reserved]
        planned = [self._positions[member]] if member in self._positions else []
        with self._mutex:
            taken = {place.position for name, place in self._places.items() if name != member}
            free = [position for position in (*planned, *unplanned, *reserved) if position not in taken]
            if not free:
                raise UsageError(f"there is no place in the rotation for member {member}: {STAGE_COUNT} are at work")
            self._places[member] = _Place(free[0])

    def leave(self, member: str) -> None:
        """Leave the rotation; the others' step may end by that."""
        with self._mutex:
            self._interrupt(member)
            self._places.pop(member, None)
            self._advance()

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the step in which the member's position holds the resource."""
        with self._mutex:
            place = self._places.get(member)
            if place is None:
                raise WaitInterruptedError(member)
            if not place.holds and self._may_use(place, resource):
                place.holds = True
                return 0.0
            waiter = Waiter(member, resource, self._now)
            place.waiters.append(waiter)
            self._advance()
        return self._await(waiter)

    def release(self, member: str, resource: int) -> bool:
        """Release the resource; the member may still come back to it within the step."""
        with self._mutex:
            place = self._places.get(member)
            if place is None or not place.holds or self._turn(place) != resource:
                return False
            place.holds, place.left_s = False, self._now()
            if place.waiters:
                self._grant_turns(place)
                self._advance()
        return True

    def holders(self) -> Sequence[str | None]:
        """Return the member that holds each resource in this step."""
        with self._mutex:
            holding = {self._turn(p): member for member, p in self._places.items() if p.holds}
        return [holding.get(resource) for resource in range(STAGE_COUNT)]

    def obstructs(self, member: str) -> bool:
        """Return whether others wait for the step's end, which waits for this member."""
        with self._mutex:
            own = self._places.get(member)
            holds = own is not None and own.holds
            return holds and any(place.waiters for place in self._places.values() if place is not own)

    def interrupt(self, member: str) -> None:
        """Wake the member with an interruption."""
        with self._mutex:
            self._interrupt(member)
            self._advance()

    def _await(self, waiter: Waiter) -> float:
        start_s = self._now()
        while not waiter.sleep(self._idle_limit_s):
            with self._mutex:
                self._advance()
        if not waiter.granted:
            raise WaitInterruptedError(waiter.member)
        return self._now() - start_s

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """End the member's turn: a script with one kind of stage would otherwise keep its step forever."""
        with self._mutex:
            place = self._places.get(member)
            if place is not None:
                place.done_with_step = self._step

    def _may_use(self, place: _Place, resource: int) -> bool:
        return self._turn(place) == resource and place.done_with_step != self._step

    def _turn(self, place: _Place) -> int:
        return (place.position + self._step) % STAGE_COUNT

    def _blocks_step(self, place: _Place) -> bool:
        is_between = not place.waiters and self._now() - place.left_s < self._idle_limit_s
        return place.holds or is_between

    def _advance(self) -> None:
        """Go on to the next step in which a member has work, if none needs this one."""
        waiting = [place for place in self._places.values() if place.waiters]
        while waiting and not any(map(self._blocks_step, self._places.values())):
            self._step += 1
            for place in waiting:
                self._grant_turns(place)

    def _grant_turns(self, place: _Place) -> None:
        """Grant the step's resource to the member's thread that asked for it first."""
        for waiter in place.waiters:
            if self._may_use(place, waiter.resource):
                place.waiters.remove(waiter)
                place.holds = True
                waiter.wake(granted=True)
                return

    def _interrupt(self, member: str) -> None:
        place = self._places.get(member)
        if place is None:
            return
        if place.waiters:
            place.left_s = -math.inf
        for waiter in place.waiters:
            waiter.wake(granted=False)
        place.waiters = []
