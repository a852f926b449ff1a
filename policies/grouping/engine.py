"""The entry to grouping; every answer has a proven bound."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from muri.policies.grouping.certified import match_dense
from muri.policies.grouping.exchange import Assembly, Exchange
from muri.policies.grouping.kway import Limits, all_columns, choose_columns, column_count
from muri.policies.grouping.problem import (
    Appraiser,
    BucketGroups,
    BucketProblem,
    Kind,
    Kinds,
    Members,
    coefficients,
    kinds_of,
)
from muri.policies.grouping.rounds import Rounds, form_units
from muri.policies.grouping.solvers import linear_value, match_types
from muri.policies.options import PolicyOptions
from muri.policies.speed import Indices, SpeedModel
from muri.policies.types import Certificate

_ROUNDING = 1e-9  # Relative loss that is only rounding
_REMEMBERED_KINDS = 32  # Kinds of a bucket whose pairs are cached from plan to plan: 256 KiB at most
_MANY = 60  # Number of jobs above which matching works on kinds


def unslowed_groups(problem: BucketProblem, options: PolicyOptions, model: SpeedModel) -> tuple[Members, ...] | None:
    """Fit all jobs into the slots at full speed, by no more pairs than it takes; None where pairs alone do not suffice.

    The least urgent jobs share: should a prediction prove wrong, that costs least. The problem has more jobs than
    slots.
    """
    wanted = len(problem.jobs) - problem.slots
    if 2 * wanted > len(problem.jobs):
        return None
    # Worth does not matter where no job is slowed.
    alike = [kind._replace(worth=1.0) for kind in problem.jobs]
    kinds = tuple(sorted(set(alike)))
    number = {kind: index for index, kind in enumerate(kinds)}
    kind_of = np.array([number[kind] for kind in alike], dtype=np.intp)
    pairs_of = _harmless if len(kinds) <= _REMEMBERED_KINDS else _harmless.__wrapped__
    harmless = pairs_of(kinds, problem.memory_limit_gib, options, model)
    with_partner = int(np.bincount(kind_of, minlength=len(kinds))[harmless.any(axis=1)].sum())
    if 2 * wanted > with_partner:
        return None
    pairs = _of_least_urgent(kind_of, harmless, wanted)
    if len(pairs) < wanted:
        pairs = _most(kind_of, harmless)[:wanted]
    if len(pairs) < wanted:
        return None
    paired = {job for pair in pairs for job in pair}
    return tuple(sorted([*pairs, *((job,) for job in range(len(problem.jobs)) if job not in paired)]))


@lru_cache(maxsize=256)
def _harmless(
    kinds: tuple[Kind, ...], memory_limit_gib: float, options: PolicyOptions, model: SpeedModel
) -> NDArray[np.bool_]:
    """Array (kinds, kinds): which pairs may form and slow neither."""
    appraiser = Appraiser(kinds, options, model, memory_limit_gib)
    first, second = np.triu_indices(len(kinds))
    groups = np.stack([first, second], axis=1)
    appraisal = appraiser.appraise(groups)
    full = appraisal.value >= appraiser.coefficient[groups].sum(axis=1) * (1 - _ROUNDING)
    harmless = np.zeros((len(kinds), len(kinds)), dtype=np.bool_)
    harmless[first, second] = full & appraiser.pays(appraisal) & appraiser.fits(groups)
    return np.asarray(harmless | harmless.T)


def _of_least_urgent(kind_of: Indices, harmless: NDArray[np.bool_], wanted: int) -> list[Members]:
    """Pairs from the end of the queue on: each job takes the least urgent one that it may share with."""
    free: list[list[int]] = [[] for _ in range(len(harmless))]
    for job, kind in enumerate(kind_of.tolist()):
        free[kind].append(job)
    partners = [np.flatnonzero(row).tolist() for row in harmless]
    pairs: list[Members] = []
    for job in range(len(kind_of) - 1, -1, -1):
        kind = int(kind_of[job])
        if len(pairs) == wanted:
            break
        if not free[kind] or free[kind][-1] != job:
            continue  # it has a partner
        free[kind].pop()
        partner = max((free[other][-1] for other in partners[kind] if free[other]), default=None)
        if partner is not None:
            free[int(kind_of[partner])].pop()
            pairs.append((partner, job))
    return pairs


def _most(kind_of: Indices, harmless: NDArray[np.bool_]) -> list[Members]:
    """As many pairs as possible."""
    if len(kind_of) <= _MANY:
        return list(match_dense(harmless[np.ix_(kind_of, kind_of)].astype(np.float64)).pairs)
    counts = np.bincount(kind_of, minlength=len(harmless)).tolist()
    queues = [iter(np.flatnonzero(kind_of == kind).tolist()) for kind in range(len(harmless))]
    found = match_types(harmless.astype(np.float64), counts).pairs
    pairs = [(next(queues[one]), next(queues[other])) for one, other, count in found for _ in range(count)]
    return [(min(pair), max(pair)) for pair in pairs]


# Most groups that "optimal" lists: all groups of 4 out of 67 kinds. Beyond, it improves those of Algorithm 1.
COLUMN_LIMIT: Final = 1_000_000
_GOOD_GAP: Final = 3e-3  # Relative gap from which exchanging members is tried after rounding
_FEW_GROUPS: Final = 400  # Most groups for which that takes a fraction of a second
_REMEMBERED_SIZE: Final = 64  # Jobs and open units of a small bucket; 256 such buckets take at most 10 MiB
Starts = dict[tuple[object, ...], Indices]  # Which columns mattered, by the inputs that the columns depend on
_PHYSICAL_MODELS: Final = ("lockstep", "fair")  # Speed models that never use a resource for more than the time


def group_buckets(
    problems: Sequence[BucketProblem], options: PolicyOptions, model: SpeedModel
) -> tuple[BucketGroups, ...]:
    """Form the groups of several buckets, and choose which jobs join running units.

    A bucket with a slot for every job needs no groups. Otherwise the option `grouping` decides: "rounds" is Algorithm
    1, "optimal" the choice among all groups, for as many kinds of jobs as can be listed.
    """
    answers: dict[int, BucketGroups] = {}
    for_rounds: dict[int, tuple[BucketProblem, Kinds]] = {}
    starts: Starts = {}
    for index, problem in enumerate(problems):
        room_for_all = len(problem.jobs) <= problem.slots and options.merge == "as-needed"
        if options.max_group_size == 1 or room_for_all or not problem.slots:
            answers[index] = _all_alone(problem, options)
            continue
        if options.grouping == "optimal" and (unslowed := unslowed_groups(problem, options, model)) is not None:
            value = float(coefficients(problem.jobs, options.objective).sum())
            answers[index] = BucketGroups(unslowed, (), Certificate(value, value))
            continue
        kinds = kinds_of(problem)
        if options.grouping == "optimal" and column_count(len(kinds.kinds), options.max_group_size) <= COLUMN_LIMIT:
            answers[index] = _optimal(problem, kinds, options, model, starts)
        else:
            for_rounds[index] = (problem, kinds)
    buckets = form_units(list(for_rounds.values()), options, model)
    for (index, (problem, _)), bucket in zip(for_rounds.items(), buckets, strict=True):
        answers[index] = _of_rounds(problem, bucket, options, model)
    return tuple(_with_joins(problem, answers[index], options, model) for index, problem in enumerate(problems))


def _with_joins(
    problem: BucketProblem, answer: BucketGroups, options: PolicyOptions, model: SpeedModel
) -> BucketGroups:
    """The answer with joins; that to a small bucket is cached, because the next cycle often asks for it again."""
    if not problem.open_units or not (answer.left or len(answer.groups) < len(problem.jobs)):
        return replace(answer, joins=((),) * len(problem.open_units))
    joined = _joined if len(problem.jobs) + len(problem.open_units) <= _REMEMBERED_SIZE else _joined.__wrapped__
    return joined(problem, answer, options, model)


@lru_cache(maxsize=256)
def _joined(problem: BucketProblem, answer: BucketGroups, options: PolicyOptions, model: SpeedModel) -> BucketGroups:
    """Let waiting jobs join running units.

    Where all groups are chosen at once, their members are chosen again together with the joins; groups of Algorithm 1
    stay.
    """
    exchange = Exchange(problem, options, model)
    if options.grouping == "optimal":
        found = exchange.improve(answer.groups, answer.left)
    else:
        joined = exchange.improve((), answer.left)
        found = Assembly(answer.groups, joined.joins, answer.certificate.value + joined.value)
    counts = Counter(chain(problem.jobs, *(unit.members for unit in problem.open_units)))
    slots = problem.slots + len(problem.open_units)
    bound = _bound(exchange.kinds, [counts[kind] for kind in exchange.kinds], options, model, slots=slots)
    certificate = Certificate(found.value, max(found.value, bound - exchange.base_value))
    left = _left_over(problem, [*found.groups, *found.joins])
    return BucketGroups(found.groups, left, certificate, found.joins)


def _all_alone(problem: BucketProblem, options: PolicyOptions) -> BucketGroups:
    """Every job at full speed, as far as the slots reach."""
    started = range(min(problem.slots, len(problem.jobs)))
    value = float(coefficients(problem.jobs, options.objective)[: len(started)].sum())
    return BucketGroups(
        groups=tuple((job,) for job in started),
        left=tuple(range(len(started), len(problem.jobs))),
        certificate=Certificate(value, value),
    )


def _optimal(
    problem: BucketProblem, kinds: Kinds, options: PolicyOptions, model: SpeedModel, starts: Starts
) -> BucketGroups:
    """Choose among all groups of the waiting kinds; `starts`: columns that mattered in earlier buckets."""
    most = tuple([min(count, options.max_group_size) for count in kinds.counts])
    # Only the options that columns depend on, so that the cache does not tell other options apart.
    relevant = PolicyOptions(
        max_group_size=options.max_group_size, objective=options.objective, min_speedup=options.min_speedup
    )
    columns = all_columns(kinds.kinds, most, relevant, model, problem.memory_limit_gib)
    limits = Limits(
        np.array(kinds.counts, dtype=np.float64), np.array(kinds.urgent, dtype=np.float64), float(problem.slots)
    )
    alike = (kinds.kinds, problem.memory_limit_gib, most)
    choice = choose_columns(columns, limits, starts.get(alike))
    starts[alike] = choice.seen
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
        groups, value = _improved(problem, groups, options, model)
    return _answer(problem, groups, Certificate(value, max(value, choice.upper_bound)))


def _improved(
    problem: BucketProblem, groups: Sequence[Members], options: PolicyOptions, model: SpeedModel
) -> tuple[list[Members], float]:
    """The new groups after exchanges without the open units, and their value."""
    found = Exchange(replace(problem, open_units=()), options, model).improve(groups, _left_over(problem, groups))
    return list(found.groups), found.value


def _of_rounds(problem: BucketProblem, bucket: Rounds, options: PolicyOptions, model: SpeedModel) -> BucketGroups:
    units = bucket.units if options.merge == "whole-rounds" else bucket.chosen()
    groups, value = [unit.members for unit in units], sum(unit.value for unit in units)
    if options.grouping == "optimal" and len(groups) > 1:
        groups, value = _improved(problem, groups, options, model)
    slots = max(problem.slots, len(units))
    bound = _bound(bucket.kinds.kinds, bucket.kinds.counts, options, model, slots=slots)
    return _answer(problem, groups, Certificate(value, max(value, bound)))


def _answer(problem: BucketProblem, groups: Sequence[Members], certificate: Certificate) -> BucketGroups:
    return BucketGroups(tuple(sorted(groups)), _left_over(problem, groups), certificate)


def _left_over(problem: BucketProblem, groups: Sequence[Members]) -> Members:
    """The jobs in no group, ascending."""
    return tuple(sorted(set(range(len(problem.jobs))).difference(*groups)))


def _bound(
    kinds: Sequence[Kind], counts: Sequence[int], options: PolicyOptions, model: SpeedModel, *, slots: int
) -> float:
    """An upper bound on the value of any grouping of these jobs; a coarse one without `certify`.

    A group's members hold a resource for at most the time that passes, Σ_i s_i·u_i^j ≤ 1, where u_i^j is the share of
    its iteration during which job i uses resource j, and no member is faster than alone. A job that may be in groups of
    up to k takes at least 1/k of one. Summed over all groups these limits are a linear program over kinds.
    """
    coefficient, jobs = coefficients(kinds, options.objective), np.array(counts, dtype=np.float64)
    if not options.certify:
        return float(jobs @ coefficient)
    if not kinds or slots < 1:
        return 0.0
    largest = np.array([min(kind.largest, options.max_group_size) for kind in kinds])
    rows, right = [largest.max() / largest], [float(largest.max() * slots)]
    if model.name in _PHYSICAL_MODELS:
        shapes = [kind.shape for kind in kinds]
        usage = np.array([shape.stage_s for shape in shapes]) / np.array([[shape.iteration_s] for shape in shapes])
        rows += list(usage.T)
        right += [float(slots)] * usage.shape[1]
    return linear_value(coefficient, csc_array(np.array(rows)), np.array(right), jobs)
