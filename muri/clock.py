"""The clock that code which waits goes by: the machine's own, or in tests a virtual one."""

from __future__ import annotations

import threading
import time
from typing import Final


class Clock:
    """The machine's time and the primitives that threads wait with; tests use a virtual one."""

    def __call__(self) -> float:
        """Seconds since an arbitrary moment, the same for all processes of a machine."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        time.sleep(seconds)

    def lock(self) -> threading.Lock:
        """A new lock, unlocked."""
        return threading.Lock()

    def condition(self, lock: threading.Lock) -> threading.Condition:
        """A new condition of a lock."""
        return threading.Condition(lock)


MACHINE_CLOCK: Final = Clock()
