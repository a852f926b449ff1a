"""Keeps readings cheap: what costs more CPU time is done less often."""

import time
from typing import Final

CPU_SHARE: Final = 0.001
"""Share of one core that each kind of reading may take."""


class Throttle:
    """Says when a reading is due again, from what its last one cost.

    Args:
        least_s: Seconds between two readings, however cheap they are.
        share: Share of one core that the readings may take.
    """

    def __init__(self, least_s: float, share: float = CPU_SHARE) -> None:
        self._least_s = least_s
        self._share = share
        self._next_s = 0.0
        self._began_s = 0.0

    def due(self) -> bool:
        """Whether it is time; a reading that begins now has to end with `done`."""
        if time.perf_counter() < self._next_s:
            return False
        self._began_s = time.thread_time()
        return True

    def done(self) -> None:
        """Note that the reading ended."""
        cost_s = time.thread_time() - self._began_s
        self._next_s = time.perf_counter() + max(self._least_s, cost_s / self._share)
