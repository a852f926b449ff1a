"""Orders of the queue beside the core's: LAS, Themis, Tiresias with the Gittins index; and sharing by the first fit."""

import numpy as np

from muri.policies.schedulers import EXCLUSIVE, DiscreteQueues, FixedOrder, QueuePolicy, las, worst_fairness_first
from muri.policies.siblings.sjf_bsbf import SjfBsbf
from muri.policies.speed import Floats
from muri.policies.types import PlanRequest, PriorityKey


class Las(FixedOrder):
    """Least attained service first: the job that has run for the shortest time."""

    name = "las"
    order = "attained time"
    fixed = EXCLUSIVE
    ranking = las


class Themis(QueuePolicy):
    """Worst finish-time fairness ρ first: elapsed plus remaining, over alone.

    The paper auctions GPUs among the apps with the worst ρ. Here each job asks for all of its GPUs or none, so the
    auction comes down to ranking by ρ; "alone" is the job's own service time, not its share of a divided cluster.

    Source: Themis (Mahajan et al., NSDI 2020), section 3.1: ρ = T_shared / T_independent.
    """

    name = "themis"
    order = "worst slowdown ρ"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By ρ, the largest first."""
        return worst_fairness_first(request)


class TiresiasGittins(QueuePolicy):
    """Tiresias' queues, in each the greatest Gittins index of past service first.

    Without `service_history_gpu_s`, and among jobs that have outlived every past job, the order within a queue is that
    of attained GPU-seconds (2D-LAS).

    Source: Tiresias (Gu et al., NSDI 2019), 2D-Gittins index, with the same discrete queues as 2D-LAS.
    """

    name = "tiresias-gittins"
    order = "queue, Gittins index"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By queue, then index, then attained GPU-seconds."""
        queues, index = DiscreteQueues(request, self.rules), GittinsIndex(self.rules.service_history_gpu_s)
        return lambda job: (float(queues.number(job)), -index.at(job.attained_gpu_s), job.attained_gpu_s)


class GittinsIndex:
    """The Gittins index of an empirical distribution of total service.

    For a job that has attained a, and S the total service of a job:

        G(a) = sup over Δ > 0 of  P(S - a ≤ Δ | S > a) / E[min(S - a, Δ) | S > a]

    the chance to finish within Δ more, for each second spent trying. Only a Δ that ends at a sample can be the best
    one.
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


class SjfFfs(SjfBsbf):
    """Shortest job first; join the first running job whose GPUs have the memory, without a test whether sharing pays.

    The batch is divided only as far as the memory asks for. Source: SJF-BSBF, its baseline SJF-FFS.
    """

    name = "sjf-ffs"
    tests_pairs = False
