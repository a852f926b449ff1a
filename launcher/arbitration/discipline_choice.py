"""Which discipline suits a group: decided by measurement, without threads or clocks.

A window of iterations gives each member's rate. The total normalized speed is the sum of rate × iteration time alone,
1 for a member as fast as alone.

1. The group starts with the discipline that is predicted best.
2. Another one is tried if what it could gain, over the time that the group will probably go on, pays for the trial. One
   that was not tried yet could reach its bound, one that was tried a little more than it reached.
   Where a member misses its promised speed the total counts for less, so that promises are kept where that is possible.
3. A trial's window is compared with the windows of the kept discipline right before and right after it, because the
   rest of the machine changes how fast everybody is. Trials go on, in turn with the kept discipline, until it is clear
   which one is better, or that it hardly matters.
4. The best one stays. Tried ones are tried again at growing intervals only, so that noise does not make a group change
   forever.

The findings for a set of members are kept for the next time that the same set comes together.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from muri.launcher.job.stage_clock import STAGE_COUNT

TOLERANCE: Final = 0.2
"""How far a total may be from a prediction, or from what was measured before, without a cause."""

LEAST_GAIN: Final = 0.02
"""How much better another discipline must be to be tried or kept."""

DOUBT: Final = 0.08
"""How far one trial's ratio may be from the truth; less after several trials."""

RETRY: Final = 1.5
"""What was tried may be better by so many times the doubt left."""

MOST_TRIALS: Final = 4
"""After so many trials the better one is taken, however close."""

NEARLY_KEPT: Final = 0.96
"""A window is short: so much of its promised speed is enough for a member."""

MISSED_POWER: Final = 8
"""How fast a total counts for less, the more a promise is missed: a member with three quarters of its promised speed
makes it count for a seventh, which no gain of the others makes up for."""

CLEARLY_WORSE: Final = 0.9
"""A trial's window ends early if its total stays below this share of the kept one's though all iterations ended now."""

LEAST_RATIO: Final = 0.1
"""What a trial counts at least, also if nobody did an iteration."""

LEAST_ITERATIONS: Final = 3
"""Iterations of each member in a window."""

FEWEST_ITERATIONS: Final = 2
LONG_WINDOW_S: Final = 30.0
"""After this time so few are enough for a first finding: a wrong discipline would cost more than the doubt."""

LEAST_TRIAL_S: Final = 2.0
"""No trial is judged before: the first iterations after a change belong to both disciplines."""

LEAST_WINDOW_S: Final = 5.0
LONGEST_WINDOW_S: Final = 120.0
"""A member that has not done its iterations by then (because it validates, say) is left out of the window."""

FIRST_HORIZON_S: Final = 600.0
"""A group is expected to go on for as long again as it has been there, and at least for this time."""

ODDS: Final = 0.25
"""How likely a possible gain is thought to be real."""

UNTRIED_LOSS: Final = 0.5
"""Share of the work that a trial of what was never tried is thought to lose."""

FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
"""Between two trials of what was tried before; doubles each time."""

MOST_COUNTED: Final = 8
"""So many windows, or trials, count at most: a mean that moves."""


@dataclass(frozen=True, slots=True)
class Node:
    """What the group runs on.

    Attributes:
        cpus: Cores for its members.
        has_gpu: Whether it has a GPU. Otherwise the members' cores do its work.
    """

    cpus: int = 1
    has_gpu: bool = True


ONE_GPU: Final = Node()
"""A node of which nothing more is known."""


def candidates(count: int, node: Node) -> tuple[str, ...]:
    """What auto chooses from for so many members, the discipline predicted best first.

    Where cores are all that there is, the kernel shares them without ever leaving one idle, and turns only cost; with a
    GPU turns spare the members each other's kernels.
    """
    first = ("fair", "plain") if node.has_gpu else ("plain", "fair")
    return (*first, "lockstep") if count <= STAGE_COUNT else first


@dataclass(frozen=True, slots=True)
class Decision:
    """A discipline, and why."""

    discipline: str
    reason: str


@dataclass(slots=True)
class _Count:
    """Iterations of one member in a window, the first of which may have begun before it.

    Attributes:
        first_s: End of the first one.
        last_s: End of the last one.
        iterations: How many ended after the first.
    """

    first_s: float
    last_s: float
    iterations: int = 0

    @property
    def per_s(self) -> float:
        return self.iterations / (self.last_s - self.first_s)


@dataclass(slots=True)
class _Mean:
    """A mean that moves.

    Attributes:
        value: The mean.
        count: Of how many values, `MOST_COUNTED` at most; 0 once they may hold no longer.
    """

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
    """What is known of one set of members.

    Attributes:
        kept: The discipline that suits the set.
        since_s: When it was first there.
        latest: Iterations per second of each member in the latest window under the kept discipline.
        usual: What the kept discipline reaches, in total.
        settled: The same when others were last compared with it.
        gains: Of each other one that was tried: the logarithm of its speed relative to the kept one.
        pause_s: After the next trial of what was tried before, no other for this long.
        not_before_s: None of them before this time.
    """

    kept: str
    since_s: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    usual: _Mean | None = None
    settled: float = 0.0
    gains: dict[str, _Mean] = field(default_factory=dict)
    pause_s: float = FIRST_PAUSE_S
    not_before_s: float = 0.0

    def keep(self, tried: str) -> None:
        """Keep another discipline from now on: all gains become relative to it."""
        gain = self.gains.pop(tried)
        for other in self.gains.values():
            other.value -= gain.value
        self.gains[self.kept] = _Mean(-gain.value, gain.count)
        self.kept, self.usual = tried, None


@dataclass(slots=True)
class DisciplineChoice:
    """Watches iterations end and says when to change the discipline.

    Attributes:
        disciplines: The candidates, the one predicted best first.
        predicted: Predicted normalized speed of each member in the whole group under turns; may be empty.
        promised: The speed that each member was promised; those that were promised none are not in it.
        discipline: The one in force.
    """

    disciplines: tuple[str, ...]
    predicted: Mapping[str, float] = field(default_factory=dict)
    promised: Mapping[str, float] = field(default_factory=dict)
    discipline: str = ""
    _candidates: tuple[str, ...] = ()
    _present: frozenset[str] = frozenset()
    _counts: dict[str, _Count] = field(default_factory=dict)
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

        Args:
            present: Who is there now.
            timed: Whether the iteration time alone of each is known. It is learned under turns only: the time of a
                stage that is slowed down by others says nothing.
            turns: Whether they have to take turns, because they share a process and its settings.
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
        """Count an iteration.

        Args:
            member: The member that finished it.
            solo_s: Its iteration time alone, as far as known by now.
            now_s: The current time.
            stage_s: Seconds that it held each resource; () where others slowed that down.

        Returns:
            What to change to, None to go on.
        """
        if member not in self._present or len(self._present) < 2:
            return None
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        count = self._counts.get(member)
        if count is None:
            self._counts[member] = _Count(now_s, now_s)
        else:
            count.iterations, count.last_s = count.iterations + 1, now_s
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
        enough = sum(count.iterations >= least for count in self._counts.values())
        return elapsed_s >= LEAST_WINDOW_S and enough == len(self._present)

    def _judge(self, now_s: float) -> Decision | None:
        """Draw the conclusions of a window."""
        per_s = {member: count.per_s for member, count in self._counts.items() if count.last_s > count.first_s}
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
        self._note_usual()
        if known.usual is not None and abs(known.usual.value - known.settled) > TOLERANCE * known.settled:
            known.settled = known.usual.value
            for gain in known.gains.values():  # they were measured with other iterations than these, perhaps
                gain.count = 0
        return self._try_another(now_s)

    def _note_usual(self) -> None:
        known, total = self._known, self._total(self._known.latest)
        if known.usual is None:
            known.usual, known.settled = _Mean(total), total
        else:
            known.usual.add(total)

    def _give_up(self, now_s: float) -> Decision | None:
        """End a trial's window that could not turn out better, if each iteration under way ended right now."""
        elapsed_s = now_s - (self._begun_s or now_s)
        if elapsed_s < LEAST_TRIAL_S:
            return None
        latest = self._known.latest
        ended = {member: 1 + count.iterations for member, count in self._counts.items()}
        most = {member: (1 + ended.get(member, 0)) / elapsed_s for member in latest}
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
            if not self._is_clear(known.gains[tried]):
                return self._begin_trial(tried, now_s)
        return self._settle(now_s)

    def _is_clear(self, gain: _Mean) -> bool:
        return gain.count >= MOST_TRIALS or abs(gain.value - LEAST_GAIN) > gain.doubt

    def _settle(self, now_s: float) -> Decision | None:
        """End the comparison: keep the best discipline, or go on to another one."""
        known, tried, kept = self._known, self._tried, self._known.kept
        self._tried = ""
        self._postpone(now_s)
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
        known = self._known
        others = [name for name in self._candidates if name != known.kept and self._pays(name, now_s)]
        if not others:
            return None
        tried = max(others, key=self._possible_gain)
        return self._begin_trial(tried, now_s)

    def _begin_trial(self, tried: str, now_s: float) -> Decision | None:
        usual = self._known.usual
        reached = usual.value if usual else 0.0
        possible = reached * (1 + self._possible_gain(tried))
        self._tried, self._begun_s = tried, now_s
        missed = "" if self._missed(self._known.latest) == 1.0 else " (counted for less, as a promise was missed)"
        reason = f"{self._known.kept} reaches {reached:.2f}{missed}, {tried} may reach {possible:.2f}"
        return self._change(tried, reason)

    def _pays(self, discipline: str, now_s: float) -> bool:
        """Whether the possible gain is worth the work that a trial may lose."""
        known = self._known
        found = known.gains.get(discipline)
        if found is not None and now_s < known.not_before_s and self._missed(known.latest) == 1.0:
            return False
        loss = UNTRIED_LOSS if found is None else max(0.0, 1 - math.exp(found.value))
        trial_s = _window_s(min(known.latest.values(), default=0.0))
        horizon_s = max(FIRST_HORIZON_S, now_s - (known.since_s or now_s))
        gain = self._possible_gain(discipline)
        return gain > LEAST_GAIN and ODDS * gain * horizon_s >= loss * trial_s

    def _possible_gain(self, discipline: str) -> float:
        """How much faster than under the kept discipline all may be together under another one; 0.1 is 10 %."""
        found = self._known.gains.get(discipline)
        if found is not None and found.count:
            return math.exp(found.value + RETRY * found.doubt) - 1
        latest = self._known.latest
        total = self._total(latest)
        return self._bound(discipline, frozenset(latest)) / total - 1 if total > 0 else 0.0

    def _bound(self, discipline: str, members: frozenset[str]) -> float:
        """No discipline that was not tried makes these members faster than this, all together."""
        bound = float(len(members))  # nobody is faster than alone
        if discipline == "lockstep":
            bound = min(bound, self._lockstep_bound(members))
        if discipline != "plain" and members == self.predicted.keys():
            bound = min(bound, (1 + TOLERANCE) * sum(self.predicted.values()))
        return bound

    def _lockstep_bound(self, members: frozenset[str]) -> float:
        """All do the same number of iterations: no more than the longest one, or the fullest resource, allows."""
        solo_s = [self._solo_s.get(member, 0.0) for member in members]
        held_s = zip(*(self._stage_s[member] for member in members & self._stage_s.keys()), strict=True)
        period_s = max(*solo_s, *map(sum, held_s))
        return sum(solo_s) / period_s if period_s > 0 else float(len(members))

    def _total(self, per_s: Mapping[str, float], members: Set[str] | None = None) -> float:
        """What these members, all when None, reach together: their total normalized speed, less for missed promises."""
        counted = per_s.keys() if members is None else members
        total = sum(self._speed(per_s, member) for member in sorted(counted))
        return total * self._missed({member: per_s[member] for member in counted})

    def _speed(self, per_s: Mapping[str, float], member: str) -> float:
        return per_s[member] * self._solo_s.get(member, 0.0)

    def _missed(self, per_s: Mapping[str, float]) -> float:
        """How much a total counts: 1 where each of these members has its promise, less where one does not."""
        kept = [self._speed(per_s, member) / self.promised[member] for member in per_s if member in self.promised]
        return max(LEAST_RATIO, min([1.0, *(share / NEARLY_KEPT for share in kept)]) ** MISSED_POWER)

    def _postpone(self, now_s: float) -> None:
        """Let some time pass before anything is tried again."""
        known = self._known
        known.not_before_s = now_s + known.pause_s
        known.pause_s = min(2 * known.pause_s, LONGEST_PAUSE_S)

    @property
    def _known(self) -> _Known:
        return self._known_of[self._present]

    def _change(self, discipline: str, reason: str) -> Decision | None:
        if discipline == self.discipline:
            return None
        self.discipline = discipline
        return Decision(discipline, reason)

    def _clear(self) -> None:
        self._counts.clear()
        self._begun_s = None


def _window_s(slowest_per_s: float) -> float:
    """How long a window takes whose slowest member does so many iterations a second."""
    if slowest_per_s <= 0:
        return LONGEST_WINDOW_S
    soon_s = max(LEAST_WINDOW_S, LEAST_ITERATIONS / slowest_per_s)
    return min(soon_s, max(LONG_WINDOW_S, FEWEST_ITERATIONS / slowest_per_s), LONGEST_WINDOW_S)
