"""Tiresias with the Gittins index: what past jobs needed tells whom a little more service would finish."""

import numpy as np

from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.schedulers.tiresias import queue_of, running_ids, waited
from muri.policies.speed.model import Floats
from muri.policies.types import PlanJob, PlanRequest


class TiresiasGittins(QueuePolicy):
    """Tiresias' queues, in each the greatest Gittins index of past service first.

    Without `service_history_gpu_s` nothing is known to compute an index from, and the order within a queue
    is that of attained GPU-seconds (2D-LAS). So it is among jobs that have outlived all of the past.

    Source: Tiresias (Gu et al., NSDI 2019), 2D-Gittins index, with the same discrete queues as 2D-LAS.
    """

    name = "tiresias-gittins"
    order = "queue, Gittins index"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By queue, then index, then attained GPU-seconds."""
        rules, running = self.rules, running_ids(request)
        index = GittinsIndex(rules.service_history_gpu_s)

        def by_index(job: PlanJob) -> tuple[float, ...]:
            waited_s = 0.0 if job.job_id in running else waited(job, request.now_s)
            queue = queue_of(job, waited_s, rules)
            return (float(queue), -index.at(job.attained_gpu_s), job.attained_gpu_s)

        return by_index


class GittinsIndex:
    """The Gittins index of an empirical distribution of total service.

    For a job that has attained a, and S the total service of a job:

        G(a) = sup over Δ > 0 of  P(S - a ≤ Δ | S > a) / E[min(S - a, Δ) | S > a]

    the chance to finish within Δ more, for each second spent trying. Only a Δ that ends at one of the
    samples can be the best one.

    Args:
        history_gpu_s: Total service of jobs that have ended, in any order.
    """

    def __init__(self, history_gpu_s: tuple[float, ...]) -> None:
        self._totals: Floats = np.sort(np.asarray(history_gpu_s, dtype=np.float64))
        self._known: dict[float, float] = {}  # most jobs of a long queue have attained the same: nothing

    def at(self, attained_gpu_s: float) -> float:
        """The index, in finished jobs per GPU-second; 0 when no past job needed more than this."""
        if attained_gpu_s not in self._known:
            self._known[attained_gpu_s] = self._best_rate(attained_gpu_s)
        return self._known[attained_gpu_s]

    def _best_rate(self, attained_gpu_s: float) -> float:
        needed = self._totals[np.searchsorted(self._totals, attained_gpu_s, side="right") :] - attained_gpu_s
        if needed.size == 0:
            return 0.0
        finished = np.arange(1, needed.size + 1)
        spent = np.cumsum(needed) + (needed.size - finished) * needed
        return float(np.max(finished / spent))
