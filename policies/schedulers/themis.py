"""Finish-time fairness: whoever fares worst compared with a cluster of his own goes first."""

from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.types import PlanJob, PlanRequest


class Themis(QueuePolicy):
    """Worst finish-time fairness ρ first: elapsed plus remaining, over alone.

    A simplification of the paper, which auctions GPUs among the apps with the worst ρ and lets them
    bid what each allocation would do for them. Here each job asks for all of its GPUs or none,
    so the auction comes down to ranking by ρ; "alone" is the job's own service time, not its share
    of a divided cluster.

    Source: Themis (Mahajan et al., NSDI 2020), section 3.1: ρ = T_shared / T_independent.
    """

    name = "themis"
    order = "worst slowdown ρ"
    fixed = EXCLUSIVE

    def key(self, request: PlanRequest) -> PriorityKey:
        """By ρ, the largest first."""

        def worst_first(job: PlanJob) -> tuple[float, ...]:
            return (-finish_time_fairness(job, request.now_s, request.interval_s),)

        return worst_first


def finish_time_fairness(job: PlanJob, now_s: float, interval_s: float) -> float:
    """Expected ρ of a job that ran at full speed from now on; 1 for one that never waits.

    A job of unknown duration is taken to need as much service again as it has attained, and at least
    until the next plan.

    Args:
        job: The job.
        now_s: Now, seconds since the epoch.
        interval_s: Seconds until the next plan.
    """
    remaining_s = max(job.attained_s, interval_s) if job.remaining_s is None else job.remaining_s
    alone_s = job.attained_s + remaining_s
    elapsed_s = max(0.0, now_s - job.submit_s)
    return (elapsed_s + remaining_s) / alone_s if alone_s > 0 else float("inf")
