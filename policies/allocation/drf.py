"""Dominant resource fairness: the user whose largest share of any resource is smallest goes first."""

from collections.abc import Mapping, Sequence

from muri.policies.allocation.demand import saturating_wish
from muri.policies.priority import all_jobs
from muri.policies.types import FreeNode, PlanJob, PlanRequest

_Totals = tuple[float, float, float]


def fill_order(request: PlanRequest) -> Mapping[int, float]:
    """Dominant share of its user when a job's turn comes, by job id.

    Progressive filling starts the next job of whoever has the smallest dominant share. With demands that only add
    up, that is the order of what a user's jobs before this one ask for together; a user's running jobs come first,
    then his others as they were submitted.

    Source: DRF (Ghodsi et al., NSDI 2011), algorithm 1.
    """
    totals, nodes = _totals(request), sorted(request.nodes, key=lambda node: node.name)
    running = {job.job_id for unit in request.running for job in unit.members}
    held: dict[str, list[float]] = {}
    share: dict[int, float] = {}
    for job in sorted(all_jobs(request), key=lambda job: (job.job_id not in running, job.submit_s, job.job_id)):
        amounts = held.setdefault(job.user, [0.0, 0.0, 0.0])
        share[job.job_id] = max(
            (amount / total for amount, total in zip(amounts, totals, strict=True) if total), default=0.0
        )
        for index, amount in enumerate(_demand(job, nodes)):
            amounts[index] += amount
    return share


def _totals(request: PlanRequest) -> _Totals:
    nodes = request.nodes
    return (
        sum(node.gpu_count or node.free_gpus for node in nodes),
        sum(node.cpu_count for node in nodes),
        sum(node.mem_gib for node in nodes),
    )


def _demand(job: PlanJob, nodes: Sequence[FreeNode]) -> _Totals:
    """What a job asks for on the first node by name that could be its own."""
    for node in nodes:
        if node.gpu_count and job.partition in node.partitions:
            each = saturating_wish(job, node, min(job.gpu_count, node.gpu_count))
            return (job.gpu_count, each.cpus * job.gpu_count, each.mem_gib * job.gpu_count)
    return (job.gpu_count, 0.0, 0.0)
