"""The clock that waiting code goes by (the machine's, in tests a virtual one), points in time as texts, and units.

Units are as Slurm counts: memory in binary units, as CUDA does, too, and time limits in whole minutes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from datetime import datetime


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


def now_text() -> str:
    """The time now in UTC, to the second."""
    return text_of(time.time())


def text_of(unix_s: float, timespec: str = "seconds") -> str:
    """A time in seconds since the epoch as ISO 8601 in UTC; `timespec` as datetime.isoformat takes it."""
    from datetime import datetime, timezone  # takes time to load, and scripts need it rarely

    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec=timespec)


def moment(text: str) -> datetime | None:
    """The point in time that a text names, UTC where it names no zone; None when it names none."""
    from datetime import datetime, timezone

    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


def age(text: str, now: datetime) -> str:
    """How long ago a text's time was: "5 min", "3 h", "12 d"; "?" when it names none."""
    then = moment(text)
    if then is None:
        return "?"
    seconds = max(0.0, (now - then).total_seconds())
    for unit_s, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


KIB: Final = 2**10
"""Bytes of a KiB."""

MIB: Final = 2**20
"""Bytes of a MiB."""

GIB: Final = 2**30
"""Bytes of a GiB."""

KIB_PER_MIB: Final = 1024
MIB_PER_GIB: Final = 1024


def whole_minutes(seconds: int) -> int:
    """Return a time limit in minutes, rounded up."""
    return -(-seconds // 60)
