"""Promised speeds, without threads or clocks: who is behind its promise, and which grant would put somebody behind.

A member that was promised the speed p may wait for 1/p - 1 seconds in each second of its own work. Its *slack* is how
long it could wait right now and still have its promise: progress / p - time gone by. Progress counts iterations times
iteration time alone, so what slows the member down in another way than by waits uses the slack up, too.

- Of the members that wait with a negative slack the one with the least, relatively furthest behind, goes first.
- Nobody gets a resource for longer at a time than the slack of those that wait for it allows.
- Nor for longer than the slack of those allows that are about to need it: a stage of half a second that cannot be
  interrupted would otherwise begin in each gap that a member with short stages leaves. The resource stays idle instead.
  It is not kept free from members that are behind their own promise, nor for one that does not come as it usually does.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.launcher.arbitration.fairness import smooth
from muri.profiler.records import RESOURCES

CREDIT_S: Final = 1.0
"""Most slack that counts. Whoever has so much may wait for one stage of any length, or no stage longer than this could
ever begin; it then is behind until it has caught up."""

DEBT_S: Final = 10.0
"""How far behind a member counts at most; what it lost before is forgotten. A member that validated for an hour, or
whose iteration time alone is wrong, must not go first for as long."""

LONGEST_WAIT_S: Final = 60.0
"""Whoever has waited for so long within its stage goes first, whatever was promised to others."""

_GAPS: Final = 8
"""The latest times between two stages at a resource that tell when a member will come back."""

_LATE: Final = 1.5
"""A member that stays away for so many times its longest gap is not about to come."""

_LEAST_LATE_S: Final = 0.05

_LOOK_LATE_S: Final = 0.001
"""Clocks round: a look at the very end could come a moment before it, again and again."""


@dataclass(slots=True)
class _Progress:
    """What is known of a member with a promise.

    Attributes:
        min_speed: The promise.
        solo_s: Iteration time alone, learnt from its busy times unless it was known.
        known: Whether it was.
        since_s: End of its latest iteration, before it its first request; None before that, while the script starts.
        settled_s: The slack then.
        busy_before_s: What `busy_s` was then.
        joined_s: When its session began.
        waiting: How many of its threads wait for a resource.
        waiting_since_s: Since when one does.
        waited_s: Seconds in which one did, before that.
        left: For each resource when its latest stage there ended, and how busy it had been by then; None within one.
        gaps_s: For each resource its busy seconds between two stages, the latest ones.
    """

    min_speed: float
    solo_s: float | None
    known: bool
    joined_s: float
    since_s: float | None = None
    settled_s: float = 0.0
    busy_before_s: float = 0.0
    waiting: int = 0
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    left: list[tuple[float, float] | None] = field(default_factory=lambda: [None] * len(RESOURCES))
    gaps_s: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=_GAPS) for _ in RESOURCES])

    @property
    def wait_per_s(self) -> float:
        """How long it may wait for each second of its work."""
        return 1.0 / self.min_speed - 1.0

    def busy_s(self, now_s: float) -> float:
        """Seconds since its session began in which none of its threads waited."""
        waits_s = now_s - self.waiting_since_s if self.waiting else 0.0
        return now_s - self.joined_s - self.waited_s - waits_s

    def slack_s(self, now_s: float) -> float:
        """How long it could wait and still have its promise."""
        if self.since_s is None:
            return CREDIT_S
        done_s = self.busy_s(now_s) - self.busy_before_s
        if self.solo_s is not None:
            done_s = min(done_s, self.solo_s)
        return _bounded(self.settled_s + done_s / self.min_speed - (now_s - self.since_s))


class Promises:
    """The promises of a group's members, and how long each holds each resource at a time."""

    def __init__(self) -> None:
        self._progress: dict[str, _Progress] = {}
        self._pieces_s: dict[tuple[str, int], float] = {}

    def __bool__(self) -> bool:
        """Whether anybody was promised anything."""
        return bool(self._progress)

    def join(self, member: str, min_speed: float, solo_iteration_s: float | None, now_s: float) -> None:
        """Add a member; nothing is kept of one without a promise (0)."""
        if min_speed > 0:
            known = solo_iteration_s is not None
            self._progress[member] = _Progress(min_speed, solo_iteration_s, known, now_s)

    def leave(self, member: str) -> None:
        """Forget a member."""
        self._progress.pop(member, None)
        self._pieces_s = {key: piece_s for key, piece_s in self._pieces_s.items() if key[0] != member}

    def asks(self, member: str, resource: int, now_s: float) -> None:
        """A stage of the member asks for its resource."""
        progress = self._progress.get(member)
        if progress is not None and progress.since_s is None:
            progress.since_s, progress.busy_before_s = now_s, progress.busy_s(now_s)
        if progress is not None and (left := progress.left[resource]) is not None:
            progress.gaps_s[resource].append(progress.busy_s(now_s) - left[1])
            progress.left[resource] = None

    def leaves(self, member: str, resource: int, now_s: float) -> None:
        """A stage of the member is over."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.left[resource] = (now_s, progress.busy_s(now_s))

    def begins_to_wait(self, member: str, now_s: float) -> None:
        """A thread of the member waits from now on."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.waiting_since_s = progress.waiting_since_s if progress.waiting else now_s
            progress.waiting += 1

    def ends_to_wait(self, member: str, now_s: float) -> None:
        """It waits no more."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.waiting -= 1
            if not progress.waiting:
                progress.waited_s += now_s - progress.waiting_since_s

    def held(self, member: str, resource: int, piece_s: float) -> None:
        """Note the longest time without a yield point in which the member had the resource.

        Shorter ones are believed slowly, a longer one at once.
        """
        before_s = self._pieces_s.get((member, resource), 0.0)
        self._pieces_s[member, resource] = max(piece_s, smooth(before_s, piece_s))

    def iteration_done(self, member: str, busy_s: float, now_s: float) -> None:
        """Count an iteration that took so long without its waits."""
        progress = self._progress.get(member)
        if progress is None:
            return
        if not progress.known:
            progress.solo_s = smooth(progress.solo_s, busy_s)
        if progress.since_s is not None:
            worth_s = (progress.solo_s if progress.known else busy_s) or 0.0
            gained_s = worth_s / progress.min_speed - (now_s - progress.since_s)
            progress.settled_s = _bounded(progress.settled_s + gained_s)
        progress.since_s, progress.busy_before_s = now_s, progress.busy_s(now_s)

    def slack_s(self, member: str, now_s: float) -> float:
        """How long a member could wait and still have its promise; infinite without a promise."""
        progress = self._progress.get(member)
        return float("inf") if progress is None else progress.slack_s(now_s)

    def choose(
        self,
        order: Sequence[str],
        resource: int,
        waited_s: Mapping[str, float],
        now_s: float,
        *,
        may_keep: bool = True,
    ) -> str | None:
        """Which of the members that want a resource gets it; None to keep it free for one that is about to need it.

        Args:
            order: The members, in the order in which they would get it if nothing was promised.
            resource: Index of the resource.
            waited_s: How long each of those that wait for it has done so within its stage.
            now_s: The current time.
            may_keep: Whether it may be kept free.
        """
        starving = [member for member in order if waited_s.get(member, 0.0) >= LONGEST_WAIT_S]
        if starving:
            return max(starving, key=waited_s.__getitem__)
        slack_s = {member: self.slack_s(member, now_s) for member in order}
        first = order[0]
        least = min(order, key=slack_s.__getitem__)
        if slack_s[least] < 0:
            return least
        hold_s = self._pieces_s.get((first, resource), 0.0)
        if not _bears(slack_s[least], hold_s):
            first, hold_s = least, self._pieces_s.get((least, resource), 0.0)
        kept = may_keep and self._kept_until_s(order, resource, hold_s, now_s) is not None
        return None if kept else first

    def look_again_in_s(self, waited_s: Mapping[str, float], resource: int, now_s: float) -> float:
        """When `choose` has to be asked again after it has kept a resource free, if nothing happens until then.

        Args:
            waited_s: How long each member that waits has done so.
            resource: Index of the resource.
            now_s: The current time.
        """
        starved_s = now_s + LONGEST_WAIT_S - max(waited_s.values(), default=0.0)
        kept_s = self._kept_until_s(waited_s, resource, float("inf"), now_s)
        return max(0.0, min(starved_s, starved_s if kept_s is None else kept_s) - now_s) + _LOOK_LATE_S

    def _kept_until_s(self, order: Container[str], resource: int, hold_s: float, now_s: float) -> float | None:
        """Until when a resource must not be given away for so long; None if it may be now."""
        ends_s = []
        for member, progress in self._progress.items():
            left, gaps_s = progress.left[resource], progress.gaps_s[resource]
            if member in order or left is None or not gaps_s:
                continue
            late_s = _LATE * max(gaps_s) + _LEAST_LATE_S
            away_s = progress.busy_s(now_s) - left[1]
            end_s = min(now_s + late_s - away_s, left[0] + 2 * late_s)
            comes_in_s = max(0.0, min(gaps_s) - away_s)
            slack_s = min(CREDIT_S, progress.slack_s(now_s) + progress.wait_per_s * comes_in_s)
            if end_s > now_s and not _bears(slack_s, hold_s - comes_in_s):
                ends_s.append(end_s)
        return min(ends_s, default=None)


def _bears(slack_s: float, wait_s: float) -> bool:
    return wait_s <= max(0.0, slack_s) or slack_s >= CREDIT_S


def _bounded(slack_s: float) -> float:
    return max(-DEBT_S, min(CREDIT_S, slack_s))
