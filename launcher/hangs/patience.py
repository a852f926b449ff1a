"""For how long something has not moved, counted so that a pause of the machine or of the watcher is no evidence."""

import time
from collections.abc import Callable, Mapping
from typing import Final

from muri.launcher.durations import seconds_of
from muri.launcher.hangs.evidence import Look

HANG_TIMEOUT_VARIABLE: Final = "MURI_HANG_TIMEOUT_S"
HANG_TIMEOUT_S: Final = 900.0

IDLE_SHARE: Final = 0.0002
"""Who uses less of a core than this does not work: a progress bar's thread and a loop that asks every few seconds
whether a dead worker has sent something use a tenth of it; a download of 15 KB a second uses it up."""

_SLACK_NS: Final = 2_000_000


def interval_of(timeout_s: float) -> float:
    """Seconds between two looks for a timeout; 0 is none."""
    return min(5.0, timeout_s / 10) if timeout_s else 5.0


def hang_timeout_s(environment: Mapping[str, str], default_s: float = HANG_TIMEOUT_S) -> float:
    """After how many seconds without a sign of life a member is ended; 0: never.

    Raises:
        UsageError: $MURI_HANG_TIMEOUT_S is not a number of seconds.
    """
    return seconds_of(environment, HANG_TIMEOUT_VARIABLE, default_s, zero="to wait for ever")


class Patience:
    """Adds up for how long what is looked at has been still.

    Only time that was watched counts: however long after the last look one comes, it adds at most twice the
    interval. A machine that was suspended, or so busy that the watcher did not run, makes nothing look still.

    Args:
        interval_s: Seconds between two looks.
        now: Clock in seconds.
    """

    def __init__(self, interval_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._now = now
        self._since: object = None
        self._cpu_ns = 0
        self._looked_s = 0.0
        self._still_s = 0.0

    def still_s(self, look: Look, state: object = True) -> float:
        """Seconds since the last sign of life, 0 if there is one now.

        Args:
            look: What was seen.
            state: What else must stay equal, for example how many iterations were done.
        """
        now_s = self._now()
        watched_s = min(now_s - self._looked_s, 2 * self._interval_s)
        self._looked_s = now_s
        used_ns, allowed_ns = look.cpu_ns - self._cpu_ns, IDLE_SHARE * 1e9 * (self._still_s + watched_s) + _SLACK_NS
        if look.at_work or state != self._since or not 0 <= used_ns <= allowed_ns:
            self._since, self._cpu_ns, self._still_s = state, look.cpu_ns, 0.0
        else:
            self._still_s += watched_s
        return self._still_s
