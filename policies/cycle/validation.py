"""Checks of requests and plans: contradictions are refused with their place; no plan may break a limit on sharing."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from muri.errors import UsageError
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.types import FreeNode, Plan, PlanJob, PlanRequest, Running, all_jobs, may_share_gpus

_NAMED: Final = 5  # How many of the repeated names an error lists
_LARGER: Final = ("slurm", "whole-nodes")
_Name = TypeVar("_Name", int, str)
_MOST_GPUS: Final = 2**32  # No cluster has as many; Slurm's own counts end there
_MOST_S: Final = 1e15  # Seconds that no clock of a cluster shows, small enough to compute with
_MOST_GIB: Final = 1e9
_MOST: Final = {
    "submit_s": _MOST_S,
    "attained_gpu_s": _MOST_S,
    "restart_s": _MOST_S,
    "remaining_s": _MOST_S,
    "waiting_since_s": _MOST_S,
    "gpu_utilization": 1.0,
    "gpu_mem_request_gib": _MOST_GIB,
}


class RequestError(UsageError):
    """A planning request contradicts itself or holds an impossible figure.

    `job_id` is the job without which the request would be valid in this respect; None: no single job is to blame.
    """

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


def check_request(request: PlanRequest, *, packed: bool = False, elastic: bool = False) -> None:
    """Refuse a request that no plan can be made for, unless its maker guarantees that it is valid.

    Args:
        request: The request.
        packed: Whether it is for a policy that gives out GPUs one by one: then each GPU must be known, and running
            units may overlap.
        elastic: Whether running jobs may hold another number of GPUs than they asked for.

    Raises:
        RequestError: Names the job or node that is wrong, and why.
    """
    if request.trusted:
        return
    jobs = list(all_jobs(request))
    _check_frame(request, jobs)
    for job in jobs:
        if (error := job_error(job)) is not None:
            raise error
    for node in request.nodes:
        _check_node(node, packed=packed)
    _check_running(request, packed=packed, elastic=elastic)
    if request.larger_than_a_node != "slurm":
        _check_sizes(request)


def _check_frame(request: PlanRequest, jobs: Iterable[PlanJob]) -> None:
    if request.max_group_size not in range(1, MAX_GROUP_SIZE + 1):
        raise RequestError(f"max_group_size is {request.max_group_size}; it must be 1 to {MAX_GROUP_SIZE}")
    if not math.isfinite(request.now_s):
        raise RequestError(f"now_s is {request.now_s}; it must be seconds since the epoch")
    if not 0 <= request.interval_s < math.inf:
        raise RequestError(f"interval_s is {request.interval_s}; it must be a finite number ≥ 0")
    if request.larger_than_a_node not in _LARGER:
        raise RequestError(f"larger_than_a_node is {request.larger_than_a_node!r}; valid are: {', '.join(_LARGER)}")
    if repeated := _repeated(job.job_id for job in jobs):
        text = f"job {_listed(repeated)} appears more than once; every job must appear exactly once, waiting or running"
        raise RequestError(text, repeated[0])
    if names := _repeated(node.name for node in request.nodes):
        raise RequestError(f"node {_listed(names)} appears more than once; every node must appear exactly once")


def _repeated(names: Iterable[_Name]) -> list[_Name]:
    return [name for name, count in Counter(names).items() if count > 1]


def _listed(names: Sequence[int | str]) -> str:
    return ", ".join(map(str, names[:_NAMED]))


def job_error(job: PlanJob) -> RequestError | None:
    """Why no plan can be made with a job, whatever the rest of the request; None when one can."""
    # Written out, because a long queue passes through here; NaN fails every comparison.
    fine = (
        1 <= job.gpu_count <= _MOST_GPUS
        and job.node_count >= 1
        and not job.gpu_count % job.node_count
        and job.largest_group >= 1
        and abs(job.priority) <= _MOST_GPUS
        and 0.0 <= job.submit_s <= _MOST_S
        and 0.0 <= job.attained_gpu_s <= _MOST_S
        and 0.0 <= job.restart_s <= _MOST_S
        and (job.remaining_s is None or 0.0 <= job.remaining_s <= _MOST_S)
        and (job.waiting_since_s is None or 0.0 <= job.waiting_since_s <= _MOST_S)
        and (job.gpu_utilization is None or 0.0 <= job.gpu_utilization <= 1.0)
        and (job.gpu_mem_request_gib is None or 0.0 <= job.gpu_mem_request_gib <= _MOST_GIB)
    )
    return None if fine else RequestError(f"job {job.job_id}: {_wrong_figure(job)}", job.job_id)


def _wrong_figure(job: PlanJob) -> str:
    if not 1 <= job.gpu_count <= _MOST_GPUS:
        return f"gpu_count is {job.gpu_count}; it must be ≥ 1 and at most {_MOST_GPUS}"
    if job.node_count < 1 or job.gpu_count % job.node_count:
        return f"node_count is {job.node_count}; it must be ≥ 1 and divide its {job.gpu_count} GPUs"
    if job.largest_group < 1:
        return f"largest_group is {job.largest_group}; it must be ≥ 1 (1: it runs alone)"
    if not abs(job.priority) <= _MOST_GPUS:
        return f"priority is {job.priority}; it must be at most {_MOST_GPUS}, as Slurm's is"
    for name, most in _MOST.items():
        value = getattr(job, name)
        if value is not None and not 0.0 <= value <= most:
            return f"{name} is {value}; it must be a finite number ≥ 0 and ≤ {most:g}"
    raise AssertionError(f"job {job.job_id} has no wrong figure")


def _check_node(node: FreeNode, *, packed: bool) -> None:
    free = [gpu for island in node.islands for gpu in island]
    known = [gpu for island in node.topology for gpu in island]
    twice = [(_repeated(listed), name) for name, listed in (("islands", free), ("topology", known))]
    if node.free_gpus < 0:
        problem = f"free_gpus is {node.free_gpus}; it must be ≥ 0"
    elif node.gpu_count < 0:
        problem = f"gpu_count is {node.gpu_count}; it must be ≥ 0 (0: unknown)"
    elif node.gpu_count and node.free_gpus > node.gpu_count:
        problem = f"{node.free_gpus} free GPUs but only {node.gpu_count} in all"
    elif not 0 <= node.gpu_mem_gib < math.inf:
        problem = f"gpu_mem_gib is {node.gpu_mem_gib}; it must be ≥ 0"
    elif repeated := [(min(gpus), name) for gpus, name in twice if gpus]:
        problem = f"GPU {repeated[0][0]} is in two {repeated[0][1]}; it must be in one"
    elif node.islands and len(free) != node.free_gpus:
        problem = (
            f"islands list {len(free)} GPUs but free_gpus is {node.free_gpus}; "
            "list the free GPUs only, or leave islands empty where the topology is unknown"
        )
    elif strangers := sorted(set(free) - set(known)) if known else []:
        problem = f"GPU {strangers[0]} is in islands but not in topology"
    elif known and node.gpu_count and len(known) != node.gpu_count:
        problem = f"topology lists {len(known)} GPUs but the node has {node.gpu_count}"
    elif packed and node.free_gpus and not node.islands:
        problem = (
            f"{node.free_gpus} GPUs are free, but islands doesn't say which; "
            "a policy that gives out GPUs one by one needs their indices"
        )
    else:
        return
    raise RequestError(f"node {node.name}: {problem}")


def _check_running(request: PlanRequest, *, packed: bool, elastic: bool) -> None:
    """Running units must fit their nodes together with the free GPUs; packed ones may overlap but name each GPU."""
    nodes = {node.name: node for node in request.nodes}
    held: Counter[str] = Counter()
    taken: dict[str, set[int]] = {}
    for unit in request.running:
        _check_unit(unit, nodes, packed=packed, elastic=elastic)
        for share in unit.gpus:
            others = taken.setdefault(share.node, set())
            if not packed and (both := sorted(others.intersection(share.gpu_ids))):
                job_id = unit.members[0].job_id
                text = f"node {share.node}: GPU {both[0]} is held by job {job_id} and by another running job"
                raise RequestError(text, job_id)
            others.update(share.gpu_ids)
            held[share.node] = len(others) if packed else held[share.node] + share.gpu_count
    for name, count in held.items():
        node, gpu_ids = nodes[name], taken[name]
        known = {gpu for island in node.topology for gpu in island}
        if packed and known and (strangers := sorted(gpu_ids - known)):
            raise RequestError(f"node {name}: GPU {strangers[0]} is held by a running job but not in topology")
        if both := sorted(gpu_ids & {gpu for island in node.islands for gpu in island}):
            raise RequestError(f"node {name}: GPU {both[0]} is both free and held by a running job")
        if node.gpu_count and count + node.free_gpus > node.gpu_count:
            raise RequestError(
                f"node {name}: running jobs hold {count} GPUs and {node.free_gpus} are free, "
                f"but it has {node.gpu_count} in all"
            )


def _check_unit(unit: Running, nodes: Mapping[str, FreeNode], *, packed: bool, elastic: bool) -> None:
    if not unit.members:
        raise RequestError("a running unit has no members; leave it out")
    job_id, gpu_count, total = unit.members[0].job_id, unit.members[0].gpu_count, sum(g.gpu_count for g in unit.gpus)
    if any(job.gpu_count != gpu_count for job in unit.members):
        text = f"job {job_id} runs in a group whose members differ in gpu_count; they must be equal"
        raise RequestError(text, job_id)
    if any(share.gpu_count < 1 for share in unit.gpus):
        raise RequestError(f"job {job_id} holds a share of {unit.gpus}; gpu_count of a share must be ≥ 1", job_id)
    if total != gpu_count and not elastic:
        raise RequestError(f"job {job_id} runs on {total} GPUs but its gpu_count is {gpu_count}", job_id)
    for share in unit.gpus:
        if share.node not in nodes:
            raise RequestError(
                f"job {job_id} runs on node {share.node}, which is not among the request's nodes; "
                "list every node that anything runs on, with 0 free GPUs where it is busy",
                job_id,
            )
        distinct = len(set(share.gpu_ids)) == len(share.gpu_ids) == share.gpu_count
        if not distinct and (packed or share.gpu_ids):
            raise RequestError(
                f"job {job_id} holds {share.gpu_count} GPUs of {share.node} but gpu_ids is {share.gpu_ids}; "
                f"name each one once{'' if packed else ', or none'}",
                job_id,
            )
        if packed and sum(other.node == share.node for other in unit.gpus) > 1:
            raise RequestError(f"job {job_id} holds two shares of {share.node}; put its GPUs there into one", job_id)


def _check_sizes(request: PlanRequest) -> None:
    """No job may need more GPUs than there are, where Slurm doesn't take such jobs."""
    sizes: dict[str, list[int]] = {}
    for node in request.nodes:
        for partition in set(node.partitions):
            sizes.setdefault(partition, []).append(node.gpu_count)
    # A partition with a node of unknown size sets no limit.
    limits = {name: sum(counts) for name, counts in sizes.items() if all(counts)}
    for job in request.jobs:
        limit = limits.get(job.partition, job.gpu_count)
        if job.gpu_count > limit:
            where = f"partition {job.partition} has {limit} in all"
            text = f"job {job.job_id} needs {job.gpu_count} GPUs, but {where}; it must be 1 to {limit}"
            raise RequestError(text, job.job_id)


class BrokenLaw(NamedTuple):
    """Jobs that a plan puts on the same GPUs although it must not, and the law that forbids it."""

    job_ids: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        """The sentence."""
        return f"jobs {', '.join(map(str, self.job_ids))} must not share GPUs: {self.why}"


def broken_laws(request: PlanRequest, plan: Plan) -> tuple[BrokenLaw, ...]:
    """Groups that a plan forms although domains or largest groups forbid them.

    Unchanged running groups break no law: the plan did not form them. A site's policy may not know these limits, so its
    plans should be checked first.
    """
    jobs = {job.job_id: job for job in all_jobs(request)}
    found = []
    for job_ids in sorted(set(_put_together(plan))):
        members = [jobs[job_id] for job_id in job_ids if job_id in jobs]
        if not may_share_gpus(members):
            found.append(BrokenLaw(job_ids, _why(members)))
    return tuple(found)


def _put_together(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The jobs that share GPUs, where at least one of them is new there."""
    for group in plan.groups:
        if not group.kept:
            yield tuple(sorted(group.members))
    tenants: dict[tuple[str, int], list[int]] = {}
    comes = {sharer.job_id for sharer in plan.sharers if not sharer.kept}
    for sharer in plan.sharers:
        for share in sharer.gpus:
            for gpu_id in share.gpu_ids:
                tenants.setdefault((share.node, gpu_id), []).append(sharer.job_id)
    for job_ids in tenants.values():
        if len(job_ids) > 1 and not comes.isdisjoint(job_ids):
            yield tuple(sorted(job_ids))


def _why(members: list[PlanJob]) -> str:
    domains = sorted({job.domain for job in members})
    if len(domains) > 1:
        return f"they are of different domains ({'; '.join(repr(domain) for domain in domains)})"
    least = min(members, key=lambda job: (job.largest_group, job.job_id))
    return f"they are {len(members)}, and job {least.job_id} may be in groups of {least.largest_group} at most"
