"""Start-time fair queueing on normalized progress, without threads or clocks.

A member's virtual time counts the seconds of *solo* running time that it has completed. Members
that make the same normalized progress (iterations done × solo iteration time per elapsed second)
advance alike, whatever the length of their iterations. After Goyal, Vin and Cheng, "Start-time fair
queuing" (1996); a newcomer starts at the smallest virtual time and so gets no arrears.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.profiler.records import RESOURCES

DEFAULT_WINDOW_S: Final = 0.2
"""How far behind the furthest member one may be counted, in seconds of solo running time.

Without the bound a member that ran ahead on free resources would later wait for as long for its
first contested one.
"""

DEFAULT_FINISH_WEIGHT: Final = 10.0
"""How much the rest of a stage counts against virtual time when choosing who goes first.

With 0 the queue is pure start-time fair queueing, in which a 20 ms stage waits behind a 500 ms one
as often as not. Weighed in, short stages overtake, and a long one that is under way is not sliced
among members that are equally far behind.
"""

LONGEST_SHORT_S: Final = 1.0
"""The rest of a stage beyond this counts once only: a stage of 10 s would otherwise stand back for 100 s each time,
and its member run at a tenth of its speed beside one with short iterations; now it stands back for 19 s at most."""

DEFAULT_AGE_WEIGHT: Final = 1.0
"""How much the seconds that a member has waited within its stage count for it.

As arrears are bounded, a long stage could otherwise wait forever behind short ones that saturate its
resource: three members with 20 ms stages would leave a fourth with one of 700 ms a fiftieth of it, instead
of a tenth or more.
"""

_NEW_SAMPLE_WEIGHT: Final = 0.2


def member_order(member: str) -> tuple[int, str]:
    """Sort key of member ids: numbers by value."""
    return (len(member), member)


@dataclass(slots=True)
class _Progress:
    start_s: float
    solo_iteration_s: float | None
    known: bool
    served_s: list[float] = field(default_factory=lambda: [0.0] * len(RESOURCES))
    expected_s: list[float] = field(default_factory=lambda: [0.0] * len(RESOURCES))

    @property
    def virtual_s(self) -> float:
        """Virtual time, the part of the iteration under way included."""
        served_s = sum(self.served_s)
        if self.solo_iteration_s is not None:
            served_s = min(served_s, self.solo_iteration_s)
        return self.start_s + served_s

    def remaining_s(self, resource: int) -> float:
        """How much longer the iteration will probably use the resource."""
        return max(0.0, self.expected_s[resource] - self.served_s[resource])


class FairQueue:
    """Virtual times of the members, and which of several comes next.

    Args:
        window_s: Bound of the arrears, see `DEFAULT_WINDOW_S`.
        finish_weight: See `DEFAULT_FINISH_WEIGHT`.
        age_weight: See `DEFAULT_AGE_WEIGHT`.
    """

    def __init__(
        self,
        window_s: float = DEFAULT_WINDOW_S,
        finish_weight: float = DEFAULT_FINISH_WEIGHT,
        age_weight: float = DEFAULT_AGE_WEIGHT,
    ) -> None:
        self._window_s = window_s
        self._finish_weight = finish_weight
        self._age_weight = age_weight
        self._members: dict[str, _Progress] = {}

    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """Add a member at the smallest virtual time.

        Args:
            member: Its id.
            solo_iteration_s: Its iteration time when alone; learnt from its busy times when None.
        """
        start_s = min((progress.virtual_s for progress in self._members.values()), default=0.0)
        self._members[member] = _Progress(start_s, solo_iteration_s, solo_iteration_s is not None)

    def leave(self, member: str) -> None:
        """Forget a member."""
        self._members.pop(member, None)

    def served(self, member: str, resource: int, seconds: float) -> None:
        """Count resource time within the iteration under way."""
        progress = self._members.get(member)
        if progress is not None:
            progress.served_s[resource] += seconds

    def iteration_done(self, member: str, busy_s: float, stage_s: Sequence[float]) -> None:
        """Count a whole iteration.

        Args:
            member: Its id.
            busy_s: Seconds the iteration took, waits for resources excluded.
            stage_s: Seconds that it used each resource.
        """
        progress = self._members.get(member)
        if progress is None:
            return
        if not progress.known:
            progress.solo_iteration_s = smooth(progress.solo_iteration_s, busy_s)
        progress.start_s += progress.solo_iteration_s or 0.0
        first = not any(progress.expected_s)
        for resource, seconds in enumerate(stage_s):
            before_s = None if first else progress.expected_s[resource]
            progress.expected_s[resource] = smooth(before_s, seconds)
            progress.served_s[resource] = 0.0

    def catch_up(self, member: str) -> None:
        """Forgive arrears beyond the window, before a request."""
        progress = self._members.get(member)
        if progress is None:
            return
        furthest_s = max(other.virtual_s for other in self._members.values())
        behind_s = furthest_s - self._window_s - progress.virtual_s
        if behind_s > 0:
            progress.start_s += behind_s

    def virtual_s(self, member: str) -> float:
        """The member's virtual time; 0 for one that is not present."""
        progress = self._members.get(member)
        return 0.0 if progress is None else progress.virtual_s

    def order(self, waiting: Iterable[str], resource: int, waited_s: Mapping[str, float] | None = None) -> list[str]:
        """The members that wait for the resource, those that go first at the front; the smaller id on a tie.

        Args:
            waiting: The members.
            resource: Index of the resource.
            waited_s: How long each has waited; those not in it have not.
        """
        ages = waited_s or {}

        def key(member: str) -> tuple[float, tuple[int, str]]:
            progress = self._members.get(member)
            rest_s = 0.0 if progress is None else progress.remaining_s(resource)
            lag_s = self.virtual_s(member) + self._stands_back_s(rest_s) - self._age_weight * ages.get(member, 0.0)
            return (lag_s, member_order(member))

        return sorted(waiting, key=key)

    def _stands_back_s(self, rest_s: float) -> float:
        weight, short_s = self._finish_weight, min(rest_s, LONGEST_SHORT_S)
        return weight * short_s + min(weight, 1.0) * (rest_s - short_s)


def smooth(before: float | None, sample: float) -> float:
    """Exponential mean: the mean so far, moved towards a new sample."""
    return sample if before is None else before + _NEW_SAMPLE_WEIGHT * (sample - before)
