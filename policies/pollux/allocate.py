"""How many GPUs each job gets: greedily the next GPUs to whom they help most. Pure.

Pollux searches allocations with a genetic algorithm; with the fitness's power at −1, where every job has less and less
use for more GPUs, giving each next GPU to the job that it helps most comes to the same, and is deterministic and fast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

STARVED: Final = 1e-3
"""Speed-up that counts for a job without GPUs: so little that first of all everybody gets some."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A job that GPUs can be given to.

    Attributes:
        weight: What its speed-up counts for, > 0.
        speedup: By GPU count that it may have: how fast it gets on, relative to a fair share. What a restart
            loses is taken off wherever the count means one.
        held: GPUs that it has now; 0 for a waiting job.
    """

    weight: float
    speedup: Mapping[int, float]
    held: int = 0

    def cost(self, gpu_count: int) -> float:
        """What it takes away from fitness with so many GPUs: weight over speed-up."""
        return self.weight / max(self.speedup.get(gpu_count, STARVED), STARVED)


def fitness(applicants: Sequence[Applicant], counts: Sequence[int]) -> float:
    """Weighted power mean of the speed-ups with power p = −1, Pollux's default.

    Source: Pollux, section 4.2.1, eq. 14.
    """
    weights = sum(applicant.weight for applicant in applicants)
    costs = sum(applicant.cost(count) for applicant, count in zip(applicants, counts, strict=True))
    return weights / costs if costs else 0.0


def allocate(applicants: Sequence[Applicant], gpu_count: int) -> tuple[int, ...]:
    """GPU count of each job, 0 for one that waits.

    All GPUs are given out afresh, and only those that nobody holds; the better of the two counts.

    Args:
        applicants: The most urgent first: when GPUs are fewer than jobs, the first ones get them.
        gpu_count: GPUs that they hold or that are free.
    """
    held = [applicant.held for applicant in applicants]
    stay = _hand_out(applicants, held, gpu_count - sum(held))
    afresh = _hand_out(applicants, [0] * len(applicants), gpu_count)
    return afresh if fitness(applicants, afresh) > fitness(applicants, stay) else stay


def _hand_out(applicants: Sequence[Applicant], counts: Sequence[int], free: int) -> tuple[int, ...]:
    """First the least that each can do with, then GPU by GPU to whom they help most."""
    given = list(counts)
    for index, applicant in enumerate(applicants):
        least = min(applicant.speedup, default=0)
        if not given[index] and least <= free:
            given[index] = least
            free -= least
    jumps = [jump for index, count in enumerate(given) if count and (jump := _jump(applicants, index, count, free))]
    heapify(jumps)
    while jumps:
        _, index, target = heappop(jumps)
        more = target - given[index]
        if more <= free:
            free -= more
            given[index] = target
        following = _jump(applicants, index, given[index], free)
        if following is not None:
            heappush(jumps, following)
    return tuple(given)


def _jump(applicants: Sequence[Applicant], index: int, count: int, free: int) -> tuple[float, int, int] | None:
    """The step up, among those that free GPUs allow, that gains most for each GPU; smallest first in a heap."""
    applicant = applicants[index]
    now = applicant.cost(count)
    steps = [
        ((applicant.cost(target) - now) / (target - count), index, target)
        for target in applicant.speedup
        if count < target <= count + free
    ]
    best = min(steps, default=None)
    return best if best is not None and best[0] < 0 else None
