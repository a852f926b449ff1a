"""When two jobs are done of which one joins the other at any time: what Theorem 1 of SJF-BSBF is checked against."""

from typing import NamedTuple


class Completions(NamedTuple):
    """Seconds from now until two jobs are done."""

    running_s: float
    joining_s: float

    @property
    def mean_s(self):
        """What Theorem 1 makes as small as it can be."""
        return (self.running_s + self.joining_s) / 2


def completions(running_s, joining_s, running_slowdown, joining_slowdown, insert_s=0.0):
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
