"""Pairs that slow nobody: where enough of them can form, every job runs at full speed, and nothing can be better."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from muri.policies.grouping.problem import Appraiser, BucketProblem, Kind, Members
from muri.policies.matching.certified import match_dense
from muri.policies.matching.solve import match_types
from muri.policies.options import PolicyOptions
from muri.policies.speed.model import Indices, SpeedModel

_ROUNDING = 1e-9
"""Relative loss that is only rounding."""

_REMEMBERED_KINDS = 32
"""Kinds of a bucket whose pairs are remembered from plan to plan: 256 KiB at most."""

_MANY = 60
"""Above so many jobs matching works on kinds."""


def unslowed_groups(problem: BucketProblem, options: PolicyOptions, model: SpeedModel) -> tuple[Members, ...] | None:
    """Fit all jobs into the slots at full speed, by no more pairs than it takes.

    The least urgent jobs share: should a prediction prove wrong, that costs least.

    Args:
        problem: The jobs, more of them than there are slots, and the slots.
        options: Objective, margin and group size.
        model: How fast members are.

    Returns:
        The groups, single jobs among them; None where pairs alone do not do it.
    """
    wanted = len(problem.jobs) - problem.slots
    if 2 * wanted > len(problem.jobs):
        return None
    # Worth does not matter where nobody loses anything.
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
    """As many pairs as there can be."""
    if len(kind_of) <= _MANY:
        return list(match_dense(harmless[np.ix_(kind_of, kind_of)].astype(np.float64)).pairs)
    counts = np.bincount(kind_of, minlength=len(harmless)).tolist()
    queues = [iter(np.flatnonzero(kind_of == kind).tolist()) for kind in range(len(harmless))]
    found = match_types(harmless.astype(np.float64), counts).pairs
    pairs = [(next(queues[one]), next(queues[other])) for one, other, count in found for _ in range(count)]
    return [(min(pair), max(pair)) for pair in pairs]
