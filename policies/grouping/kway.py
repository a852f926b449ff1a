"""Choosing among all groups at once: the exact formulation, with a proven bound.

A group is a multiset of kinds, a *column* c with value v_c and m_ct members of kind t. With x_c groups
of each,

    max Σ_c v_c·x_c   subject to   u_t ≤ Σ_c m_ct·x_c ≤ n_t for every kind t,   Σ_c x_c ≤ slots,

where n_t jobs of a kind wait and u_t of them are too urgent to be left out. The linear relaxation
is solved by column generation: of hundreds of thousands of columns it needs to see a few hundred.
Its prices prove the bound, in every iteration: with prices d_t for kinds and σ for a slot, no solution is
worth more than what the prices make of the limits, plus `slots` times the most profitable column.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import comb
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

from muri.policies.grouping.problem import Appraiser, Kind, coefficients
from muri.policies.grouping.solvers import LinearProgram, SolverError, solve_integer
from muri.policies.options import PolicyOptions
from muri.policies.speed import Floats, Indices, SpeedModel

_EXACT_LIMIT: Final = 1_500  # Number of columns up to which the integer program gets all of them
_FEW_SLOTS: Final = 4
_FEW_CHOICES: Final = 1_000  # Choices for so few slots are tried one by one, which is faster than a program
_TOLERANCE: Final = 1e-5  # Relative gap at which the relaxation counts as solved
_PROFIT: Final = 1e-10  # Smallest reduced profit that counts
_CONSIDERED: Final = 4_000  # The most profitable columns, some of which join the relaxation
_PROMISING: Final = 20_000  # Of more columns, only the most profitable are priced until none of them helps
_ROUNDING: Final = 1e-7  # Distance from whole numbers at which a solution of the relaxation counts as whole
_NEW_PER_KIND: Final = 6  # Columns that join in one iteration for each kind, so that all kinds get new partners
_NEAR_COLUMNS: Final = (150, 800)  # Columns of a small integer program; the larger number where the gap stays wide
_SMALL_SLOTS: Final = 60  # Above, the integer program only decides on the groups that the relaxation leaves
_LEFT_OVER_COLUMNS: Final = (1, 3)  # The same per kind, in the integer program for what the relaxation leaves
_SEEN: Final = 3  # Columns for each kind that a similar problem begins with
_GOOD_GAP: Final = 5e-3  # Relative gap up to which a solution is good enough
_GAP: Final = 3e-3  # Relative gap at which the integer program may stop
_NODES: Final = 50  # Most branches of the integer program: a limit that, unlike seconds, is the same on every machine
_EXACT_NODES: Final = 1_000  # The same over all columns; of 6,000 random programs none took more than five
_LISTINGS: Final = 8  # Cached listings of groups, for a few GPU counts; the largest take 12 MiB
_ITERATIONS: Final = 200  # More than was ever needed; the bound is valid wherever it stops
Places = NDArray[np.uint16]  # Kinds of groups' members, in two bytes each: there may be a million groups, of few kinds


@dataclass(frozen=True, slots=True)
class Columns:
    """Groups (multisets of kinds) as the columns of an integer program.

    Attributes:
        kinds: Number of kinds; also the index that fills the unused places of `members`.
        members: Array (n, k): the kinds of a group's members, ascending.
        value: Array (n,): value of each group.
    """

    kinds: int
    members: Places
    value: Floats

    def take(self, which: Indices) -> "Columns":
        """Some of the columns."""
        return Columns(self.kinds, self.members[which], self.value[which])

    def profits(self, price: Floats, slot_price: float) -> Floats:
        """Reduced profit of every column: its value less the prices of its jobs and its slot."""
        padded = np.append(price, 0.0)
        profit = self.value - slot_price
        for place in range(self.members.shape[1]):
            profit -= padded.take(self.members[:, place])
        return profit


def column_count(kinds: int, max_size: int) -> int:
    """Number of groups of up to `max_size` members that can be formed from `kinds` kinds."""
    return comb(kinds + max_size, max_size) - 1


@lru_cache(maxsize=16)
def multisets(kinds: int, size: int) -> Places:
    """Array (n, size) of all multisets of `size` out of `kinds`, rows ascending and in lexical order."""
    if size == 1:
        return np.arange(kinds, dtype=np.uint16)[:, None]
    rest = multisets(kinds, size - 1)
    # Rows of `rest` that start at or after kind f are its tail from `first_row[f]` on.
    first_row = np.searchsorted(rest[:, 0], np.arange(kinds))
    lengths = len(rest) - first_row
    rows = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths) + np.repeat(first_row, lengths)
    return np.concatenate([np.repeat(np.arange(kinds, dtype=np.uint16), lengths)[:, None], rest[rows]], axis=1)


def all_columns(
    kinds: Sequence[Kind], most: Sequence[int], options: PolicyOptions, model: SpeedModel, memory_limit_gib: float
) -> Columns:
    """Every single job, and every group that its members' limits (`most` of each kind) and the memory allow and that
    is worth sharing for.
    """
    alike = tuple([kind._replace(worth=1.0) for kind in kinds])
    listing = _listing(alike, tuple(most), options, model, memory_limit_gib)
    if options.objective != "jct":
        return Columns(len(kinds), listing.members, listing.value.take(listing.form))
    coefficient = np.append(coefficients(kinds, options.objective), 0.0)
    value = np.zeros(len(listing.form))
    for place in range(listing.members.shape[1]):
        value += listing.speed[:, place].take(listing.form) * coefficient.take(listing.members[:, place])
    return Columns(len(kinds), listing.members, value)


class _Listing(NamedTuple):
    """All groups, whatever their members are worth: as jobs go on, it stays the same in plan after plan.

    Attributes:
        members: As in `Columns`.
        form: Array (n,): groups of equal form differ in nothing but their members' worths.
        speed: Array (forms, k): speeds of the members, 0 in unused places.
        value: Array (forms,): value of a group of members that are worth 1.
    """

    members: Places
    form: Indices
    speed: Floats
    value: Floats


@lru_cache(maxsize=_LISTINGS)
def _listing(
    kinds: tuple[Kind, ...], most: tuple[int, ...], options: PolicyOptions, model: SpeedModel, memory_limit_gib: float
) -> _Listing:
    distinct = sorted(set(kinds))
    number = {kind: index for index, kind in enumerate(distinct)}
    kind_of = np.array([number[kind] for kind in kinds], dtype=np.intp)
    appraiser, width = Appraiser(distinct, options, model, memory_limit_gib), options.max_group_size
    members, form, speed, value = [], [], [], []
    forms = 0
    for size in range(1, width + 1):
        groups = multisets(len(kinds), size)
        groups = groups[_possible(groups, np.array(most))]
        code = np.zeros(len(groups), dtype=np.int64)
        for place in range(size):
            code = code * len(distinct) + kind_of[groups[:, place]]
        _, first, form_of = np.unique(code, return_index=True, return_inverse=True)
        of_form = kind_of[groups[first]]
        appraisal = appraiser.appraise(of_form)
        if size > 1:
            forming = appraiser.pays(appraisal) & appraiser.fits(of_form)
            chosen = forming[form_of]
            groups, form_of = groups[chosen], form_of[chosen]
        members.append(np.pad(groups, ((0, 0), (0, width - size)), constant_values=len(kinds)))
        form.append(form_of.astype(np.int32) + np.int32(forms))
        speed.append(np.pad(appraisal.speed, ((0, 0), (0, width - size))))
        value.append(appraisal.value)
        forms += len(first)
    return _Listing(np.concatenate(members), np.concatenate(form), np.concatenate(speed), np.concatenate(value))


def _possible(groups: Places, most: Indices) -> NDArray[np.bool_]:
    """Which groups have no more members of any kind than they may."""
    possible = np.ones(len(groups), dtype=np.bool_)
    for repeats in range(2, groups.shape[1] + 1):
        # Members ascend, so equal kinds are neighbors.
        for start in range(groups.shape[1] - repeats + 1):
            same = groups[:, start] == groups[:, start + repeats - 1]
            possible &= ~(same & (most[groups[:, start]] < repeats))
    return possible


@dataclass(frozen=True, slots=True)
class Limits:
    """The right-hand sides: jobs of each kind, how many of them must be in a group, and most groups."""

    counts: Floats
    urgent: Floats
    slots: float

    def less(self, used: Floats) -> "Limits":
        """The limits without some groups that are decided, which use these jobs of each kind and, last, slots."""
        jobs = used[:-1]
        return Limits(self.counts - jobs, np.maximum(self.urgent - jobs, 0.0), self.slots - float(used[-1]))


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of groups of each column, and the proven bound.

    Attributes:
        columns: Indices of the columns that are used, ascending.
        counts: How often each is.
        value: Sum of their values.
        upper_bound: Bound on the value of any choice.
        seen: The columns that mattered, a good start for a similar problem over the same columns.
    """

    columns: Indices
    counts: Indices
    value: float
    upper_bound: float
    seen: Indices


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """Solution of the relaxation over some of the columns."""

    which: Indices
    amount: Floats
    price: Floats
    slot_price: float
    upper_bound: float


def choose_columns(columns: Columns, limits: Limits, start: Indices | None = None) -> Choice:
    """Choose the most valuable groups; single jobs are the first `kinds` columns, `start` are columns to begin with.

    With up to about a thousand columns the choice is optimal, and so it is where the relaxation has whole numbers.
    Otherwise it comes from an integer program over the columns that matter in the relaxation.
    """
    nothing = np.empty(0, dtype=np.intp)
    if limits.slots < 1 or limits.counts.sum() == 0:
        return Choice(nothing, nothing, 0.0, 0.0, nothing)
    everything = np.arange(len(columns.value))
    if limits.slots <= _FEW_SLOTS and column_count(len(everything), int(limits.slots)) <= _FEW_CHOICES:
        return _searched(columns, limits)
    small = len(columns.value) <= _EXACT_LIMIT
    relaxed = _relax(columns, limits, everything if small else nothing if start is None else start)
    best = _already_whole(columns, relaxed)
    if best is None or best.upper_bound - best.value > _PROFIT * best.upper_bound:
        if small:
            amount, upper_bound = _integer(columns, limits, gap=0.0)
            return _choice(columns, everything, amount, min(upper_bound, relaxed.upper_bound))
        for which, amount in _attempts(columns, limits, relaxed):
            found = _choice(columns, which, amount, relaxed.upper_bound)
            best = found if best is None or found.value > best.value else best
            if best.upper_bound - best.value <= _GOOD_GAP * best.upper_bound:
                break
    assert best is not None, "there is always an attempt"
    seen = _nearest(columns.take(relaxed.which), relaxed, _SEEN * columns.kinds)
    return replace(best, seen=relaxed.which[seen])


def _searched(columns: Columns, limits: Limits) -> Choice:
    """The best of all choices, tried one by one."""
    count = len(columns.value)
    # What fills no slot comes last.
    choices = multisets(count + 1, int(limits.slots)).astype(np.intp)
    has = np.zeros((count + 1, columns.kinds), dtype=np.intp)
    has[:count] = (columns.members[:, :, None] == np.arange(columns.kinds)).sum(axis=1)
    used = has[choices].sum(axis=1)
    possible = ((used <= limits.counts) & (used >= limits.urgent)).all(axis=1)
    value = np.append(columns.value, 0.0)[choices].sum(axis=1)
    best = int(np.argmax(np.where(possible, value, -np.inf)))
    amount = np.bincount(choices[best], minlength=count + 1)[:count]
    return _choice(columns, np.arange(count), amount, float(value[best]))


def _already_whole(columns: Columns, relaxed: _Relaxed) -> Choice | None:
    """The solution of the relaxation where it is in whole numbers, as it mostly is."""
    amount = np.rint(relaxed.amount)
    if np.abs(relaxed.amount - amount).max() > _ROUNDING:
        return None
    return _choice(columns, relaxed.which, amount.astype(np.intp), relaxed.upper_bound)


def _choice(columns: Columns, which: Indices, amount: Indices, upper_bound: float) -> Choice:
    used = np.flatnonzero(amount)
    value = float(columns.value[which[used]] @ amount[used])
    return Choice(which[used], amount[used], value, max(value, upper_bound), np.empty(0, dtype=np.intp))


def _attempts(columns: Columns, limits: Limits, relaxed: _Relaxed) -> Iterator[tuple[Indices, Indices]]:
    """Columns and amounts in whole numbers, found with increasing effort."""
    if limits.slots > _SMALL_SLOTS:
        for per_kind in _LEFT_OVER_COLUMNS:
            yield _rounded(columns, limits, relaxed, per_kind)
        yield _near_integer(columns, limits, relaxed, _NEAR_COLUMNS[-1])
    else:
        for count in _NEAR_COLUMNS:
            yield _near_integer(columns, limits, relaxed, count)


def _matrix(columns: Columns) -> csc_array:
    """Array (kinds + 1, columns): members of each kind in a column, and its one slot."""
    count, width = columns.members.shape
    kind, column = columns.members.T.ravel(), np.tile(np.arange(count), width)
    real = kind < columns.kinds
    row = np.concatenate([kind[real], np.full(count, columns.kinds)])
    # Members of the same kind add up.
    cells = (row, np.concatenate([column[real], np.arange(count)]))
    return csc_array((np.ones(len(row)), cells), shape=(columns.kinds + 1, count))


def _relax(columns: Columns, limits: Limits, start: Indices) -> _Relaxed:
    """Solve the linear relaxation by column generation."""
    least = np.where(limits.urgent > 0, limits.urgent, -np.inf)
    program = LinearProgram(np.append(least, -np.inf), np.append(limits.counts, limits.slots))
    everything = np.arange(len(columns.value))
    which = new = np.union1d(np.arange(columns.kinds), start)
    priced, index = columns, everything
    best_bound = np.inf
    for _ in range(_ITERATIONS):
        joining = columns.take(new)
        program.add(joining.value, _matrix(joining))
        amount, price, value = program.solve()
        profit = priced.profits(price[:-1], price[-1])
        new = np.setdiff1d(index[_profitable(priced, profit)], which)
        if priced is columns:
            best_bound = min(best_bound, value + limits.slots * max(0.0, float(profit.max())))
            if best_bound - value <= _TOLERANCE * best_bound or not len(new):
                break
            if len(everything) > _PROMISING:
                index = np.sort(np.argpartition(-profit, _PROMISING)[:_PROMISING])
                priced = columns.take(index)
        elif not len(new):
            priced, index = columns, everything
        which = np.concatenate([which, new])
    ascending = np.argsort(which)
    return _Relaxed(which[ascending], amount[ascending], price[:-1], float(price[-1]), best_bound)


def _profitable(columns: Columns, profit: Floats) -> Indices:
    """The most profitable columns that each kind is a member of."""
    positive = np.flatnonzero(profit > _PROFIT)
    if len(positive) > _CONSIDERED:
        positive = positive[np.argpartition(-profit[positive], _CONSIDERED)[:_CONSIDERED]]
    ordered = positive[np.lexsort((positive, -profit[positive]))]
    # One entry for each place of each column, best columns first; then the first few entries of each kind.
    kind = columns.members[ordered].ravel()
    by_kind = np.argsort(kind, kind="stable")
    first = np.searchsorted(kind[by_kind], np.arange(columns.kinds + 1))
    place = np.arange(len(by_kind)) - first[kind[by_kind]]
    chosen = by_kind[(place < _NEW_PER_KIND) & (kind[by_kind] < columns.kinds)]
    return np.unique(ordered[chosen // columns.members.shape[1]])


def _near_integer(columns: Columns, limits: Limits, relaxed: _Relaxed, count: int) -> tuple[Indices, Indices]:
    """Columns and amounts: an integer program over the single jobs and the columns nearest to being profitable.

    Of the groups that the relaxation forms several times, all but the last two are taken over.
    """
    whole = np.floor(np.maximum(relaxed.amount - 2.0, 0.0) + 1e-9) * (limits.slots > _SMALL_SLOTS)
    left = limits.less(_matrix(columns.take(relaxed.which)) @ whole)
    some = np.union1d(relaxed.which[whole > 0], _nearest(columns, relaxed, count))
    amount, _ = _integer(columns.take(some), left, gap=_GAP)
    amount[np.searchsorted(some, relaxed.which[whole > 0])] += whole[whole > 0].astype(np.intp)
    return some, amount


def _rounded(columns: Columns, limits: Limits, relaxed: _Relaxed, per_kind: int) -> tuple[Indices, Indices]:
    """Columns and amounts: the whole parts of the relaxation, and an integer program for the rest."""
    mine = columns.take(relaxed.which)
    whole = np.floor(relaxed.amount + 1e-9)
    left = limits.less(_matrix(mine) @ whole)
    some = _nearest(mine, relaxed, per_kind * columns.kinds)
    share = max(left.slots, 1.0) / limits.slots
    amount, _ = _integer(mine.take(some), left, gap=min(_GAP / share, 0.05))
    whole[some] += amount
    return relaxed.which, whole.astype(np.intp)


def _nearest(columns: Columns, relaxed: _Relaxed, count: int) -> Indices:
    """The single jobs, and the columns of the greatest reduced profit."""
    profit = columns.profits(relaxed.price, relaxed.slot_price)
    if count < len(profit):
        # A stable choice among equals: by profit, then by index.
        limit = np.partition(-profit, count)[count]
        better, equal = np.flatnonzero(-profit < limit), np.flatnonzero(-profit == limit)
        nearest = np.concatenate([better, equal[: count - len(better)]])
    else:
        nearest = np.arange(len(profit))
    return np.union1d(np.arange(columns.kinds), nearest)


def _integer(columns: Columns, limits: Limits, *, gap: float) -> tuple[Indices, float]:
    """Solve the integer program over given columns: amounts, and the proven bound over these columns."""
    if limits.slots < 1:
        return np.zeros(len(columns.value), dtype=np.intp), 0.0
    solution = solve_integer(
        columns.value,
        _matrix(columns),
        np.append(limits.urgent, 0.0),
        np.append(limits.counts, limits.slots),
        gap=gap,
        nodes=_NODES if gap else _EXACT_NODES,
    )
    if solution.amount is None:
        raise SolverError("HiGHS found no grouping, although every job alone is one")
    return solution.amount, solution.upper_bound
