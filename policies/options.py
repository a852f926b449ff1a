"""The options that every policy understands."""

import math
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Final

from muri.errors import UsageError

MAX_GROUP_SIZE: Final = 4  # Most jobs that can interleave: one for each resource
ORDERINGS: Final = ("best", "worst")
MATCHINGS: Final = ("certified", "rustworkx", "networkx", "priority-order")
GROUPINGS: Final = ("rounds", "optimal")
MERGES: Final = ("as-needed", "whole-rounds")
OBJECTIVES: Final = ("efficiency", "throughput", "jct")
SPEED_MODELS: Final = ("lockstep", "fair", "measured", "reference")
MECHANISMS: Final = ("tune", "proportional", "greedy")  # How Synergy gives out CPUs and memory
ORDERS: Final = ("fifo", "srtf", "las", "ftf")  # Synergy: who goes first


class OptionsError(UsageError):
    """A policy option has a value that the policy doesn't know."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How a policy groups and how long it may hold a job.

    Attributes:
        max_group_size: Largest group, 1 (no sharing) to 4.
        ordering: "best" takes the ordering with the shortest period, "worst" the longest (Muri, section 6.4).
        grouping: "rounds" is Algorithm 1 (rounds of pairwise matching), "optimal" chooses among all groups at once.
        matching: How Algorithm 1 finds its pairs: "certified" (fast, with a proven bound), "rustworkx" (compiled
            Blossom), "networkx" (the readable reference) or "priority-order" (neighbors in the queue, no Blossom).
        merge: "as-needed" merges no more pairs than it takes to fit the free GPUs, "whole-rounds" all pairs of a round,
            as the paper does.
        objective: Maximized by a grouping: "efficiency" (γ, the paper's), "throughput" (sum of normalized speeds) or
            "jct" (speeds weighted by the worth of finishing a job sooner).
        speed_model: "lockstep" (Eq. 3), "fair" (work-conserving), "measured" (pairwise interference table) or
            "reference" (the public simulator's formula).
        preemption: Whether running jobs that can be preempted compete with the waiting ones.
        max_wait_s: Seconds since its submission after which a job that would still wait is given to Slurm's own queue.
        certify: Whether the groups of Algorithm 1 come with a bound from a linear program. Without it the bound is only
            what all jobs would be worth at full speed.
        min_speedup: How many times the work of its faster half a merged group must do in the same time.
        join: Whether waiting jobs may join running groups.
        min_speed: Minimum speed of a member, 1 = as fast as alone; a job's own minimum counts if it is higher.
        mechanism: Synergy: "tune" shares CPUs and memory out by demand, "proportional" by GPUs, "greedy" gives each job
            its whole demand or lets it wait.
        order: Synergy: who goes first, by submit time ("fifo"), remaining time ("srtf"), attained time ("las") or
            finish-time fairness ("ftf").
        queue_limits_gpu_s: Tiresias: attained GPU-seconds at which a job leaves each queue; ascending.
        promote_after: Tiresias: a job that has waited more than this many times the seconds of service it has received
            goes back to the first queue; infinite turns promotion off.
        service_history_gpu_s: Gittins: total GPU-seconds of jobs that have ended; empty when there are none.
        horus_memory_weight: Horus: ω1, the cost of a GPU full of memory.
        horus_slowdown_weight: Horus: ω2, the cost of a slow-down by a factor of one.
        horus_jobs_per_round: Horus: β, how many waiting jobs of a partition a round tries to place.
        horus_queues: Horus-F: k, the number of queues of like jobs.
    """

    max_group_size: int = MAX_GROUP_SIZE
    ordering: str = "best"
    grouping: str = "rounds"
    matching: str = "certified"
    merge: str = "as-needed"
    objective: str = "efficiency"
    speed_model: str = "lockstep"
    preemption: bool = True
    max_wait_s: float = 86_400.0
    min_speedup: float = 1.0
    join: bool = True
    min_speed: float = 0.0
    certify: bool = True
    mechanism: str = "tune"
    order: str = "fifo"
    queue_limits_gpu_s: tuple[float, ...] = (3250.0, 7200.0)
    promote_after: float = 8.0
    service_history_gpu_s: tuple[float, ...] = ()
    horus_memory_weight: float = 0.5
    horus_slowdown_weight: float = 0.5
    horus_jobs_per_round: int = 32
    horus_queues: int = 3

    def __post_init__(self) -> None:
        """Refuse values that no policy understands.

        Raises:
            OptionsError: Names the option, its value and the valid ones.
        """
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind in _KINDS and not _is_a(kind, value):
                raise OptionsError(f"{field.name} is {value!r}; it must be {_KINDS[kind]}")
        for option, choices in _CHOICES.items():
            value = getattr(self, option)
            if value not in choices:
                raise OptionsError(f"{option} is {value!r}; valid are: {', '.join(choices)}")
        limits, history = (0.0, *self.queue_limits_gpu_s, math.inf), self.service_history_gpu_s
        for option, holds, rule in (
            ("max_group_size", 1 <= self.max_group_size <= MAX_GROUP_SIZE, f"1 to {MAX_GROUP_SIZE}"),
            ("max_wait_s", self.max_wait_s >= 0, "≥ 0 seconds"),
            ("min_speedup", 1 <= self.min_speedup <= MAX_GROUP_SIZE, f"1 to {MAX_GROUP_SIZE}"),
            ("min_speed", 0 <= self.min_speed < 1, "≥ 0 and < 1"),
            ("queue_limits_gpu_s", all(low < high for low, high in pairwise(limits)), "ascending, finite and > 0"),
            ("promote_after", self.promote_after > 0, "> 0 (.inf: no promotion)"),
            ("service_history_gpu_s", all(0 < total < math.inf for total in history), "finite GPU-seconds > 0"),
            ("horus_memory_weight", 0 <= self.horus_memory_weight < math.inf, "finite and ≥ 0"),
            ("horus_slowdown_weight", 0 <= self.horus_slowdown_weight < math.inf, "finite and ≥ 0"),
            ("horus_jobs_per_round", self.horus_jobs_per_round >= 1, "a whole number ≥ 1"),
            ("horus_queues", self.horus_queues >= 1, "a whole number ≥ 1"),
        ):
            if not holds:
                raise OptionsError(f"{option} is {getattr(self, option)}; it must be {rule}")
        if not self.horus_memory_weight + self.horus_slowdown_weight:
            raise OptionsError("horus_memory_weight and horus_slowdown_weight are both 0; one must be > 0")


_CHOICES: Final = {
    "ordering": ORDERINGS,
    "grouping": GROUPINGS,
    "matching": MATCHINGS,
    "merge": MERGES,
    "objective": OBJECTIVES,
    "speed_model": SPEED_MODELS,
    "mechanism": MECHANISMS,
    "order": ORDERS,
}

_KINDS: Final = {
    bool: "true or false",
    int: "a whole number",
    float: "a number (.inf: infinite)",
    tuple: "a list of numbers, like [3250, 7200]",
}


def _is_a(kind: type, value: Any) -> bool:
    """Whether a value may stand where the default is of this type; whole numbers are numbers, truth values are not."""
    if kind is tuple:
        return isinstance(value, tuple) and all(_is_a(float, item) for item in value)
    if kind is bool:
        return isinstance(value, bool)
    return not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
