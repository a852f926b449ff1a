"""Applies a cycle's actions one by one, and tells what did not fit into the cycle's budget."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.slurm_plugin.gateway.base import JobGateway
from muri.slurm_plugin.planning.actions import (
    Action,
    Join,
    Preempt,
    ReleaseSolo,
    ResumeGroup,
    StartDryRun,
    StartGroup,
    started,
)
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob


class CycleCutShortError(MuriError):
    """Nothing more is done in this cycle; what was begun stands in the journal, and the next one resumes."""


class StopFlag(Protocol):
    """The part of threading.Event that says when to stop."""

    def is_set(self) -> bool:
        """Whether to stop now."""
        ...


class InterruptibleGateway:
    """Passes calls on, and refuses those that change something once it is time to end."""

    def __init__(
        self,
        gateway: JobGateway,
        stop: StopFlag,
        limit_s: float,
        clock: Clock = MACHINE_CLOCK,
        most_calls: float = math.inf,
    ) -> None:
        self._gateway = gateway
        self._stop = stop
        self._limit_s = limit_s
        self._clock = clock
        self._end_s = clock() + limit_s
        self._most_calls = most_calls
        self.calls = 0  # That change something and were passed on

    def require_room(self) -> None:
        """Make sure that there is time, and a call left, for another action, which may take more calls.

        Raises:
            CycleCutShortError: There is not.
        """
        self._require_time()
        if self.calls >= self._most_calls:
            raise CycleCutShortError(f"the budget of {self._most_calls:g} calls is used up")

    def _require_time(self) -> None:
        if self._stop.is_set():
            raise CycleCutShortError("the controller was told to stop")
        if self._clock() > self._end_s:
            raise CycleCutShortError(f"its {self._limit_s:g} s are over")

    def in_time(self) -> JobGateway:
        """Return the way to Slurm, for one call.

        Raises:
            CycleCutShortError: It is time to end.
        """
        self._require_time()
        self.calls += 1
        return self._gateway

    def submit(self, job: NewJob) -> int:
        """Submit a batch job as its user and return its id."""
        return self.in_time().submit(job)

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a job."""
        self.in_time().modify(job_id, change)

    def split_tasks(self, job: Job, tasks: Sequence[int]) -> None:
        """Give some of a job array's waiting tasks records of their own."""
        self.in_time().split_tasks(job, tasks)

    def hold(self, job_id: int) -> None:
        """Hold a pending job."""
        self.in_time().hold(job_id)

    def release(self, job_id: int) -> None:
        """Release a held job."""
        self.in_time().release(job_id)

    def requeue(self, job_id: int) -> None:
        """End a running job and put it back into the queue."""
        self.in_time().requeue(job_id)

    def requeue_hold(self, job_id: int) -> None:
        """End a running job, put it back into the queue and hold it."""
        self.in_time().requeue_hold(job_id)

    def cancel(self, job_id: int) -> None:
        """Cancel a job."""
        self.in_time().cancel(job_id)

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        """Return the environment that a pending job was submitted with, None when it cannot be read."""
        return self.in_time().job_environment(job_id)


_KINDS: Final[Mapping[type[Action], str]] = {
    StartGroup: "start", ResumeGroup: "start", ReleaseSolo: "start", Join: "join", StartDryRun: "dry run",
    Preempt: "stop",
}  # fmt: skip
"""What people call an action; all others are repairs."""


@dataclass(frozen=True, slots=True)
class Left:
    """The actions that are left for the next cycle."""

    actions: tuple[Action, ...] = ()  # In their order; the first may be half done
    why: str = ""  # Such as a budget that is used up

    def __str__(self) -> str:
        """Such as "312 starts and 1 join are left for the next cycle: …"."""
        counts = Counter(_KINDS.get(type(action), "repair") for action in self.actions)
        *first, last = (f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items())
        what = f"{', '.join(first)} and {last}" if first else last
        return f"{what} {'is' if len(self.actions) == 1 else 'are'} left for the next cycle: {self.why}"

    def notes(self) -> dict[int, str]:
        """Return what to tell the jobs whose start is left, by job id."""
        return dict.fromkeys(sorted(started(self.actions)), f"its start is left for the next cycle: {self.why}")


def apply(actions: Sequence[Action], carry_out: Callable[[Action], None], gateway: InterruptibleGateway) -> Left:
    """Carry out actions in their order until it is time to end; return those that are left."""
    for position, action in enumerate(actions):
        try:
            gateway.require_room()
            carry_out(action)
        except CycleCutShortError as error:
            return Left(tuple(actions[position:]), str(error))
    return Left()
