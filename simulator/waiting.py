"""The jobs that wait, and which of them a plan has to look at.

A plan of the common cycle (`muri.policies.cycle`) never reaches the end of a long queue. Of the jobs of one GPU
count g, it selects the most urgent ones until groups of k fill the cluster, and then starts alone what still
fits. Both go by rank and stop at the first job of that GPU count that finds no place; so with G GPUs at most
k·⌊G/g⌋ are selected and at most ⌊G/g⌋ started beside them, and the waiting jobs behind the first (k + 1)·⌊G/g⌋ of
their GPU count change nothing but how many others the reasons speak of. They are left out.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Final

from muri.policies.cycle.queue import full_key, waited_s
from muri.policies.hybrid.policy import MuriHybrid
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.schedulers.muri import Auto
from muri.policies.types import PlanJob, PlanRequest, Policy
from muri.simulator.state import LiveJob

_TIMELESS: Final = frozenset(
    {"auto", "muri-s", "muri-l", "muri-jct", "muri-hybrid", "fifo", "sjf", "srtf", "srsf", "las", "2d-las"}
)
"""Policies whose order of waiting jobs does not change while they wait."""

_COMMON_CYCLE: Final = (QueuePolicy.plan, Auto.plan, MuriHybrid.plan)

Key = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How much of the queue a policy has to see.

    Attributes:
        per_slot: Jobs of one GPU count for each set of that many GPUs; None: the whole queue.
        timeless: Whether the order among waiting jobs never changes.
        max_wait_s: The aging bound.
        key: Order of priority for a request; None where the whole queue is seen.
    """

    per_slot: int | None = None
    timeless: bool = False
    max_wait_s: float = float("inf")
    key: Callable[[PlanRequest], PriorityKey] | None = None


def view_of(policy: Policy, *, whole: bool = False) -> View:
    """What a policy has to see; everything, unless it is known to plan by the common cycle.

    Args:
        policy: The policy.
        whole: Whether to show it everything anyway.
    """
    if whole or not isinstance(policy, QueuePolicy) or type(policy).plan not in _COMMON_CYCLE:
        return View()
    rules = policy.rules
    endless = rules.max_wait_s == float("inf")
    return View(rules.max_group_size + 1, endless and policy.name in _TIMELESS, rules.max_wait_s, policy.key)


class WaitingJobs:
    """The queue.

    Args:
        view: How much of it the policy has to see.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._jobs: dict[int, LiveJob] = {}
        self._sorted: dict[int, list[tuple[Key, LiveJob]]] = {}
        self._keys: dict[int, Key] = {}
        self._key: PriorityKey | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._jobs)

    def __iter__(self) -> Iterable[LiveJob]:
        """Those who wait, in the order in which they began to."""
        return iter(self._jobs.values())

    def add(self, live: LiveJob) -> None:
        """A job begins to wait; what policies see of it is up to date."""
        assert live.as_waiting is not None
        self._jobs[live.job.job_id] = live
        if self._view.timeless:
            key = self._fixed_key(live.as_waiting)
            self._keys[live.job.job_id] = key
            insort(self._sorted.setdefault(live.job.gpu_count, []), (key, live))

    def remove(self, live: LiveJob) -> None:
        """A job ends its wait."""
        del self._jobs[live.job.job_id]
        if self._view.timeless:
            ranked = self._sorted[live.job.gpu_count]
            key = self._keys.pop(live.job.job_id)
            del ranked[bisect_left(ranked, key, key=lambda item: item[0])]

    def reduce(self, request: PlanRequest, gpu_count: int) -> PlanRequest:
        """The request with the waiting jobs that matter to it.

        Args:
            request: What the policy is asked, but for the waiting jobs.
            gpu_count: GPUs of the nodes on which jobs may start; larger jobs wait for more of them.
        """
        if self._view.per_slot is None:
            return replace(request, jobs=tuple([job for job in self._seen() if job.gpu_count <= gpu_count]))
        ranked = self._sorted if self._view.timeless else self._ranked_now(request, gpu_count)
        jobs: list[PlanJob] = []
        for size in sorted(ranked):
            limit = self._view.per_slot * (gpu_count // size)
            jobs += [live.as_waiting for _, live in ranked[size][:limit] if live.as_waiting is not None]
        return replace(request, jobs=tuple(jobs))

    def _ranked_now(self, request: PlanRequest, gpu_count: int) -> dict[int, list[tuple[Key, LiveJob]]]:
        assert self._view.key is not None
        assert self._view.per_slot is not None
        key = self._view.key(replace(request, jobs=tuple(self._seen())))
        of_size: dict[int, list[tuple[Key, LiveJob]]] = {}
        for live in self._jobs.values():
            job = live.as_waiting
            assert job is not None
            young = waited_s(job, request.now_s) <= self._view.max_wait_s
            of_size.setdefault(job.gpu_count, []).append(((float(young), *full_key(key, job)), live))
        return {size: nsmallest(self._view.per_slot * (gpu_count // size), found) for size, found in of_size.items()}

    def _seen(self) -> list[PlanJob]:
        return [live.as_waiting for live in self._jobs.values() if live.as_waiting is not None]

    def _fixed_key(self, job: PlanJob) -> Key:
        if self._key is None:
            assert self._view.key is not None
            self._key = self._view.key(PlanRequest((job,), (), 0.0))
        return full_key(self._key, job)
