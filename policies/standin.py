"""Groups formed by trying in order of priority; serves until the grouping engine is complete."""

from collections.abc import Sequence

import numpy as np

from muri.policies.grouping.problem import BucketGroups, BucketProblem
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import SpeedModel
from muri.policies.types import Certificate


def group_buckets(
    problems: Sequence[BucketProblem], options: PolicyOptions, model: SpeedModel
) -> tuple[BucketGroups, ...]:
    """Every job beyond the slots joins the first group that does more work with it."""
    return tuple(_group(problem, options.max_group_size, model) for problem in problems)


def _group(problem: BucketProblem, max_size: int, model: SpeedModel) -> BucketGroups:
    groups = [(job,) for job in range(min(problem.slots, len(problem.shapes)))]
    left = []
    for job in range(problem.slots, len(problem.shapes)):
        gains = [
            len(group) < max_size
            and sum(problem.shapes[member].gpu_mem_gib for member in (*group, job)) <= problem.memory_limit_gib
            and _total(problem, (*group, job), model) > _total(problem, group, model) + 1e-9
            for group in groups
        ]
        if True in gains:
            groups[gains.index(True)] += (job,)  # type: ignore[assignment]
        else:
            left.append(job)
    value = sum(_total(problem, group, model) for group in groups)
    return BucketGroups(tuple(sorted(groups)), tuple(left), Certificate(value, float(len(problem.shapes))))


def _total(problem: BucketProblem, group: tuple[int, ...], model: SpeedModel) -> float:
    return float(model.evaluate(problem.shapes, np.array([group], dtype=np.intp)).speed.sum())
