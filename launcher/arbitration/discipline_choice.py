"""Which discipline suits a group: decided by measurement, without threads or clocks.

A window of iterations gives each member's normalized speed: iterations done × iteration time alone / seconds
elapsed, 1 for a member as fast as alone. Disciplines are compared by the total of these speeds.

1. The group starts with the planned discipline.
2. Where the total of a window differs from what was expected by more than 20 %, or nothing was expected, the other
   discipline is tried for one window.
3. The better one stays, but only a gain of 5 % justifies a change; its measured total is expected from then on.
4. Trials of one set of members come at growing intervals, so that noise does not make a group change forever.

The findings for a set of members are kept for the next time that the same set comes together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

TOLERANCE: Final = 0.2
"""How far the measured total may be from the expected one."""

LEAST_GAIN: Final = 0.05
"""How much better the other discipline must be to be kept."""

LEAST_ITERATIONS: Final = 8
"""Iterations of each member in a window."""

LEAST_WINDOW_S: Final = 5.0
LONGEST_WINDOW_S: Final = 120.0
"""A member that has not done its iterations by then (because it validates, say) is left out of the window."""

FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
"""Between two trials of the same members; doubles each time."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A discipline, and why."""

    discipline: str
    reason: str


@dataclass(slots=True)
class _Count:
    """Iterations of one member, counted from the end of the first one seen."""

    first_s: float
    last_s: float
    iterations: int = 0

    def speed(self, solo_s: float) -> float:
        return self.iterations * solo_s / (self.last_s - self.first_s)


@dataclass(slots=True)
class _Verdict:
    """What is known of one set of members.

    Attributes:
        discipline: The one that suits the set.
        expected: Predicted or measured total normalized speed under it; None: unknown.
        planned: Whether `expected` is a prediction.
        pause_s: After the next trial, no further trial for this long.
        not_before_s: No trial before this time.
    """

    discipline: str
    expected: float | None
    planned: bool
    pause_s: float = FIRST_PAUSE_S
    not_before_s: float = 0.0


@dataclass(slots=True)
class DisciplineChoice:
    """Watches iterations end and says when to change the discipline.

    Attributes:
        disciplines: The planned one, and the other.
        predicted: Predicted normalized speed of each member in the whole group; may be empty.
        discipline: The one in force.
    """

    disciplines: tuple[str, str]
    predicted: Mapping[str, float] = field(default_factory=dict)
    discipline: str = ""
    _present: frozenset[str] = frozenset()
    _counts: dict[str, _Count] = field(default_factory=dict)
    _solo_s: dict[str, float] = field(default_factory=dict)
    _begun_s: float | None = None
    _verdicts: dict[frozenset[str], _Verdict] = field(default_factory=dict)
    _tried_from: dict[str, float] | None = None

    def __post_init__(self) -> None:
        """Start with the planned discipline."""
        self.discipline = self.disciplines[0]

    def members_changed(self, present: frozenset[str]) -> Decision | None:
        """Start anew when members come or go: the window under measurement no longer counts."""
        self._present, self._tried_from = present, None
        self._clear()
        if len(present) < 2:
            return None
        return self._change(self._verdict().discipline, "what suits the members that are there now")

    def iteration_done(self, member: str, solo_s: float, now_s: float) -> Decision | None:
        """Count an iteration.

        Args:
            member: The member that finished it.
            solo_s: Its iteration time alone, as far as known by now.
            now_s: The current time.

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
        if self._tried_from is None:  # a trial is compared by the same yardstick
            self._solo_s[member] = solo_s
        return self._judge(now_s) if self._complete(now_s) else None

    def _complete(self, now_s: float) -> bool:
        elapsed_s = now_s - (self._begun_s or 0.0)
        if elapsed_s >= LONGEST_WINDOW_S:
            return True
        enough = sum(count.iterations >= LEAST_ITERATIONS for count in self._counts.values())
        return elapsed_s >= LEAST_WINDOW_S and enough == len(self._present)

    def _judge(self, now_s: float) -> Decision | None:
        speeds = {
            member: count.speed(self._solo_s[member])
            for member, count in self._counts.items()
            if count.last_s > count.first_s
        }
        self._clear()
        if len(speeds) < 2:
            return None
        if self._tried_from is None:
            return self._compare_with_plan(speeds, now_s)
        return self._compare_with_other(self._tried_from, speeds, now_s)

    def _compare_with_plan(self, speeds: dict[str, float], now_s: float) -> Decision | None:
        verdict, total = self._verdict(), sum(speeds.values())
        if now_s < verdict.not_before_s:
            return None
        if verdict.expected is None:
            reason = f"{self.discipline} reaches {total:.2f}; the other is tried, too"
        elif len(speeds) == len(self._present) and abs(total - verdict.expected) > TOLERANCE * verdict.expected:
            origin = "planned" if verdict.planned else "measured before"
            reason = f"{self.discipline} reaches {total:.2f}, {verdict.expected:.2f} was {origin}"
        else:
            return None
        self._tried_from = speeds
        return self._change(self._other(), reason)

    def _compare_with_other(self, before: dict[str, float], after: dict[str, float], now_s: float) -> Decision | None:
        common = sorted(before.keys() & after.keys())
        old, new = sum(before[member] for member in common), sum(after[member] for member in common)
        verdict, tried, left = self._verdict(), self.discipline, self._other()
        kept = tried if new > old * (1 + LEAST_GAIN) else left
        self._tried_from = None
        verdict.discipline, verdict.planned = kept, False
        if len(common) == len(self._present):
            verdict.expected = new if kept == tried else old
        verdict.not_before_s = now_s + verdict.pause_s
        verdict.pause_s = min(2 * verdict.pause_s, LONGEST_PAUSE_S)
        reason = f"{tried} reaches {new:.2f}, {left} {old:.2f}"
        return Decision(kept, reason) if kept == tried else self._change(kept, reason)

    def _verdict(self) -> _Verdict:
        found = self._verdicts.get(self._present)
        if found is None:
            whole = bool(self.predicted) and self._present == frozenset(self.predicted)
            expected = sum(self.predicted.values()) if whole else None
            found = self._verdicts[self._present] = _Verdict(self.disciplines[0], expected, whole)
        return found

    def _other(self) -> str:
        first, second = self.disciplines
        return second if self.discipline == first else first

    def _change(self, discipline: str, reason: str) -> Decision | None:
        if discipline == self.discipline:
            return None
        self.discipline = discipline
        return Decision(discipline, reason)

    def _clear(self) -> None:
        self._counts.clear()
        self._begun_s = None
