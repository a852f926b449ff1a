"""The disciplines by name, and an arbiter whose discipline can change while members run.

A change loses no wait: the waits under the old discipline are called back, the new one grants no token before the last
token of the old one is returned, and the waits then continue under the new one. Members in processes of their own ask
for nothing without turns (`TURNS_INDEX`), so a stage of theirs that is under way when turns begin runs on beside the
others' until its next yield point.
"""

import logging
import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.arbitration.arbiter import (
    Arbiter,
    FairArbiter,
    PlainArbiter,
    WaitInterruptedError,
)
from muri.launcher.arbitration.discipline_choice import ONE_GPU, Decision, DisciplineChoice, Node, candidates
from muri.launcher.arbitration.fairness import smooth
from muri.launcher.arbitration.lockstep import LockstepArbiter
from muri.launcher.job.stage_clock import NO_TURNS, STAGE_COUNT, TURNS, TURNS_INDEX, IterationRecord

logger = logging.getLogger("muri.launcher")

HISTORY_LENGTH: Final = 20

DISCIPLINES: Final = ("auto", "fair", "lockstep", "plain")


@dataclass(frozen=True, slots=True)
class DisciplineChange:
    """One entry of the history.

    Attributes:
        at_s: When, in seconds since the epoch.
        discipline: The discipline from then on.
        reason: Why, for people.
    """

    at_s: float
    discipline: str
    reason: str


class _Seat:
    """One stay of a member in the group; a later stay of the same member gets a new seat.

    Attributes:
        planned_solo_s: Iteration time alone, given when it joined.
        solo_s: The same, or learned from its busy times.
        min_speed: The speed that it was promised; 0: none.
        interrupts: How often its waits were interrupted; a wait that finds another number is over.
        asking: Its threads that are within the inner arbiter.
    """

    __slots__ = ("asking", "interrupts", "min_speed", "planned_solo_s", "solo_s")

    def __init__(self, planned_solo_s: float | None, min_speed: float) -> None:
        self.planned_solo_s = self.solo_s = planned_solo_s
        self.min_speed = min_speed
        self.interrupts = 0
        self.asking = 0


class SwitchingArbiter(Arbiter):
    """Passes on to the arbiter of the discipline in force.

    Args:
        makers: Makes a fresh arbiter of each discipline.
        choice: Decides by measurement; None: only `switch` changes the discipline.
        first: The discipline to start with; the choice's when it decides.
        now: The clock.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Arbiter]],
        choice: DisciplineChoice | None = None,
        first: str | None = None,
        now: Clock = MACHINE_CLOCK,
    ) -> None:
        self._makers = dict(makers)
        self.discipline = first or (choice.discipline if choice else next(iter(makers)))
        self._inner = self._makers[self.discipline]()
        super().__init__(now)
        self._choice = choice
        self._changed = now.condition(self._mutex)
        self._target: str | None = None
        self._seats: dict[str, _Seat] = {}
        self._left: dict[str, _Seat] = {}
        self._holders: list[list[_Seat]] = [[] for _ in range(STAGE_COUNT)]
        self._in_threads: set[str] = set()
        self._measured: set[str] = set()
        self._history = deque(
            [DisciplineChange(time.time(), self.discipline, "the group starts with it")], maxlen=HISTORY_LENGTH
        )

    @property
    def history(self) -> tuple[DisciplineChange, ...]:
        """The latest changes of the discipline, oldest first."""
        return tuple(self._history)

    @property
    def takes_turns(self) -> bool:
        """As under the discipline in force."""
        return self._inner.takes_turns

    @property
    def waiting_hint(self) -> MutableSequence[int] | mmap.mmap:
        """The hint of the discipline in force; set for all resources while it is being changed."""
        return self._inner.waiting_hint

    @waiting_hint.setter
    def waiting_hint(self, hint: MutableSequence[int] | mmap.mmap) -> None:
        self._inner.waiting_hint = hint
        hint[TURNS_INDEX] = TURNS if self._inner.takes_turns else NO_TURNS

    def holders(self) -> Sequence[str | None]:
        """Who holds each resource."""
        return self._inner.holders()

    def obstructs(self, member: str) -> bool:
        """Whether others wait for what this member holds, or for the change of the discipline that it holds up."""
        with self._mutex:
            if self._target is None:
                return self._inner.obstructs(member)
            seat = self._seats.get(member)
            return seat is not None and any(seat in holders for holders in self._holders)

    def keep_turns_for(self, member: str) -> None:
        """Share plainly no more while this member is there."""
        with self._mutex:
            self._in_threads.add(member)

    def set_measuring(self, member: str, *, measuring: bool) -> None:
        """Share plainly only once no member that is there is measured any more."""
        with self._mutex:
            if measuring == (member in self._measured):
                return
            self._measured ^= {member}
            if member in self._seats:
                self._note_members()

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        """Join the discipline in force, and later ones."""
        with self._mutex:
            while member in self._left:  # a helper thread of the member's last stay is on its way out
                self._changed.wait()
            self._inner.join(member, solo_iteration_s, min_speed)
            self._seats[member] = _Seat(solo_iteration_s, min_speed)
            self._note_members()

    def leave(self, member: str) -> None:
        """Free what the member holds; a change may be waiting for just that."""
        with self._mutex:
            seat = self._seats.pop(member, None)
            if seat is None:
                return
            seat.interrupts += 1
            if seat.asking:
                self._left[member] = seat
            self._holders = [[holder for holder in holders if holder is not seat] for holders in self._holders]
            self._inner.leave(member)
            self._note_members()
            self._finish_switch()
            self._changed.notify_all()

    def acquire(self, member: str, resource: int) -> float:
        """Wait for the resource, also across changes of the discipline."""
        start_s = self._now()
        with self._mutex:
            seat = self._seats.get(member)
            interrupts = 0 if seat is None else seat.interrupts
        if seat is None:
            raise WaitInterruptedError(member)
        while True:
            with self._mutex:
                while self._target is not None and seat.interrupts == interrupts:
                    self._changed.wait()
                self._begin_asking(member, seat, interrupts)
                inner = self._inner
            waited_s = self._ask(inner.acquire, member, seat, resource)
            if waited_s == 0.0:
                return 0.0
            if waited_s is not None:
                return self._now() - start_s

    def release(self, member: str, resource: int) -> bool:
        """Pass the resource on; the last one under the old discipline lets the new one begin."""
        with self._mutex:
            seat, inner = self._seats.get(member), self._inner
            if seat is None or seat not in self._holders[resource]:
                return False
            self._holders[resource].remove(seat)
        woken = inner.release(member, resource)
        if self._target is None:
            return woken
        with self._mutex:
            self._finish_switch()
        return True

    def interrupt(self, member: str) -> None:
        """Wake the member's threads, also those that wait for the discipline to change."""
        with self._mutex:
            seat = self._seats.get(member)
            if seat is not None:
                seat.interrupts += 1
                self._inner.interrupt(member)
                self._changed.notify_all()

    def yield_point(self, member: str, resource: int) -> float:
        """Hand over to a member that is preferred, or to the next discipline."""
        if not self._inner.waiting_hint[resource]:  # a stale answer only delays the hand-over
            return 0.0
        start_s = self._now()
        with self._mutex:
            seat, inner = self._seats.get(member), self._inner
            if seat is None or seat not in self._holders[resource]:
                return 0.0
            if self._target is None:
                self._begin_asking(member, seat, seat.interrupts)
                self._holders[resource].remove(seat)
            interrupts, switching = seat.interrupts, self._target is not None
        if switching:
            self.release(member, resource)
        else:
            waited_s = self._ask(inner.yield_point, member, seat, resource)
            if waited_s is not None:
                return waited_s
        if seat.interrupts != interrupts:
            raise WaitInterruptedError(member)
        self.acquire(member, resource)
        return self._now() - start_s

    def iteration_done(self, member: str, record: IterationRecord) -> None:
        """Count the iteration; the choice may change the discipline."""
        with self._mutex:
            self._inner.iteration_done(member, record)
            seat = self._seats.get(member)
            if seat is None:
                return
            turns = self._inner.takes_turns
            if seat.planned_solo_s is None and turns:
                seat.solo_s = smooth(seat.solo_s, record.busy_s)
            if self._choice is not None and self._target is None:
                stage_s = record.stage_s if turns else ()
                self._follow(self._choice.iteration_done(member, seat.solo_s or 0.0, self._now(), stage_s))

    def switch(self, discipline: str, reason: str) -> None:
        """Change the discipline as soon as no token of the present one is out."""
        with self._mutex:
            self._begin_switch(Decision(discipline, reason))

    def _begin_asking(self, member: str, seat: _Seat, interrupts: int) -> None:
        if seat.interrupts != interrupts:
            raise WaitInterruptedError(member)
        seat.asking += 1

    def _ask(self, operation: Callable[[str, int], float], member: str, seat: _Seat, resource: int) -> float | None:
        """Ask the inner arbiter.

        Returns:
            Seconds waited; None if the wait was called back because the discipline changes.

        Raises:
            WaitInterruptedError: The member was interrupted or left.
        """
        waited_s = None
        try:
            waited_s = operation(member, resource)
        except WaitInterruptedError:
            pass  # the caller finds out why
        finally:
            with self._mutex:
                there = self._end_asking(member, seat, resource, granted=waited_s is not None)
        if not there:
            raise WaitInterruptedError(member)
        return waited_s

    def _end_asking(self, member: str, seat: _Seat, resource: int, *, granted: bool) -> bool:
        """Note who holds the resource now; False if the member has left meanwhile, which freed it."""
        seat.asking -= 1
        there = self._seats.get(member) is seat
        if there and granted:
            self._holders[resource].append(seat)
        if not there and not seat.asking:
            self._left.pop(member, None)
            self._changed.notify_all()
        self._finish_switch()
        return there

    def _note_members(self) -> None:
        if self._choice is not None:
            timed = all(seat.planned_solo_s is not None for seat in self._seats.values())
            self._choice.promised = {member: seat.min_speed for member, seat in self._seats.items() if seat.min_speed}
            turns = not self._seats.keys().isdisjoint(self._in_threads | self._measured)
            self._follow(self._choice.members_changed(frozenset(self._seats), timed=timed, turns=turns))

    def _follow(self, decision: Decision | None) -> None:
        if decision is not None:
            logger.info("discipline %s: %s", decision.discipline, decision.reason)
            self._begin_switch(decision)

    def _begin_switch(self, decision: Decision) -> None:
        self._history.append(DisciplineChange(time.time(), decision.discipline, decision.reason))
        if decision.discipline != (self._target or self.discipline):
            self._target = decision.discipline
            self._finish_switch()

    def _finish_switch(self) -> None:
        """Begin the new discipline, if one is due and no token of the old one is out."""
        if self._target is None:
            return
        seats = [*self._seats.values(), *self._left.values()]
        if any(seat.asking for seat in seats) or any(self._holders):
            self._call_back()
            return
        hint = self._inner.waiting_hint
        for resource in range(STAGE_COUNT):
            hint[resource] = 0
        self._inner = self._makers[self._target]()
        self.waiting_hint = hint
        for member, seat in self._seats.items():
            self._inner.join(member, seat.planned_solo_s, seat.min_speed)
        self.discipline, self._target = self._target, None
        self._changed.notify_all()

    def _call_back(self) -> None:
        """End all waits under the old discipline, and make holders give up at their next yield point."""
        for member in self._seats:
            self._inner.interrupt(member)
        for resource, holders in enumerate(self._holders):
            self._inner.waiting_hint[resource] = bool(holders)


def make_arbiter(
    discipline: str,
    members: list[str],
    ordering: list[str | None],
    predicted_speed: Mapping[str, float] | None = None,
    now: Clock = MACHINE_CLOCK,
    node: Node = ONE_GPU,
    *,
    promises: bool = False,
) -> Arbiter:
    """The arbiter of a discipline.

    Args:
        discipline: "auto", "fair", "lockstep" or "plain". A group of more than four has no rotation.
        members: The members' ids.
        ordering: Members in the planned ordering, None for a place that stays empty; used by
            lockstep only, `members` when empty.
        predicted_speed: Predicted normalized speed of each member in the group; used by auto only.
        now: The clock.
        node: What the group runs on.
        promises: Whether a member was promised a speed; then lockstep can be left for fair.

    Raises:
        UsageError: Lockstep was asked for more than four members.
    """
    places = ordering or list(members)
    makers: dict[str, Callable[[], Arbiter]] = {
        "fair": lambda: FairArbiter(now, cpus=node.cpus, asks_sole_member=False),
        "lockstep": lambda: LockstepArbiter(places, now),
        "plain": lambda: PlainArbiter(now),
    }
    if discipline == "lockstep" and promises:
        return SwitchingArbiter({name: makers[name] for name in ("lockstep", "fair")}, now=now)
    if discipline != "auto":
        return makers[discipline]()
    names = candidates(len(places), node)
    choice = DisciplineChoice(names, dict(predicted_speed or {}))
    return SwitchingArbiter({name: makers[name] for name in names}, choice, now=now)
