"""Which resource owns the time, where a job uses several at once (Muri, section 4.2). Pure.

At each instant the resource with the highest normalised use owns the time. Use below a threshold counts as none.
The thread that runs the training loop does one thing at a time: what it holds, innermost stage first, is in full
use and wins over work that goes on hidden behind it, in threads that prefetch or in workers. While it only waits, the
hidden work owns the time; resources in equal use share it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from muri.profiler.records import STAGES

USE_THRESHOLD: Final = 0.05
_EQUAL: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in which one thread or process of a job used a resource.

    Attributes:
        stage: Index into `STAGES` of the stage that stands for the resource.
        start_s: Begin, on the clock `time.perf_counter`.
        end_s: End.
        use: Share of the resource's peak, 0 to 1.
        own: Whether the thread that runs the loop did it.
    """

    stage: int
    start_s: float
    end_s: float
    use: float = 1.0
    own: bool = False


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where the time of one window went, in the order of `STAGES`.

    Attributes:
        owned_s: Seconds that each resource owned; together at most the window.
        busy_s: Seconds in which each was used, also while another one owned the time.
    """

    owned_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def attribute(
    intervals: Iterable[Interval], start_s: float, end_s: float, threshold: float = USE_THRESHOLD
) -> Attribution:
    """Attribute the time from `start_s` to `end_s`.

    Args:
        intervals: Of all threads and processes of the job; what lies outside of the window is left out.
        start_s: Begin of the window.
        end_s: Its end.
        threshold: Use below it counts as none.
    """
    events: list[tuple[float, int, Interval]] = []
    for interval in intervals:
        begin_s, until_s = max(interval.start_s, start_s), min(interval.end_s, end_s)
        if begin_s < until_s:
            events += [(begin_s, 1, interval), (until_s, 0, interval)]
    events.sort(key=lambda event: event[:2])
    owned_s, busy_s = [0.0] * len(STAGES), [0.0] * len(STAGES)
    now_s, going = start_s, _Going()
    for at_s, begins, interval in events:
        if at_s > now_s:
            _count(going.uses(), at_s - now_s, threshold, owned_s, busy_s)
            now_s = at_s
        going.change(interval, begins=bool(begins))
    return Attribution(tuple(owned_s), tuple(busy_s))


class _Going:
    """What is under way at one instant."""

    def __init__(self) -> None:
        self._own: list[Interval] = []
        self._hidden: list[Interval] = []

    def change(self, interval: Interval, *, begins: bool) -> None:
        """An interval begins or ends."""
        group = self._own if interval.own else self._hidden
        if begins:
            group.append(interval)
        else:
            group.remove(interval)

    def uses(self) -> tuple[list[float], int | None]:
        """Use of each resource, and what the loop's thread holds."""
        use = [0.0] * len(STAGES)
        for interval in self._hidden:
            use[interval.stage] = min(1.0, use[interval.stage] + interval.use)
        if not self._own:
            return use, None
        innermost = max(self._own, key=lambda interval: interval.start_s).stage
        use[innermost] = 1.0
        return use, innermost


def _count(
    going: tuple[list[float], int | None], length_s: float, threshold: float, owned_s: list[float], busy_s: list[float]
) -> None:
    """Count a time in which nothing changes."""
    use, held = going
    for stage, share in enumerate(use):
        if share >= threshold:
            busy_s[stage] += length_s
    if held is not None:
        owned_s[held] += length_s
        return
    highest = max(use)
    if highest >= threshold:
        owners = [stage for stage, share in enumerate(use) if highest - share <= _EQUAL]
        for stage in owners:
            owned_s[stage] += length_s / len(owners)
