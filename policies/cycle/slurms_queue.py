"""Waiting jobs that a plan leaves to Slurm's own queue: larger than any node, or held back for too long."""

from collections.abc import Callable
from functools import cache

from muri.policies.cycle import reasons
from muri.policies.cycle.placement import FreeGpus
from muri.policies.cycle.queue import waited_s
from muri.policies.types import PlanJob, PlanRequest, Solo


class SlurmsQueue:
    """Slurm's queue behind a plan; a request whose `larger_than_a_node` is not "slurm" has none, and it takes nobody.

    Args:
        request: The request.
        free: The GPUs that are given out.
        max_wait_s: The aging bound.
        released: Where the jobs that it takes are written down.
        set_aside: Keeps GPUs free for a job that is larger than any node.
    """

    def __init__(
        self,
        request: PlanRequest,
        free: FreeGpus,
        max_wait_s: float,
        released: list[Solo],
        set_aside: Callable[[PlanJob], object],
    ) -> None:
        self.is_there = request.larger_than_a_node == "slurm"
        self._now_s, self._max_wait_s = request.now_s, max_wait_s
        self._released, self._set_aside = released, set_aside
        self._largest_node = cache(free.largest_node)

    def is_larger(self, job: PlanJob) -> bool:
        """Whether a job needs more GPUs of a node than any node has; False while one of them is of unknown size."""
        largest = self._largest_node(job.partition)
        return largest is not None and job.gpu_count // job.node_count > largest

    def is_overdue(self, job: PlanJob) -> bool:
        """Whether a job has waited longer than the aging bound."""
        return waited_s(job, self._now_s) > self._max_wait_s

    def takes_larger(self, job: PlanJob) -> bool:
        """Take a waiting job that is larger than any node; GPUs are set aside for it."""
        if not self.is_there or not self.is_larger(job):
            return False
        self._set_aside(job)
        largest = self._largest_node(job.partition) or 0
        self._released.append(Solo(job.job_id, (reasons.larger_than_a_node(job, largest), reasons.QUEUES_IN_SLURM)))
        return True

    def takes_overdue(self, job: PlanJob) -> bool:
        """Take a waiting job that found no place and has waited longer than the aging bound."""
        if not self.is_there or not self.is_overdue(job):
            return False
        aged = reasons.aged(waited_s(job, self._now_s), self._max_wait_s)
        self._released.append(Solo(job.job_id, (aged, reasons.QUEUES_IN_SLURM)))
        return True

    def takes_spanning(self, job: PlanJob) -> bool:
        """Take a job that finds no node, where nobody said how large the nodes are: it may be one for several.

        Its GPUs are set aside; it is the caller who writes it down.
        """
        unknown = self.is_there and not job.groupable and self._largest_node(job.partition) is None
        return unknown and bool(self._set_aside(job))
