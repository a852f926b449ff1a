"""When two jobs are done that share GPUs, and whether sharing pays.

All functions take numbers or arrays of them. A slow-down is ξ ≥ 1: how many times as long a job takes while it
shares, the reciprocal of its pair speed.

Source: SJF-BSBF, "wise resource sharing", Theorem 1. A job B joins a running job A at some time between now and A's
end. While B would end first, every second that it waits is a second lost; once A would end first, the mean of both
completion times is linear in the waiting time. So the best time is now, or after A.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""One time, or one for each of several pairs."""


def mean_now(running_s: Seconds, joining_s: Seconds, running_slowdown: Seconds, joining_slowdown: Seconds) -> Seconds:
    """Mean of both completion times if they share from now on."""
    shared_s = np.minimum(running_slowdown * running_s, joining_slowdown * joining_s)
    lost = 2 - 1 / running_slowdown - 1 / joining_slowdown
    mean_s: Seconds = (running_s + joining_s + shared_s * lost) / 2
    return mean_s


def mean_after(running_s: Seconds, joining_s: Seconds) -> Seconds:
    """Mean of both completion times if the second waits for the first."""
    return running_s + joining_s / 2
