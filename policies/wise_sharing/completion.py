"""When two jobs are done that share GPUs, and whether sharing pays.

All functions take numbers or arrays of them. A slow-down is ξ ≥ 1: how many times as long a job takes while it
shares, the reciprocal of its pair speed.

Source: SJF-BSBF, "wise resource sharing", Theorem 1. A job B joins a running job A at some time between now and A's
end. While B would end first, every second that it waits is a second lost; once A would end first, the mean of both
completion times is linear in the waiting time. So the best time is now, or after A.
"""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""One time, or one for each of several pairs."""


class Completions(NamedTuple):
    """Seconds from now until two jobs are done."""

    running_s: float
    joining_s: float

    @property
    def mean_s(self) -> float:
        """What Theorem 1 makes as small as it can be."""
        return (self.running_s + self.joining_s) / 2


def completions(
    running_s: float, joining_s: float, running_slowdown: float, joining_slowdown: float, insert_s: float = 0.0
) -> Completions:
    """When both are done if the second joins the first at a given time.

    Args:
        running_s: What the running job still needs alone.
        joining_s: What the other job needs alone.
        running_slowdown: ξ of the running job beside the other.
        joining_slowdown: ξ of the other beside the running job.
        insert_s: When it joins; 0 is now, `running_s` is after the running job.
    """
    left_s = running_s - insert_s
    shared_s = min(running_slowdown * left_s, joining_slowdown * joining_s)
    return Completions(
        insert_s + shared_s + left_s - shared_s / running_slowdown,
        insert_s + shared_s + joining_s - shared_s / joining_slowdown,
    )


def mean_now(running_s: Seconds, joining_s: Seconds, running_slowdown: Seconds, joining_slowdown: Seconds) -> Seconds:
    """Mean of both completion times if they share from now on; see `completions`."""
    shared_s = np.minimum(running_slowdown * running_s, joining_slowdown * joining_s)
    lost = 2 - 1 / running_slowdown - 1 / joining_slowdown
    mean_s: Seconds = (running_s + joining_s + shared_s * lost) / 2
    return mean_s


def mean_after(running_s: Seconds, joining_s: Seconds) -> Seconds:
    """Mean of both completion times if the second waits for the first."""
    return running_s + joining_s / 2
