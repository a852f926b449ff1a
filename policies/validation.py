"""Requests that no plan can be made for are refused with the place of the error."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from muri.errors import UsageError
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.types import FreeNode, PlanJob, PlanRequest


class RequestError(UsageError):
    """A planning request contradicts itself or holds a figure that cannot be true."""


_NAMED: Final = 5
"""How many of the repeated names an error lists."""


def check_request(request: PlanRequest) -> None:
    """Refuse a request that no plan can be made for.

    Raises:
        RequestError: Says which job or node is wrong, and how.
    """
    if request.max_group_size not in range(1, MAX_GROUP_SIZE + 1):
        raise RequestError(f"max_group_size is {request.max_group_size}; it must be 1 to {MAX_GROUP_SIZE}")
    if not math.isfinite(request.now_s):
        raise RequestError(f"now_s is {request.now_s}; it must be seconds since the epoch")
    _check_unique("job", (job.job_id for job in request.jobs))
    _check_unique("node", (node.name for node in request.nodes))
    for job in request.jobs:
        _check_job(job)
    for node in request.nodes:
        _check_node(node)


def _check_unique(what: str, names: Iterable[int | str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        listed = ", ".join(str(name) for name in repeated[:_NAMED])
        raise RequestError(f"{what} {listed} appears more than once; every {what} must appear exactly once")


def _check_job(job: PlanJob) -> None:
    if job.gpu_count < 1:
        raise RequestError(f"job {job.job_id}: gpu_count is {job.gpu_count}; it must be ≥ 1")
    figures = {"submit_s": job.submit_s, "attained_gpu_s": job.attained_gpu_s, "remaining_s": job.remaining_s}
    for name, value in figures.items():
        if value is not None and (not math.isfinite(value) or value < 0):
            raise RequestError(f"job {job.job_id}: {name} is {value}; it must be a finite number ≥ 0")


def _check_node(node: FreeNode) -> None:
    if node.free_gpus < 0:
        raise RequestError(f"node {node.name}: free_gpus is {node.free_gpus}; it must be ≥ 0")
    if node.gpu_count and node.free_gpus > node.gpu_count:
        raise RequestError(f"node {node.name}: {node.free_gpus} free GPUs but only {node.gpu_count} in all")
    if not math.isfinite(node.gpu_mem_gib) or node.gpu_mem_gib < 0:
        raise RequestError(f"node {node.name}: gpu_mem_gib is {node.gpu_mem_gib}; it must be ≥ 0")
