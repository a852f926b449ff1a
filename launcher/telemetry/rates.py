"""What a member's iterations say about its speed: rates, shares of time, and speed against running alone."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Final

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.clock import IterationRecord
from muri.profiler.records import RESOURCES, STAGES

WINDOW_S: Final = 30.0
"""Iterations of that last stretch are counted for the rate."""

LEAST_ITERATIONS: Final = 20
"""With fewer in the window, the rate comes from the lengths of the last iterations."""


@dataclass(slots=True)
class SpeedMeter:
    """Iterations per second of one session, from looking at its count now and then.

    A session that stalls slows down at once, although no iteration ends that would say so.
    """

    _looks: deque[tuple[float, int]] = field(default_factory=deque)
    _changed_s: float = 0.0

    def look(self, now_s: float, iterations: int) -> None:
        """Note the count of iterations.

        Args:
            now_s: A monotonic clock.
            iterations: Iterations of the session so far.
        """
        if not self._looks or iterations != self._looks[-1][1]:
            self._changed_s = now_s
        self._looks.append((now_s, iterations))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()

    def per_s(self, records: Sequence[IterationRecord]) -> float | None:
        """Iterations per second; None before the first iteration ended.

        Args:
            records: The session's last iterations.
        """
        if not self._looks or not records:
            return None
        (since_s, before), (now_s, count) = self._looks[0], self._looks[-1]
        if count - before >= LEAST_ITERATIONS and now_s > since_s:
            return (count - before) / (now_s - since_s)
        total_s = sum(record.iteration_s for record in records)
        stalled_s = now_s - self._changed_s
        if stalled_s > 2 * total_s / len(records):
            total_s += stalled_s
        return len(records) / total_s if total_s > 0 else None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is known of a member beforehand.

    Attributes:
        solo_iteration_s: Seconds of an iteration when alone, None when not known.
        predicted_speed: Speed that the plan expects, 1 = as fast as alone; None when not known.
    """

    solo_iteration_s: float | None = None
    predicted_speed: float | None = None


def speed_of(
    rate_per_s: float | None, records: Sequence[IterationRecord], solo_iteration_s: float | None
) -> float | None:
    """Normalized speed: iterations × iteration time alone / elapsed; 1 = as fast as alone.

    Args:
        rate_per_s: Iterations per second, None when not known.
        records: The last iterations; their time without waits stands in for an unknown time alone.
        solo_iteration_s: Seconds of an iteration when alone, None when not known.
    """
    if rate_per_s is None:
        return None
    if solo_iteration_s is None:
        if not records:
            return None
        solo_iteration_s = sum(record.busy_s for record in records) / len(records)
    return rate_per_s * solo_iteration_s


def shares_of(records: Sequence[IterationRecord]) -> dict[str, float]:
    """Shares of the last iterations' time: one for each stage, "wait" for tokens, and "other"."""
    total_s = sum(record.iteration_s for record in records)
    if total_s <= 0:
        return {}
    held = {stage: sum(record.stage_s[i] for record in records) / total_s for i, stage in enumerate(STAGES)}
    wait = sum(sum(record.wait_s) for record in records) / total_s
    rest = max(0.0, 1.0 - wait - sum(held.values()))
    return {name: round(share, 4) for name, share in (held | {"wait": wait, "other": rest}).items()}


def group_status(
    arbiter: Arbiter | None, discipline: str, members: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """The status file's content but for what identifies the runtime.

    Args:
        arbiter: Who passes the resources on; None before there is one.
        discipline: What stands for its discipline then.
        members: Each member's part.
    """
    holders = [None] * len(RESOURCES) if arbiter is None else arbiter.holders()
    speeds = [speed for member in members.values() if isinstance(speed := member["speed"], float)]
    return {
        "updated": utc_now(),
        "discipline": discipline if arbiter is None else arbiter.discipline,
        "disciplines": [asdict(change) for change in arbiter.history] if isinstance(arbiter, SwitchingArbiter) else [],
        "total_speed": sum(speeds) if speeds else None,
        "resources": _resources(members, holders),
        "members": members,
    }


def _resources(members: Mapping[str, Mapping[str, object]], holders: Sequence[str | None]) -> dict[str, object]:
    shares = [share for member in members.values() if isinstance(share := member["share"], dict)]
    busy = [min(1.0, sum(share.get(stage, 0.0) for share in shares)) for stage in STAGES]
    return {
        resource: {"holder": holder, "busy": round(share, 4)}
        for resource, holder, share in zip(RESOURCES, holders, busy, strict=True)
    }


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
