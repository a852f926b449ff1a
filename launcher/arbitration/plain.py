"""Plain sharing: members run side by side as if each had the resources to itself, and the hardware decides."""

import time

from muri.launcher.arbitration.arbiter import Arbiter, Clock, WaitInterruptedError


class PlainArbiter(Arbiter):
    """Grants every resource at once, to several members too: nobody waits and nobody holds anything.

    For members that were measured to get on well so (SJF-BSBF shares GPUs in this way).

    Args:
        now: Clock in seconds.
    """

    discipline = "plain"
    takes_turns = False

    def __init__(self, now: Clock = time.perf_counter) -> None:
        super().__init__(now)
        self._members: set[str] = set()

    def join(self, member: str, solo_iteration_s: float | None = None) -> None:
        """Let the member in."""
        with self._mutex:
            self._members.add(member)

    def leave(self, member: str) -> None:
        """Grant it nothing any more."""
        with self._mutex:
            self._members.discard(member)

    def acquire(self, member: str, resource: int) -> float:
        """Go on at once, whoever else is at the resource."""
        with self._mutex:
            if member not in self._members:
                raise WaitInterruptedError(member)
        return 0.0

    def release(self, member: str, resource: int) -> None:
        """Nobody waits for it."""

    def interrupt(self, member: str) -> None:
        """It does not wait."""
