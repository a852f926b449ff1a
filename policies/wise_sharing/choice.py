"""Which GPUs a job takes that has to share: free ones, and those of its best partners."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from muri.policies.cycle.packed import Gpus, PackedGpu
from muri.policies.types import PlanJob
from muri.policies.wise_sharing.partners import Partner
from muri.policies.wise_sharing.sub_batch import SubBatch


class Choice(NamedTuple):
    """GPUs for a job.

    Attributes:
        gpus: The GPUs.
        partners: The jobs that it joins there, each beside the others.
        sub_batch: How the job runs there: in the most steps that any of them asks for.
    """

    gpus: Gpus
    partners: tuple[Partner, ...]
    sub_batch: SubBatch


class _Ranked(NamedTuple):
    """A GPU, and the rank of the partner that is on it; -1: nobody."""

    rank: int
    gpu: PackedGpu


def sizes_of(job: PlanJob, largest_node: int | None) -> tuple[int, ...]:
    """GPUs that a job takes on each of its nodes.

    Args:
        job: The job.
        largest_node: GPUs of its partition's largest node: a larger job fills nodes; None while unknown.
    """
    if job.node_count > 1:
        return (job.gpu_count // job.node_count,) * job.node_count
    if not largest_node or job.gpu_count <= largest_node:
        return (job.gpu_count,)
    full, rest = divmod(job.gpu_count, largest_node)
    return (largest_node,) * full + ((rest,) if rest else ())


def choose_gpus(
    job: PlanJob, sizes: Sequence[int], partners: Sequence[Partner], by_node: Mapping[str, Gpus]
) -> Choice | None:
    """Free GPUs, then those of the best partners, on the nodes whose partners are the best.

    Args:
        job: The job.
        sizes: GPUs on each node.
        partners: Whom it may join, the best first; a job may be joined on some of its GPUs only.
        by_node: GPUs of the job's partition.

    Returns:
        None where there are too few of them.
    """
    usable = _usable(partners, by_node)
    chosen: list[_Ranked] = []
    for size in sizes:
        found = [_node_key(node, ranked, size) for node, ranked in usable.items() if len(ranked) >= size]
        if not found:
            return None
        chosen += usable.pop(min(found)[-1])[:size]
    return _choice(job, chosen, partners)


def choose_whole_set(job: PlanJob, sizes: Sequence[int], partners: Iterable[Partner]) -> Choice | None:
    """Just the GPUs of the best partner that has as many on as many nodes."""
    for partner in partners:
        whole = partner.gpus == partner.holding.gpus
        if whole and sorted(share.gpu_count for share in partner.holding.shares) == sorted(sizes):
            return _choice(job, [_Ranked(0, gpu) for gpu in partner.gpus], [partner])
    return None


def choice_that_pays(
    job: PlanJob, sizes: Sequence[int], partners: Sequence[Partner], by_node: Mapping[str, Gpus]
) -> Choice | None:
    """As `choose_gpus`, but each pair is tested again with what the job suffers from all it joins.

    The slowest of its GPUs sets the pace, so ξ of the joining job is that beside its worst partner. Where a pair
    fails this test, the worst partner is left out and the choice made anew.
    """
    left = list(partners)
    while left:
        choice = choose_gpus(job, sizes, left, by_node)
        if choice is None or all(partner.pays for partner in choice.partners):
            return choice
        joined = {partner.holding.job.job_id for partner in choice.partners}
        used = (index for index, partner in enumerate(left) if partner.holding.job.job_id in joined)
        del left[max(used, key=lambda index: (left[index].joining_slowdown, index))]
    return None


def _usable(partners: Sequence[Partner], by_node: Mapping[str, Gpus]) -> dict[str, list[_Ranked]]:
    """The GPUs of each node that can be taken: free ones with enough memory, then those of partners by rank."""
    least_gib = min((partner.sub_batch.mem_gib for partner in partners), default=0.0)
    usable = {
        node: [_Ranked(-1, gpu) for gpu in gpus if not gpu.tenants and gpu.left_gib >= least_gib]
        for node, gpus in by_node.items()
    }
    for rank, partner in enumerate(partners):
        for gpu in partner.gpus:
            usable[gpu.node].append(_Ranked(rank, gpu))
    return usable


def _node_key(node: str, ranked: Sequence[_Ranked], size: int) -> tuple[int, int, int, str]:
    """The smaller the better: its worst partner, then fewer partners, then fewer GPUs that stay unused."""
    ranks = {item.rank for item in ranked[:size]}
    return max(ranks), len(ranks), len(ranked) - size, node


def _choice(job: PlanJob, chosen: Iterable[_Ranked], partners: Sequence[Partner]) -> Choice:
    """A choice, its partners in their order, each beside the others."""
    items = tuple(chosen)
    joined = [partners[rank] for rank in sorted({item.rank for item in items if item.rank >= 0})]
    sub_batch = max((partner.sub_batch for partner in joined), default=SubBatch(1, 0.0, 1.0))
    slowdown = max((partner.joining_slowdown for partner in joined), default=1.0)
    if len(joined) > 1:
        joined = [partner.beside_others(job, sub_batch, slowdown) for partner in joined]
    gpus = tuple(sorted((item.gpu for item in items), key=lambda gpu: gpu.place))
    return Choice(gpus, tuple(joined), sub_batch)
