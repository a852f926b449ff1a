"""Which member gets a resource next, without threads or clocks: fair queueing by progress, and minimum speeds.

A member's virtual time counts the seconds of *solo* running time that it has completed. Members that make the same
normalized progress advance alike, whatever the length of their iterations. After Goyal, Vin and Cheng, "Start-time fair
queuing" (1996); a newcomer starts at the smallest virtual time and so gets no arrears.

A member with the minimum speed p may wait for 1/p - 1 seconds in each second of its own work. Its *slack* is how long
it could wait right now and still have its minimum: progress / p - time gone by. Progress counts iterations times
iteration time alone, so a member that is slowed down in another way than by waits uses its slack up, too.

docs/interleaving.md has the rules. A resource is kept free because a stage of half a second that cannot be interrupted
would otherwise begin in each gap that a member with short stages leaves. It is not kept free from members below their
own minimum, nor for one that does not come as it usually does.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from muri.profiler.records import RESOURCES

DEFAULT_WINDOW_S: Final = 0.2
"""How far behind the furthest member one may be counted, in seconds of solo running time: a member that ran ahead on
free resources would otherwise wait for as long for its first contested one."""

DEFAULT_FINISH_WEIGHT: Final = 10.0
"""How much the rest of a stage counts against virtual time. With 0 the queue is pure start-time fair queueing, in which
a 20 ms stage waits behind a 500 ms one as often as not. Weighed in, short stages overtake, and a long one that is under
way is not sliced among members that are equally far behind."""

LONGEST_SHORT_S: Final = 1.0
"""The rest of a stage beyond this counts once only: a stage of 10 s would otherwise stand back for 100 s each time,
and its member run at a tenth of its speed beside one with short iterations; now it stands back for 19 s at most."""

AGE_WEIGHT: Final = 1.0
"""How much the seconds that a member has waited within its stage count for it. As arrears are bounded, a long stage
could otherwise wait forever behind short ones that saturate its resource: three members with 20 ms stages would leave a
fourth with one of 700 ms a fiftieth of it, instead of a tenth or more."""

_NEW_SAMPLE_WEIGHT: Final = 0.2


@dataclass(slots=True)
class _Progress:
    start_s: float
    solo_iteration_s: float | None
    known: bool
    served_s: list[float] = field(default_factory=lambda: [0.0] * len(RESOURCES))
    expected_s: list[float] = field(default_factory=lambda: [0.0] * len(RESOURCES))

    @property
    def virtual_s(self) -> float:
        """Return the virtual time, the part of the iteration under way included."""
        served_s = sum(self.served_s)
        if self.solo_iteration_s is not None:
            served_s = min(served_s, self.solo_iteration_s)
        return self.start_s + served_s


class FairQueue:
    """Virtual times of the members, and which of several comes next."""

    def __init__(self, window_s: float = DEFAULT_WINDOW_S, finish_weight: float = DEFAULT_FINISH_WEIGHT) -> None:
        self._window_s = window_s
        self._finish_weight = finish_weight
        self.members: dict[str, _Progress] = {}

    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """Add a member at the smallest virtual time; learn its iteration time alone from its busy times when None."""
        start_s = min((progress.virtual_s for progress in self.members.values()), default=0.0)
        self.members[member] = _Progress(start_s, solo_iteration_s, solo_iteration_s is not None)

    def leave(self, member: str) -> None:
        """Forget a member."""
        self.members.pop(member, None)

    def served(self, member: str, resource: int, seconds: float) -> None:
        """Count resource time within the iteration under way."""
        self.members[member].served_s[resource] += seconds

    def iteration_done(self, member: str, busy_s: float, stage_s: Sequence[float]) -> None:
        """Count an iteration that took `busy_s` without its waits, and used each resource for `stage_s`."""
        progress = self.members.get(member)
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
        progress = self.members[member]
        furthest_s = max(other.virtual_s for other in self.members.values())
        behind_s = furthest_s - self._window_s - progress.virtual_s
        if behind_s > 0:
            progress.start_s += behind_s

    def order(self, waiting: Iterable[str], resource: int, waited_s: Mapping[str, float] | None = None) -> list[str]:
        """Return the members that wait for the resource, first the one that goes first; the smaller id on a tie.

        `waited_s` has the seconds that each has waited; members that are not in it have not.
        """
        ages, weight = waited_s or {}, self._finish_weight

        def key(member: str) -> tuple[float, int, str]:
            progress = self.members[member]
            rest_s = max(0.0, progress.expected_s[resource] - progress.served_s[resource])
            short_s = min(rest_s, LONGEST_SHORT_S)
            stands_back_s = weight * short_s + min(weight, 1.0) * (rest_s - short_s)
            lag_s = progress.virtual_s + stands_back_s - AGE_WEIGHT * ages.get(member, 0.0)
            return (lag_s, len(member), member)  # ids are numbers

        return sorted(waiting, key=key)


def smooth(before: float | None, sample: float) -> float:
    """Return the exponential mean so far, moved towards a new sample."""
    return sample if before is None else before + _NEW_SAMPLE_WEIGHT * (sample - before)


CREDIT_S: Final = 1.0
"""Most slack that counts. A member that has so much may wait for one stage of any length, or no stage longer than this
could ever begin; it then is behind until it has caught up."""

DEBT_S: Final = 10.0
"""How far behind a member counts at most. A member that validated for an hour, or whose iteration time alone is wrong,
must not go first for as long."""

LONGEST_WAIT_S: Final = 60.0
"""A member that has waited for so long within its stage goes first, whatever the minimum speeds of others."""

_GAPS: Final = 8
"""The latest times between two stages at a resource that tell when a member will come back."""

_LATE: Final = 1.5
"""A member that stays away for so many times its longest gap is not about to come."""

_LEAST_LATE_S: Final = 0.05

_LOOK_LATE_S: Final = 0.001
"""Clocks round: a look at the very end could come a moment before it, again and again."""


@dataclass(slots=True)
class _Promised:
    """The progress of a member with a minimum speed."""

    min_speed: float
    solo_s: float | None  # iteration time alone, learned from its busy times unless `known`
    known: bool
    joined_s: float  # when its session began
    since_s: float | None = None  # end of its latest iteration, or its first request; None while the script starts
    settled_s: float = 0.0  # the slack then
    busy_before_s: float = 0.0  # `busy_s` then
    waiting: int = 0  # its threads that wait for a resource
    waiting_since_s: float = 0.0
    waited_s: float = 0.0  # seconds in which a thread waited, before that
    # For each resource: end of the latest stage there, and `busy_s` then, None within a stage; seconds between two.
    left: list[tuple[float, float] | None] = field(default_factory=lambda: [None] * len(RESOURCES))
    gaps_s: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=_GAPS) for _ in RESOURCES])

    def busy_s(self, now_s: float) -> float:
        """Return the seconds since its session began in which none of its threads waited."""
        waits_s = now_s - self.waiting_since_s if self.waiting else 0.0
        return now_s - self.joined_s - self.waited_s - waits_s

    def slack_s(self, now_s: float) -> float:
        """Return how long it could wait and still have its minimum speed."""
        if self.since_s is None:
            return CREDIT_S
        done_s = self.busy_s(now_s) - self.busy_before_s
        if self.solo_s is not None:
            done_s = min(done_s, self.solo_s)
        return _bounded(self.settled_s + done_s / self.min_speed - (now_s - self.since_s))


class Promises:
    """The minimum speeds of a group's members, and how long each holds each resource at a time."""

    def __init__(self) -> None:
        self._progress: dict[str, _Promised] = {}
        self._pieces_s: dict[tuple[str, int], float] = {}

    def __bool__(self) -> bool:
        """Return whether any member has a minimum speed."""
        return bool(self._progress)

    def join(self, member: str, min_speed: float, solo_iteration_s: float | None, now_s: float) -> None:
        """Add a member; nothing is kept about one without a minimum speed (0)."""
        if min_speed > 0:
            known = solo_iteration_s is not None
            self._progress[member] = _Promised(min_speed, solo_iteration_s, known, now_s)

    def leave(self, member: str) -> None:
        """Forget a member."""
        self._progress.pop(member, None)
        self._pieces_s = {key: piece_s for key, piece_s in self._pieces_s.items() if key[0] != member}

    def asks(self, member: str, resource: int, now_s: float) -> None:
        """Note that a stage of the member asks for its resource."""
        progress = self._progress.get(member)
        if progress is not None and progress.since_s is None:
            progress.since_s, progress.busy_before_s = now_s, progress.busy_s(now_s)
        if progress is not None and (left := progress.left[resource]) is not None:
            progress.gaps_s[resource].append(progress.busy_s(now_s) - left[1])
            progress.left[resource] = None

    def leaves(self, member: str, resource: int, now_s: float) -> None:
        """Note that a stage of the member is over."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.left[resource] = (now_s, progress.busy_s(now_s))

    def begins_to_wait(self, member: str, now_s: float) -> None:
        """Note that a thread of the member waits from now on."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.waiting_since_s = progress.waiting_since_s if progress.waiting else now_s
            progress.waiting += 1

    def ends_to_wait(self, member: str, now_s: float) -> None:
        """Note that it waits no more."""
        progress = self._progress.get(member)
        if progress is not None:
            progress.waiting -= 1
            if not progress.waiting:
                progress.waited_s += now_s - progress.waiting_since_s

    def held(self, member: str, resource: int, piece_s: float) -> None:
        """Note the longest time without a yield point in which the member had the resource.

        The mean moves slowly to shorter times, at once to a longer one.
        """
        before_s = self._pieces_s.get((member, resource), 0.0)
        self._pieces_s[member, resource] = max(piece_s, smooth(before_s, piece_s))

    def iteration_done(self, member: str, busy_s: float, now_s: float) -> None:
        """Count an iteration that took `busy_s` without its waits."""
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

    def choose(
        self, order: Sequence[str], resource: int, waited_s: Mapping[str, float], now_s: float, *, may_keep: bool = True
    ) -> str | None:
        """Return the member that gets a resource; None to keep it free for one that is about to need it.

        `order` has the members that want it, in their order without minimum speeds; `waited_s` how long each of those
        that wait has done so within its stage.
        """
        starving = [member for member in order if waited_s.get(member, 0.0) >= LONGEST_WAIT_S]
        if starving:
            return max(starving, key=waited_s.__getitem__)
        slack_s = {member: float("inf") for member in order}  # of those without a minimum speed
        slack_s |= {member: self._progress[member].slack_s(now_s) for member in order if member in self._progress}
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
        """Return the seconds until `choose` has to be asked again after it has kept a resource free."""
        starved_s = now_s + LONGEST_WAIT_S - max(waited_s.values(), default=0.0)
        kept_s = self._kept_until_s(waited_s, resource, float("inf"), now_s)
        return max(0.0, min(starved_s, starved_s if kept_s is None else kept_s) - now_s) + _LOOK_LATE_S

    def _kept_until_s(self, order: Container[str], resource: int, hold_s: float, now_s: float) -> float | None:
        """Return until when a resource must not be given away for `hold_s`; None if it may be now."""
        ends_s = []
        for member, progress in self._progress.items():
            left, gaps_s = progress.left[resource], progress.gaps_s[resource]
            if member in order or left is None or not gaps_s:
                continue
            late_s = _LATE * max(gaps_s) + _LEAST_LATE_S
            away_s = progress.busy_s(now_s) - left[1]
            end_s = min(now_s + late_s - away_s, left[0] + 2 * late_s)
            comes_in_s = max(0.0, min(gaps_s) - away_s)
            slack_s = min(CREDIT_S, progress.slack_s(now_s) + (1.0 / progress.min_speed - 1.0) * comes_in_s)
            if end_s > now_s and not _bears(slack_s, hold_s - comes_in_s):
                ends_s.append(end_s)
        return min(ends_s, default=None)


def _bears(slack_s: float, wait_s: float) -> bool:
    return wait_s <= max(0.0, slack_s) or slack_s >= CREDIT_S


def _bounded(slack_s: float) -> float:
    return max(-DEBT_S, min(CREDIT_S, slack_s))
