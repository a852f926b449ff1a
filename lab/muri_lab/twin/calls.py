"""Faults of the controller's calls to Slurm: it dies before or after one, or the answer is not what happened."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records.cluster import Snapshot, Unreadable
from muri_lab.twin.stage import Stage
from muri_lab.twin.story import Fault

_TIMEOUT_S: Final = 30.0
_STOPPED_S: Final = 20.0
_CALLS_AHEAD: Final = 6


class Killed(BaseException):
    """The controller's process dies here: nothing after this line runs."""


class Calls:
    """Makes the controller's calls, and lets faults meet them."""

    def __init__(self, stage: Stage, hit: Callable[[Fault, str], None]) -> None:
        self._stage = stage
        self._hit = hit
        self._armed: list[tuple[Fault, int]] = []
        self._previous: Snapshot | None = None
        self._previous_s = 0.0
        self._within_second = False
        self._extended = self._changed = False

    def begin_cycle(self) -> None:
        """Let a cycle begin."""
        self._extended = self._changed = False

    @property
    def armed(self) -> bool:
        """Whether faults wait for a call."""
        return bool(self._armed)

    def arm(self, fault: Fault) -> None:
        """Let a fault meet one of the next calls."""
        self._armed.append((fault, fault.which % _CALLS_AHEAD))

    def disarm(self) -> None:
        """Let no fault meet any call."""
        self._armed.clear()

    def around(self, name: str, act: Callable[[], Any]) -> Any:
        """Make a call."""
        fault = self._due(name)
        if fault is None:
            return self._seen(name, act())
        self._hit(fault, f"at {name}")
        if self._extended or name == "extend_lease":  # that comes last in a cycle
            self._stage.watch.succeeded_s = self._stage.twin.time.now_s
        before = _BEFORE.get(fault.kind)
        if before is not None:
            before(self, name)
        if fault.kind == "stale snapshot":
            fresh, old = act(), self._previous
            # No controller can know of changes by users after its look at the queue. And slurmctld never
            # tells a controller of a time before the changes that the same cycle has made, and it has confirmed.
            is_knowable = self._previous_s >= self._stage.changed_s and not self._changed
            return old if old is not None and is_knowable else fresh
        result = self._seen(name, act())
        after = _AFTER.get(fault.kind)
        return result if after is None else after(self, name, fault, result)

    def _due(self, name: str) -> Fault | None:
        """The armed fault whose call has come."""
        if not self._armed or self._within_second:
            return None
        fault, ahead = self._armed[0]
        if ahead > 0:
            self._armed[0] = fault, ahead - 1
            return None
        if fault.kind in _AT_SNAPSHOTS and name != "snapshot":
            return None
        del self._armed[0]
        return fault

    def _seen(self, name: str, result: Any) -> Any:
        self._extended |= name == "extend_lease"
        self._changed |= name not in _READS
        if name == "snapshot" and isinstance(result, Snapshot) and not self._within_second:
            self._previous, self._previous_s = result, self._stage.twin.time.now_s
        return result

    def _dies(self, name: str) -> None:
        raise Killed

    def _fails(self, name: str) -> None:
        raise GatewayError(f"cannot {name}: Slurm temporarily unable to accept job, sleeping and retrying")

    def _times_out(self, name: str) -> None:
        self._stage.twin.time.sleep(_TIMEOUT_S)
        raise SlurmUnreachableError(f"cannot {name}: Socket timed out on send/recv operation")

    def _meets_second(self, name: str) -> None:
        self._within_second = True
        try:
            self._stage.second_controller()
        finally:
            self._within_second = False

    def _dies_after(self, name: str, fault: Fault, result: Any) -> Any:
        raise Killed

    def _fails_after(self, name: str, fault: Fault, result: Any) -> Any:
        raise SlurmUnreachableError(f"cannot {name}: Zero Bytes were transmitted or received")

    def _stops(self, name: str, fault: Fault, result: Any) -> Any:
        twin = self._stage.twin
        twin.stop.set()
        twin.time.after(_STOPPED_S, twin.stop.clear)
        return result

    def _loses_jobs(self, name: str, fault: Fault, result: Any) -> Any:
        """The same snapshot without some jobs, whose records could not be read."""
        lost = {job.job_id for job in result.jobs if (job.job_id * 7919 + fault.which) % 3 == 0}
        unreadable = tuple(Unreadable(job_id, "its record is damaged") for job_id in sorted(lost))
        return replace(result, jobs=tuple(job for job in result.jobs if job.job_id not in lost), unreadable=unreadable)


_BEFORE: Final[dict[str, Callable[[Calls, str], None]]] = {
    "controller killed before a call": Calls._dies,
    "call fails": Calls._fails,
    "call times out": Calls._times_out,
    "second controller": Calls._meets_second,
}

_AFTER: Final[dict[str, Callable[[Calls, str, Fault, Any], Any]]] = {
    "controller killed after a call": Calls._dies_after,
    "call takes effect and fails": Calls._fails_after,
    "partial snapshot": Calls._loses_jobs,
    "controller told to stop": Calls._stops,
}

_READS: Final = frozenset({"snapshot", "queue"})
_AT_SNAPSHOTS: Final = frozenset({"stale snapshot", "partial snapshot", "second controller"})
"""A second controller has files of its own: no lock keeps it out. Between a snapshot and later calls it would look like
an administrator who changes jobs; that is not tried.
"""

AT_CALLS: Final = frozenset({*_BEFORE, *_AFTER, "stale snapshot"})  # Kinds of faults that meet a call
