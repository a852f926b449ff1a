"""The paper's discipline: members rotate over the resources together, step by step."""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import Arbiter, Waiter, WaitInterruptedError
from muri.launcher.job.stage_clock import STAGE_COUNT, IterationRecord

DEFAULT_IDLE_LIMIT_S: Final = 1.0
"""How long the others wait for a member that runs outside of any stage; then they go on without it."""


class _Where(Enum):
    """What a member does, as far as the barrier is concerned.

    AWAY: not in the rotation, until it asks for a resource.
    BETWEEN: between two stages; the barrier waits for it, for a bounded time.
    WAITING: one of its threads asks for the resource of a later step and none uses this step's.
    HOLDING: one of its threads uses the resource of this step.
    """

    AWAY = "away"
    BETWEEN = "between"
    WAITING = "waiting"
    HOLDING = "holding"


class _Place:
    """One member's place in the rotation."""

    __slots__ = ("done_with_step", "position", "since_s", "waiters", "where")

    def __init__(self, position: int) -> None:
        self.position = position
        self.where = _Where.AWAY
        self.since_s = 0.0
        self.waiters: list[Waiter] = []
        self.done_with_step = -1


class LockstepArbiter(Arbiter):
    """At step j the member at position i holds resource (i + j) mod 4 (Muri, section 4.2, Eq. 3).

    A step ends when every member in the rotation is done with it. A member passes over a
    resource that its script does not use. One that has not started, has ended, or runs outside
    of stages for longer than `idle_limit_s` leaves the rotation until it asks again.

    Args:
        ordering: Members by position, None for an empty place.
        now: The clock.
        idle_limit_s: See `DEFAULT_IDLE_LIMIT_S`.
    """

    discipline = "lockstep"

    def __init__(
        self,
        ordering: Sequence[str | None],
        now: Clock = MACHINE_CLOCK,
        idle_limit_s: float = DEFAULT_IDLE_LIMIT_S,
    ) -> None:
        super().__init__(now)
        if len(ordering) > STAGE_COUNT:
            raise UsageError(f"lockstep takes at most {STAGE_COUNT} members, not {len(ordering)}; use fair")
        self._positions = {member: index for index, member in enumerate(ordering) if member is not None}
        self._idle_limit_s = idle_limit_s
        self._places: dict[str, _Place] = {}
        self._step = 0

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Take the planned position; the member enters the rotation with its first request.

        One that was not planned, because it joined later, takes a free position.

        Raises:
            UsageError: No position is free.
        """
        with self._mutex:
            self._places[member] = _Place(self._position_for(member))

    def _position_for(self, member: str) -> int:
        taken = {place.position for name, place in self._places.items() if name != member}
        planned = self._positions.get(member)
        reserved = sorted(self._positions.values())
        unplanned = [position for position in range(STAGE_COUNT) if position not in reserved]
        wanted = [*([] if planned is None else [planned]), *unplanned, *reserved]
        free = [position for position in wanted if position not in taken]
        if not free:
            raise UsageError(f"there is no place in the rotation for member {member}: {STAGE_COUNT} are at work")
        return free[0]

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
            free = place.where is not _Where.HOLDING
            if free and self._may_use(place, resource):
                place.where = _Where.HOLDING
                return 0.0
            waiter = Waiter(member, resource, self._now)
            place.waiters.append(waiter)
            if free:
                place.where = _Where.WAITING
            self._advance()
        return self._await(waiter)

    def release(self, member: str, resource: int) -> bool:
        """Release the resource; the member may still come back to it within the step."""
        with self._mutex:
            place = self._places.get(member)
            if place is None or place.where is not _Where.HOLDING or self._turn(place) != resource:
                return False
            place.where, place.since_s = _Where.BETWEEN, self._now()
            if place.waiters:
                place.where = _Where.WAITING
                self._grant_turns(place)
                self._advance()
        return True

    def holders(self) -> Sequence[str | None]:
        """Which member holds the resource of this step."""
        with self._mutex:
            holding = {self._turn(p): member for member, p in self._places.items() if p.where is _Where.HOLDING}
        return [holding.get(resource) for resource in range(STAGE_COUNT)]

    def obstructs(self, member: str) -> bool:
        """Whether the step cannot end, for which others wait, before this member is done with it."""
        with self._mutex:
            holds = any(who == member and place.where is _Where.HOLDING for who, place in self._places.items())
            return holds and any(place.waiters for who, place in self._places.items() if who != member)

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
        if waiter.interrupted:
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
        if place.where is _Where.BETWEEN and self._now() - place.since_s >= self._idle_limit_s:
            place.where = _Where.AWAY
        return place.where in {_Where.BETWEEN, _Where.HOLDING}

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
                place.where = _Where.HOLDING
                waiter.wake(granted=True)
                return

    def _interrupt(self, member: str) -> None:
        place = self._places.get(member)
        if place is None:
            return
        waiters, place.waiters = place.waiters, []
        if place.where is _Where.WAITING:
            place.where = _Where.AWAY
        for waiter in waiters:
            waiter.wake(granted=False)
