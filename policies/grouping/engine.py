"""Who shares with whom: the entrance of this part. Every answer comes with a proven bound."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from muri.policies.grouping.bound import PHYSICAL_MODELS, pooled_bound
from muri.policies.grouping.columns import Columns, all_columns, column_count
from muri.policies.grouping.improve import Improver
from muri.policies.grouping.kinds import Kinds, kinds_of
from muri.policies.grouping.kway import Limits, choose_columns
from muri.policies.grouping.objectives import coefficients
from muri.policies.grouping.problem import BucketGroups, BucketProblem, Members
from muri.policies.grouping.rounds import Rounds, form_units
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import Indices, SpeedModel
from muri.policies.types import Certificate

COLUMN_LIMIT: Final = 1_000_000
"""Most groups that "optimal" lists: all groups of 4 out of 66 kinds. Beyond, it improves those of Algorithm 1."""

_GOOD_GAP: Final = 3e-3
"""Relative gap from which exchanging members is tried after rounding."""

_FEW_GROUPS: Final = 400
"""Most groups for which that takes a fraction of a second."""

Starts = dict[int, tuple[Columns, Indices]]
"""Which columns mattered, by the identity of their table, which is kept so that no other takes its place."""


def group_buckets(
    problems: Sequence[BucketProblem], options: PolicyOptions, model: SpeedModel
) -> tuple[BucketGroups, ...]:
    """Form the groups of several buckets.

    A bucket with a slot for every job needs no groups. Otherwise the option `grouping` decides: "rounds" is
    Algorithm 1, "optimal" the choice among all groups, for as many kinds of jobs as can be listed.

    Args:
        problems: One for each bucket.
        options: Grouping, matching, merging, objective and group size.
        model: How fast members get on.

    Returns:
        The groups of each bucket, in the order of `problems`.
    """
    answers: dict[int, BucketGroups] = {}
    for_rounds = []
    starts: Starts = {}
    for index, problem in enumerate(problems):
        if options.max_group_size == 1 or (len(problem.shapes) <= problem.slots and options.merge == "as-needed"):
            answers[index] = _all_alone(problem, options)
        elif options.grouping == "optimal" and _can_list(problem, options):
            answers[index] = _optimal(problem, options, model, starts)
        else:
            for_rounds.append(index)
    buckets = form_units([problems[index] for index in for_rounds], options, model)
    answers |= {
        index: _of_rounds(problems[index], bucket, options, model)
        for index, bucket in zip(for_rounds, buckets, strict=True)
    }
    return tuple(answers[index] for index in range(len(problems)))


def _can_list(problem: BucketProblem, options: PolicyOptions) -> bool:
    kinds = len(set(zip(problem.shapes, problem.worth, strict=True)))
    return column_count(kinds, options.max_group_size) <= COLUMN_LIMIT


def _all_alone(problem: BucketProblem, options: PolicyOptions) -> BucketGroups:
    """Every job at full speed, which nothing can beat, as far as the slots reach."""
    started = range(min(problem.slots, len(problem.shapes)))
    value = float(coefficients(problem.shapes, problem.worth, options.objective)[: len(started)].sum())
    return BucketGroups(
        groups=tuple((job,) for job in started),
        left=tuple(range(len(started), len(problem.shapes))),
        certificate=Certificate(value, value),
    )


def _optimal(problem: BucketProblem, options: PolicyOptions, model: SpeedModel, starts: Starts) -> BucketGroups:
    """Choose among all groups that the kinds of the waiting jobs can form.

    Args:
        problem: The bucket.
        options: Objective, group size and margin.
        model: How fast members get on.
        starts: What mattered in the buckets before; this one's is added.
    """
    kinds = kinds_of(problem)
    table = _columns(kinds.shapes, kinds.worth, _relevant(options), model, problem.memory_limit_gib)
    columns = _possible(table, kinds)
    limits = Limits(
        np.array(kinds.counts, dtype=np.float64), np.array(kinds.urgent, dtype=np.float64), float(problem.slots)
    )
    _, start = starts.get(id(columns), (columns, None))
    choice = choose_columns(columns, limits, start)
    starts[id(columns)] = (columns, choice.seen)
    queues = [iter(jobs) for jobs in kinds.jobs]
    groups = []
    for column, count in zip(choice.columns.tolist(), choice.counts.tolist(), strict=True):
        members = [kind for kind in columns.members[column].tolist() if kind < columns.kinds]
        groups += [tuple(sorted(next(queues[kind]) for kind in members)) for _ in range(count)]
    # Rounding may leave a slot empty beside jobs that would take it alone.
    unused = sorted((job, kind) for kind, queue in enumerate(queues) for job in queue)[: problem.slots - len(groups)]
    value = choice.value + float(sum(columns.value[kind] for _, kind in unused))
    groups += [(job,) for job, _ in unused]
    if value < (1.0 - _GOOD_GAP) * choice.upper_bound and len(groups) <= _FEW_GROUPS:
        left = tuple(sorted(set(range(len(problem.shapes))).difference(*groups)))
        coefficient = coefficients(kinds.shapes, kinds.worth, options.objective)
        groups, value = Improver(problem, kinds, coefficient, options, model).improve(sorted(groups), left)
    return _answer(problem, groups, Certificate(value, max(value, choice.upper_bound)))


def _relevant(options: PolicyOptions) -> PolicyOptions:
    """Only the options that columns depend on, so that others don't make them anew."""
    return PolicyOptions(
        max_group_size=options.max_group_size, objective=options.objective, min_speedup=options.min_speedup
    )


# Cycle after cycle the same models wait in several buckets; a table of 64 kinds takes 30 MiB.
_columns = lru_cache(maxsize=4)(all_columns)


def _possible(columns: Columns, kinds: Kinds) -> Columns:
    """Leave out groups that need more jobs of a kind than there are."""
    counts = np.array([*kinds.counts, columns.members.shape[1]])
    scarce = np.flatnonzero(counts < columns.members.shape[1])
    if not len(scarce):
        return columns
    possible = np.ones(len(columns.value), dtype=np.bool_)
    for repeats in range(2, columns.members.shape[1] + 1):
        # Members ascend, so equal kinds are neighbours.
        for start in range(columns.members.shape[1] - repeats + 1):
            same = columns.members[:, start] == columns.members[:, start + repeats - 1]
            possible &= ~(same & (counts[columns.members[:, start]] < repeats))
    return columns.take(np.flatnonzero(possible))


def _of_rounds(problem: BucketProblem, bucket: Rounds, options: PolicyOptions, model: SpeedModel) -> BucketGroups:
    units = bucket.units if options.merge == "whole-rounds" else bucket.chosen()
    groups, value = [unit.members for unit in units], sum(unit.value for unit in units)
    if options.grouping == "optimal" and len(groups) > 1:
        left = tuple(job for unit in bucket.units[len(units) :] for job in unit.members)
        improver = Improver(problem, bucket.kinds, bucket.coefficient, options, model)
        groups, value = improver.improve(groups, tuple(sorted(left)))
    bound = _bound(bucket, options, model, max(problem.slots, len(units)))
    return _answer(problem, groups, Certificate(value, max(value, bound)))


def _bound(bucket: Rounds, options: PolicyOptions, model: SpeedModel, slots: int) -> float:
    """What no groups of these jobs can be worth more than."""
    counts = np.array(bucket.kinds.counts, dtype=np.float64)
    if not options.certify:
        return float(counts @ bucket.coefficient)
    return pooled_bound(
        bucket.kinds.shapes,
        counts,
        bucket.coefficient,
        slots=slots,
        max_size=options.max_group_size,
        physical=model.name in PHYSICAL_MODELS,
    )


def _answer(problem: BucketProblem, groups: Sequence[Members], certificate: Certificate) -> BucketGroups:
    taken = Counter(job for group in groups for job in group)
    return BucketGroups(
        groups=tuple(sorted(groups)),
        left=tuple(job for job in range(len(problem.shapes)) if job not in taken),
        certificate=certificate,
    )
