"""Which discipline suits a group: decided by measurement, without threads or clocks.

A window of iterations gives each member's rate. The total normalized speed is the sum of rate × iteration time alone,
1 for a member as fast as alone. Disciplines are compared by it, always with the same iteration times alone.

1. The group starts with the discipline that is predicted best.
2. Another one is tried if what it could gain, over the time that the group will probably go on, pays for the trial. One
   that was not tried yet could reach its bound, one that was tried a little more than it reached.
3. A trial ends as soon as the discipline could not be better any more.
4. The best one stays. Tried ones are tried again at growing intervals only, so that noise does not make a group change
   forever.

The findings for a set of members are kept for the next time that the same set comes together.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Final

TOLERANCE: Final = 0.2
"""How far a total may be from a prediction, or from what was measured before, without a cause."""

LEAST_GAIN: Final = 0.02
"""How much better another discipline must be to be tried or kept."""

DOUBT: Final = 0.05
"""How far one window's total may be from the truth; less after several windows."""

CLEARLY_WORSE: Final = 0.9
"""A trial ends early when its total is below this share of the best one, even if all iterations ended right now."""

LEAST_ITERATIONS: Final = 5
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

MOST_WINDOWS: Final = 8
"""So many windows of a discipline count at most: a mean that moves."""


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
class _Finding:
    """What one discipline reached: iterations per second of each member, over some windows."""

    per_s: dict[str, float]
    windows: int = 1

    def add(self, per_s: Mapping[str, float]) -> None:
        self.windows = min(self.windows + 1, MOST_WINDOWS)
        for member, rate in per_s.items():
            before = self.per_s.get(member, rate)
            self.per_s[member] = before + (rate - before) / self.windows


@dataclass(slots=True)
class _Known:
    """What is known of one set of members.

    Attributes:
        kept: The discipline that suits the set.
        since_s: When it was first there.
        findings: By discipline.
        pause_s: After the next trial of what was tried before, no other for this long.
        not_before_s: None of them before this time.
    """

    kept: str
    since_s: float | None = None
    findings: dict[str, _Finding] = field(default_factory=dict)
    pause_s: float = FIRST_PAUSE_S
    not_before_s: float = 0.0


@dataclass(slots=True)
class DisciplineChoice:
    """Watches iterations end and says when to change the discipline.

    Attributes:
        disciplines: The candidates, the one predicted best first.
        predicted: Predicted normalized speed of each member in the whole group under turns; may be empty.
        discipline: The one in force.
    """

    disciplines: tuple[str, ...]
    predicted: Mapping[str, float] = field(default_factory=dict)
    discipline: str = ""
    _candidates: tuple[str, ...] = ()
    _present: frozenset[str] = frozenset()
    _counts: dict[str, _Count] = field(default_factory=dict)
    _solo_s: dict[str, float] = field(default_factory=dict)
    _stage_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _begun_s: float | None = None
    _known_of: dict[frozenset[str], _Known] = field(default_factory=dict)
    _on_trial: bool = False

    def __post_init__(self) -> None:
        """Start with the discipline predicted best."""
        self.discipline = self.disciplines[0]
        self._candidates = self.disciplines

    def members_changed(self, present: frozenset[str], *, timed: bool = True, turns: bool = False) -> Decision | None:
        """Start anew when members come or go: the window under measurement no longer counts.

        Args:
            present: Who is there now.
            timed: Whether the iteration time alone of each is known. It is learnt under turns only: the time of a
                stage that is slowed down by others says nothing.
            turns: Whether they have to take turns, because they share a process and its settings.
        """
        self._present, self._on_trial = present, False
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
        return self._give_up(now_s) if self._on_trial else None

    def _complete(self, now_s: float) -> bool:
        elapsed_s = now_s - (self._begun_s or 0.0)
        if elapsed_s >= LONGEST_WINDOW_S:
            return True
        first = self._on_trial or self.discipline not in self._known.findings
        least = FEWEST_ITERATIONS if first and elapsed_s >= LONG_WINDOW_S else LEAST_ITERATIONS
        enough = sum(count.iterations >= least for count in self._counts.values())
        return elapsed_s >= LEAST_WINDOW_S and enough == len(self._present)

    def _judge(self, now_s: float) -> Decision | None:
        """Draw the conclusions of a window."""
        per_s = {member: count.per_s for member, count in self._counts.items() if count.last_s > count.first_s}
        self._clear()
        known = self._known
        if self._on_trial:
            self._note(per_s)
            return self._settle(now_s)
        if len(per_s) < 2:
            return None
        known.since_s = now_s if known.since_s is None else known.since_s
        if self._has_changed(per_s) and now_s >= known.not_before_s:
            known.findings.clear()  # others were measured with other iterations than these
            self._postpone(now_s)
        self._note(per_s)
        return self._try_another(now_s)

    def _note(self, per_s: dict[str, float]) -> None:
        finding = self._known.findings.get(self.discipline)
        if finding is None:
            self._known.findings[self.discipline] = _Finding(per_s)
        else:
            finding.add(per_s)

    def _has_changed(self, per_s: Mapping[str, float]) -> bool:
        """Whether all members together are not as fast as before under the same discipline."""
        finding = self._known.findings.get(self.discipline)
        if finding is None or per_s.keys() != self._present:
            return False
        before, after = self._total(finding.per_s), self._total(per_s)
        return abs(after - before) > TOLERANCE * before

    def _give_up(self, now_s: float) -> Decision | None:
        """End a trial that could not turn out better, if each member's iteration under way ended right now."""
        elapsed_s = now_s - (self._begun_s or now_s)
        if elapsed_s < LEAST_TRIAL_S:
            return None
        kept = self._known.findings[self._known.kept].per_s
        ended = {member: 1 + count.iterations for member, count in self._counts.items()}
        most = {member: (1 + ended.get(member, 0)) / elapsed_s for member in kept}
        if self._total(most) >= CLEARLY_WORSE * self._total(kept):
            return None
        self._clear()
        self._note(most)
        return self._settle(now_s)

    def _settle(self, now_s: float) -> Decision | None:
        """End the trial: keep the best discipline, or go on to another one."""
        known, tried, kept = self._known, self.discipline, self._known.kept
        self._on_trial = False
        old, new = self._both(kept, tried)
        if new > old * (1 + LEAST_GAIN):
            known.kept = tried
        reason = f"{tried} reaches {new:.2f}, {kept} {old:.2f}"
        another = self._try_another(now_s)
        if another is not None:
            return Decision(another.discipline, f"{reason}; {another.reason}")
        return Decision(tried, reason) if known.kept == tried else self._change(known.kept, reason)

    def _try_another(self, now_s: float) -> Decision | None:
        known = self._known
        others = [name for name in self._candidates if name != known.kept and self._pays(name, now_s)]
        if not others:
            return None
        tried = max(others, key=self._possible_gain)
        if tried in known.findings:
            self._postpone(now_s)
        best = self._total(known.findings[known.kept].per_s)
        possible = best * (1 + self._possible_gain(tried))
        self._on_trial, self._begun_s = True, now_s
        return self._change(tried, f"{known.kept} reaches {best:.2f}, {tried} may reach {possible:.2f}")

    def _pays(self, discipline: str, now_s: float) -> bool:
        """Whether the possible gain is worth the work that a trial may lose."""
        known = self._known
        if discipline in known.findings and now_s < known.not_before_s:
            return False
        loss = UNTRIED_LOSS
        if discipline in known.findings:
            best, reached = self._both(known.kept, discipline)
            loss = max(0.0, 1 - reached / best) if best > 0 else 1.0
        trial_s = _window_s(min(known.findings[known.kept].per_s.values(), default=0.0))
        horizon_s = max(FIRST_HORIZON_S, now_s - (known.since_s or now_s))
        gain = self._possible_gain(discipline)
        return gain > LEAST_GAIN and ODDS * gain * horizon_s >= loss * trial_s

    def _possible_gain(self, discipline: str) -> float:
        """How much faster than under the kept discipline all may be together under another one; 0.1 is 10 %."""
        known = self._known
        finding = known.findings.get(discipline)
        if finding is not None:
            best, reached = self._both(known.kept, discipline)
            return reached * (1 + DOUBT / math.sqrt(finding.windows)) / best - 1 if best > 0 else 0.0
        per_s = known.findings[known.kept].per_s
        best = self._total(per_s)
        return self._bound(discipline, frozenset(per_s)) / best - 1 if best > 0 else 0.0

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

    def _both(self, kept: str, tried: str) -> tuple[float, float]:
        """Totals of two disciplines, of the members that both were measured with."""
        one, other = (self._known.findings[name].per_s for name in (kept, tried))
        common = one.keys() & other.keys()
        return self._total(one, common), self._total(other, common)

    def _total(self, per_s: Mapping[str, float], members: Set[str] | None = None) -> float:
        """Total normalized speed of these members, of all when None."""
        counted = per_s.keys() if members is None else members
        return sum(per_s[member] * self._solo_s.get(member, 0.0) for member in sorted(counted))

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
