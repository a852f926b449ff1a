"""The disciplines by name, the choice between them by measurement, and an arbiter whose discipline can change.

`DisciplineChoice`: windows of iterations give the total normalized speed, the sum of rate × iteration time alone. The
group starts with the discipline that is predicted best. Another one is tried if its possible gain, over the time that
the group will probably go on, pays for the trial. A trial's window is compared with those of the kept discipline right
before and right after it, because the rest of the machine changes all speeds. Disciplines that lost are tried again at
growing intervals only. Findings are kept for the next time that the same members come together.

`SwitchingArbiter`: waits under the old discipline are called back, the new one grants no token before the last token of
the old one is returned, and the waits continue under the new one. Members in processes of their own ask for nothing
without turns, so a stage of theirs that is under way when turns begin runs on until its next yield point.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError, WrappingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter, LockstepArbiter, PlainArbiter
from muri.launcher.arbitration.fairness import smooth
from muri.launcher.job.stage_clock import NO_TURNS, STAGE_COUNT, TURNS, TURNS_INDEX, IterationRecord

logger = logging.getLogger("muri.launcher")

HISTORY_LENGTH: Final = 20

# How much a measurement says: shares of the total normalized speed.
TOLERANCE: Final = 0.2  # how far a total may be from a prediction, or from an earlier total, without a cause
LEAST_GAIN: Final = 0.02  # how much better another discipline must be to be tried or kept
DOUBT: Final = 0.08  # how far one trial's ratio may be from the truth; less after several trials
RETRY: Final = 1.5  # a tried discipline may be better by so many times the doubt left
MOST_TRIALS: Final = 4  # after so many trials the better one is taken, however close
MOST_COUNTED: Final = 8  # so many windows, or trials, count at most in a mean
LEAST_RATIO: Final = 0.1  # the least weight of a trial, also without a single iteration
CLEARLY_WORSE: Final = 0.9  # a trial ends early if its total stays below this though all iterations ended now
NEARLY_KEPT: Final = 0.96  # a window is short: so much of its minimum speed is enough for a member
MISSED_POWER: Final = 8  # with three quarters of a minimum speed a total counts for a seventh: no gain makes up for it

# How long a window is. A member without its iterations by then (because it validates, say) is left out.
LEAST_ITERATIONS: Final = 3
FEWEST_ITERATIONS: Final = 2  # enough for a first finding after `LONG_WINDOW_S`: a wrong discipline would cost more
LEAST_TRIAL_S: Final = 2.0  # the first iterations after a change belong to both disciplines
LEAST_WINDOW_S: Final = 5.0
LONG_WINDOW_S: Final = 30.0
LONGEST_WINDOW_S: Final = 120.0

# Whether a trial pays.
FIRST_HORIZON_S: Final = 600.0  # a group is expected to go on as long again as it has been there, and at least so long
ODDS: Final = 0.25  # how likely a possible gain is thought to be real
UNTRIED_LOSS: Final = 0.5  # share of the work that a first trial is thought to lose
FIRST_PAUSE_S: Final = 60.0  # before a second trial of a discipline; doubles each time
LONGEST_PAUSE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Node:
    """Cores for the members, and whether there is a GPU; without one the members' cores do its work."""

    cpus: int = 1
    has_gpu: bool = True


def candidates(count: int, node: Node) -> tuple[str, ...]:
    """Return the disciplines that auto chooses from for so many members, the one predicted best first.

    Without a GPU the kernel shares the cores without ever leaving one idle, and turns only cost; with a GPU turns spare
    the members each other's kernels.
    """
    first = ("fair", "plain") if node.has_gpu else ("plain", "fair")
    return (*first, "lockstep") if count <= STAGE_COUNT else first


@dataclass(frozen=True, slots=True)
class Decision:
    """A discipline, and why."""

    discipline: str
    reason: str


@dataclass(slots=True)
class _Mean:
    """A mean that moves, of `count` values, `MOST_COUNTED` at most; 0 once they may hold no longer."""

    value: float
    count: int = 1

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, MOST_COUNTED)
        self.value += (value - self.value) / self.count

    @property
    def doubt(self) -> float:
        return DOUBT / math.sqrt(self.count)


@dataclass(slots=True)
class _Known:
    """Findings about one set of members."""

    kept: str  # the discipline that suits the set
    since_s: float | None = None  # when it was first there
    latest: dict[str, float] = field(default_factory=dict)  # iterations per second in its latest window
    usual: _Mean | None = None  # the total that it reaches
    settled: float = 0.0  # the same when others were last compared with it
    gains: dict[str, _Mean] = field(default_factory=dict)  # of tried ones: the logarithm of speed relative to the kept
    pause_s: float = FIRST_PAUSE_S  # from the next trial of a tried discipline to another one
    not_before_s: float = 0.0  # no trial of a tried discipline earlier

    def keep(self, tried: str) -> None:
        """Keep another discipline from now on: all gains become relative to it."""
        gain = self.gains.pop(tried)
        for other in self.gains.values():
            other.value -= gain.value
        self.gains[self.kept] = _Mean(-gain.value, gain.count)
        self.kept, self.usual = tried, None


@dataclass(slots=True)
class DisciplineChoice:
    """Watches iterations end and says when to change the discipline, without threads or clocks."""

    disciplines: tuple[str, ...]  # the candidates, the one predicted best first
    predicted: Mapping[str, float] = field(default_factory=dict)  # normalized speeds of the whole group under turns
    min_speeds: Mapping[str, float] = field(default_factory=dict)  # of each member that has one
    discipline: str = ""  # the one in force
    _candidates: tuple[str, ...] = ()
    _present: frozenset[str] = frozenset()
    _ends_s: dict[str, list[float]] = field(default_factory=dict)
    _solo_s: dict[str, float] = field(default_factory=dict)
    _stage_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _begun_s: float | None = None
    _known_of: dict[frozenset[str], _Known] = field(default_factory=dict)
    _tried: str = ""
    _trial: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with the discipline predicted best."""
        self.discipline = self.disciplines[0]
        self._candidates = self.disciplines

    def members_changed(self, present: frozenset[str], *, timed: bool = True, turns: bool = False) -> Decision | None:
        """Start anew when members come or go: the window under measurement no longer counts.

        They are `timed` if the iteration time alone of each is known, which is learned under turns only. They must take
        `turns` if they share a process and its settings, or one is measured.
        """
        self._present, self._tried = present, ""
        self._clear()
        self._candidates = tuple(name for name in self.disciplines if not (turns and name == "plain"))
        if len(present) < 2 and not (self.discipline == "plain" and (turns or not timed)):
            return None
        known = self._known_of.get(present)
        if known is None or known.kept not in self._candidates:
            first = next(name for name in self._candidates if timed or name != "plain")
            self._known_of[present] = _Known(first)
        return self._change(self._known.kept, "what suits the members that are there now")

    def iteration_done(
        self, member: str, solo_s: float, now_s: float, stage_s: tuple[float, ...] = ()
    ) -> Decision | None:
        """Count a member's iteration; return the decision to change, None to go on.

        `solo_s` is its time alone as far as known, `stage_s` the seconds of each resource, () where others slowed that
        down.
        """
        if member not in self._present or len(self._present) < 2:
            return None
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        self._ends_s.setdefault(member, []).append(now_s)
        self._solo_s[member] = solo_s
        if stage_s:
            self._stage_s[member] = stage_s
        if self._complete(now_s):
            return self._judge(now_s)
        return self._give_up(now_s) if self.discipline != self._known.kept else None

    def _complete(self, now_s: float) -> bool:
        elapsed_s = now_s - (self._begun_s or 0.0)
        if elapsed_s >= LONGEST_WINDOW_S:
            return True
        first = bool(self._tried) or self._known.usual is None
        least = FEWEST_ITERATIONS if first and elapsed_s >= LONG_WINDOW_S else LEAST_ITERATIONS
        enough = sum(len(ends_s) > least for ends_s in self._ends_s.values())  # the first may have begun earlier
        return elapsed_s >= LEAST_WINDOW_S and enough == len(self._present)

    def _judge(self, now_s: float) -> Decision | None:
        """Draw the conclusions of a window."""
        spans = {member: (len(ends_s) - 1, ends_s[-1] - ends_s[0]) for member, ends_s in self._ends_s.items()}
        per_s = {member: count / span_s for member, (count, span_s) in spans.items() if span_s > 0}
        self._clear()
        known = self._known
        if self.discipline != known.kept:
            return self._end_trial(per_s)
        if len(per_s) < 2:
            return None
        known.since_s = now_s if known.since_s is None else known.since_s
        before, known.latest = known.latest, per_s
        if self._tried:
            return self._compare(before, now_s)
        usual = self._note_usual()
        if abs(usual - known.settled) > TOLERANCE * known.settled:
            known.settled = usual
            for gain in known.gains.values():  # they were measured with other iterations than these, perhaps
                gain.count = 0
        return self._try_another(now_s)

    def _note_usual(self) -> float:
        known, total = self._known, self._total(self._known.latest)
        if known.usual is None:
            known.usual, known.settled = _Mean(total), total
        else:
            known.usual.add(total)
        return known.usual.value

    def _give_up(self, now_s: float) -> Decision | None:
        """End a trial's window that could not turn out better, if each iteration under way ended right now."""
        elapsed_s = now_s - (self._begun_s or now_s)
        if elapsed_s < LEAST_TRIAL_S:
            return None
        latest = self._known.latest
        most = {member: (1 + len(self._ends_s.get(member, ()))) / elapsed_s for member in latest}
        if self._total(most) >= CLEARLY_WORSE * self._total(latest):
            return None
        self._clear()
        return self._end_trial(most)

    def _end_trial(self, per_s: dict[str, float]) -> Decision | None:
        """Go back to the kept discipline, to see whether it is still as fast as before the trial."""
        self._trial = per_s
        return self._change(self._known.kept, f"the trial of {self._tried} is over; its gain is checked")

    def _compare(self, before: Mapping[str, float], now_s: float) -> Decision | None:
        """Compare the trial with the windows before and after it; then try once more, or settle."""
        known, tried = self._known, self._tried
        around = before.keys() & known.latest.keys()
        common = around & self._trial.keys()
        usual = (self._total(before, common or around) + self._total(known.latest, common or around)) / 2
        self._note_usual()
        if usual > 0:
            gain = math.log(max(LEAST_RATIO, self._total(self._trial, common) / usual))
            if tried in known.gains:
                known.gains[tried].add(gain)
            else:
                known.gains[tried] = _Mean(gain)
            mean = known.gains[tried]
            if mean.count < MOST_TRIALS and abs(mean.value - LEAST_GAIN) <= mean.doubt:
                return self._begin_trial(tried, now_s)
        return self._settle(now_s)

    def _settle(self, now_s: float) -> Decision | None:
        """End the comparison: keep the best discipline, or go on to another one."""
        known, tried, kept = self._known, self._tried, self._known.kept
        self._tried = ""
        known.not_before_s = now_s + known.pause_s
        known.pause_s = min(2 * known.pause_s, LONGEST_PAUSE_S)
        gain = known.gains.get(tried)
        if gain is None or known.usual is None:
            return self._try_another(now_s)
        known.settled = known.usual.value
        reason = f"{tried} reaches {known.usual.value * math.exp(gain.value):.2f}, {kept} {known.usual.value:.2f}"
        if gain.value > LEAST_GAIN:
            known.keep(tried)
            return self._change(tried, reason)
        another = self._try_another(now_s)
        return another and Decision(another.discipline, f"{reason}; {another.reason}")

    def _try_another(self, now_s: float) -> Decision | None:
        others = [name for name in self._candidates if name != self._known.kept and self._pays(name, now_s)]
        return self._begin_trial(max(others, key=self._possible_gain), now_s) if others else None

    def _begin_trial(self, tried: str, now_s: float) -> Decision | None:
        known = self._known
        reached = known.usual.value if known.usual else 0.0
        possible = reached * (1 + self._possible_gain(tried))
        self._tried, self._begun_s = tried, now_s
        missed = "" if self._weight(known.latest) == 1.0 else " (counted for less, as a promise was missed)"
        return self._change(tried, f"{known.kept} reaches {reached:.2f}{missed}, {tried} may reach {possible:.2f}")

    def _pays(self, discipline: str, now_s: float) -> bool:
        """Return whether the possible gain is worth the work that a trial may lose."""
        known = self._known
        tried = known.gains.get(discipline)
        if tried is not None and now_s < known.not_before_s and self._weight(known.latest) == 1.0:
            return False
        loss = UNTRIED_LOSS if tried is None else max(0.0, 1 - math.exp(tried.value))
        trial_s = _window_s(min(known.latest.values(), default=0.0))
        horizon_s = max(FIRST_HORIZON_S, now_s - (known.since_s or now_s))
        gain = self._possible_gain(discipline)
        return gain > LEAST_GAIN and ODDS * gain * horizon_s >= loss * trial_s

    def _possible_gain(self, discipline: str) -> float:
        """Return how much faster all together may be than under the kept discipline; 0.1 is 10 %."""
        tried = self._known.gains.get(discipline)
        if tried is not None and tried.count:
            return math.exp(tried.value + RETRY * tried.doubt) - 1
        latest = self._known.latest
        total = self._total(latest)
        return self._bound(discipline, frozenset(latest)) / total - 1 if total > 0 else 0.0

    def _bound(self, discipline: str, members: frozenset[str]) -> float:
        """Return an upper bound of these members' total under a discipline without a trial."""
        bound = float(len(members))  # no member is faster than alone
        if discipline == "lockstep":
            # Equal numbers of iterations: no more than the longest one, or the fullest resource, allows.
            solo_s = [self._solo_s.get(member, 0.0) for member in members]
            held_s = zip(*(self._stage_s[member] for member in members & self._stage_s.keys()), strict=True)
            period_s = max(*solo_s, *map(sum, held_s))
            bound = min(bound, sum(solo_s) / period_s) if period_s > 0 else bound
        if discipline != "plain" and members == self.predicted.keys():
            bound = min(bound, (1 + TOLERANCE) * sum(self.predicted.values()))
        return bound

    def _total(self, per_s: Mapping[str, float], members: Set[str] | None = None) -> float:
        """Return the total normalized speed of these members, all when None; less for missed minimum speeds."""
        counted = per_s.keys() if members is None else members
        total = sum(self._speed(per_s, member) for member in sorted(counted))
        return total * self._weight({member: per_s[member] for member in counted})

    def _speed(self, per_s: Mapping[str, float], member: str) -> float:
        return per_s[member] * self._solo_s.get(member, 0.0)

    def _weight(self, per_s: Mapping[str, float]) -> float:
        """Return how much a total counts: 1 where each of these members has its minimum speed, else less."""
        kept = [self._speed(per_s, member) / self.min_speeds[member] for member in per_s if member in self.min_speeds]
        return max(LEAST_RATIO, min([1.0, *(share / NEARLY_KEPT for share in kept)]) ** MISSED_POWER)

    @property
    def _known(self) -> _Known:
        return self._known_of[self._present]

    def _change(self, discipline: str, reason: str) -> Decision | None:
        if discipline == self.discipline:
            return None
        self.discipline = discipline
        return Decision(discipline, reason)

    def _clear(self) -> None:
        self._ends_s.clear()
        self._begun_s = None


def _window_s(slowest_per_s: float) -> float:
    """Return how long a window takes whose slowest member does so many iterations a second."""
    if slowest_per_s <= 0:
        return LONGEST_WINDOW_S
    soon_s = max(LEAST_WINDOW_S, LEAST_ITERATIONS / slowest_per_s)
    return min(soon_s, max(LONG_WINDOW_S, FEWEST_ITERATIONS / slowest_per_s), LONGEST_WINDOW_S)


@dataclass(slots=True, eq=False)
class _Seat:
    """One stay of a member in the group; a later stay of the same member gets a new seat."""

    planned_solo_s: float | None  # iteration time alone, given when it joined
    solo_s: float | None  # the same, or learned from its busy times
    min_speed: float
    interrupts: int = 0  # a wait that finds another number than at its begin is over
    asking: int = 0  # its threads that are within the inner arbiter


class SwitchingArbiter(WrappingArbiter):
    """Passes on to the arbiter of the discipline in force.

    `makers` make a fresh arbiter of each discipline. The group begins with the first one, or as `choice` says, which
    then decides by measurement; without it only `switch` changes the discipline.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Arbiter]],
        choice: DisciplineChoice | None = None,
        now: Clock = MACHINE_CLOCK,
    ) -> None:
        self._makers = dict(makers)
        self.discipline = choice.discipline if choice else next(iter(makers))
        super().__init__(self._makers[self.discipline](), now)
        self._choice = choice
        self._changed = now.condition(self._mutex)
        self._target: str | None = None
        self._seats: dict[str, _Seat] = {}
        self._left: dict[str, _Seat] = {}
        self._holders: list[list[_Seat]] = [[] for _ in range(STAGE_COUNT)]
        self._measured: set[str] = set()
        # The latest changes of the discipline, oldest first, as the status file shows them
        self.history: deque[dict[str, object]] = deque(maxlen=HISTORY_LENGTH)
        self._note_change(Decision(self.discipline, "the group starts with it"))
        self._show_turns()

    def _show_turns(self) -> None:
        self.waiting_hint[TURNS_INDEX] = TURNS if self._inner.takes_turns else NO_TURNS

    def obstructs(self, member: str) -> bool:
        """Return whether others wait for a resource of this member, or for the change that it holds up."""
        with self._mutex:
            if self._target is None:
                return self._inner.obstructs(member)
            seat = self._seats.get(member)
            return seat is not None and any(seat in holders for holders in self._holders)

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
            self._seats[member] = _Seat(solo_iteration_s, solo_iteration_s, min_speed)
            self._note_members()

    def leave(self, member: str) -> None:
        """Free all tokens of the member; a change may be waiting for just that."""
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
                if seat.interrupts != interrupts:
                    raise WaitInterruptedError(member)
                seat.asking += 1
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
                seat.asking += 1
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

    def _ask(self, operation: Callable[[str, int], float], member: str, seat: _Seat, resource: int) -> float | None:
        """Return the seconds waited at the inner arbiter; None if the wait was called back.

        `seat.asking` counts the thread already. A member that has left gets a WaitInterruptedError.
        """
        waited_s = None
        try:
            waited_s = operation(member, resource)
        except WaitInterruptedError:
            pass  # the caller finds out why
        finally:
            with self._mutex:
                seat.asking -= 1
                present = self._seats.get(member) is seat
                if present and waited_s is not None:
                    self._holders[resource].append(seat)
                if not present and not seat.asking:  # it has left meanwhile, which freed the resource
                    self._left.pop(member, None)
                    self._changed.notify_all()
                self._finish_switch()
        if not present:
            raise WaitInterruptedError(member)
        return waited_s

    def _note_members(self) -> None:
        if self._choice is not None:
            timed = all(seat.planned_solo_s is not None for seat in self._seats.values())
            self._choice.min_speeds = {member: seat.min_speed for member, seat in self._seats.items() if seat.min_speed}
            turns = not self._seats.keys().isdisjoint(self._measured)
            self._follow(self._choice.members_changed(frozenset(self._seats), timed=timed, turns=turns))

    def _follow(self, decision: Decision | None) -> None:
        if decision is not None:
            logger.info("discipline %s: %s", decision.discipline, decision.reason)
            self._begin_switch(decision)

    def _begin_switch(self, decision: Decision) -> None:
        self._note_change(decision)
        if decision.discipline != (self._target or self.discipline):
            self._target = decision.discipline
            self._finish_switch()

    def _note_change(self, decision: Decision) -> None:
        self.history.append({"at_s": time.time(), "discipline": decision.discipline, "reason": decision.reason})

    def _finish_switch(self) -> None:
        """Begin the new discipline, if one is due and no token of the old one is out."""
        if self._target is None:
            return
        seats = [*self._seats.values(), *self._left.values()]
        hint = self._inner.waiting_hint
        if any(seat.asking for seat in seats) or any(self._holders):
            for member in self._seats:  # end all waits under the old discipline
                self._inner.interrupt(member)
            for resource, holders in enumerate(self._holders):  # holders give up at their next yield point
                hint[resource] = bool(holders)
            return
        for resource in range(STAGE_COUNT):
            hint[resource] = 0
        self._inner = self._makers[self._target]()
        self.waiting_hint = hint
        self._show_turns()
        for member, seat in self._seats.items():
            self._inner.join(member, seat.planned_solo_s, seat.min_speed)
        self.discipline, self._target = self._target, None
        self._changed.notify_all()


def make_arbiter(
    discipline: str,
    members: list[str],
    ordering: list[str | None],
    predicted_speed: Mapping[str, float] | None = None,
    now: Clock = MACHINE_CLOCK,
    node: Node | None = None,
    *,
    promises: bool = False,
) -> Arbiter:
    """Return the arbiter of a discipline: "auto", "fair", "lockstep" or "plain".

    `ordering` is the planned rotation of lockstep, with None for empty places; without one it is that of `members`.
    Auto uses the members' predicted normalized speeds. With `promises` lockstep can be left for fair.
    """
    places, node = ordering or list(members), node or Node()
    makers: dict[str, Callable[[], Arbiter]] = {
        "fair": lambda: FairArbiter(now, cpus=node.cpus),
        "lockstep": lambda: LockstepArbiter(places, now),
        "plain": lambda: PlainArbiter(now),
    }
    if discipline == "lockstep" and promises:
        return SwitchingArbiter({name: makers[name] for name in ("lockstep", "fair")}, now=now)
    if discipline != "auto":
        return makers[discipline]()
    names = candidates(len(places), node)
    choice = DisciplineChoice(names, dict(predicted_speed or {}))
    return SwitchingArbiter({name: makers[name] for name in names}, choice, now)
