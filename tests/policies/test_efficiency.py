"""Eq. 3 and 4 against figures worked out by hand, and the vectorised form against the plain one."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.policies.speed.lockstep import (
    Shape,
    interleave,
    interleaving_efficiency,
    merge_table,
    orderings,
    period_s,
)
from muri.profiler.records import ProfileError

UNIT_JOBS = [(1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)]


def shape(*stage_s, iteration_s=None):
    return Shape(tuple(stage_s), sum(stage_s) if iteration_s is None else iteration_s, 0.0)


shapes = st.builds(
    lambda stage_s, extra: shape(*stage_s, iteration_s=sum(stage_s) * extra + 0.001),
    st.tuples(*[st.floats(0, 10)] * 4),
    st.floats(0.5, 2),
)


def test_four_jobs_that_each_fill_one_slot_use_every_resource_all_the_time():
    # In slot 0 position i holds resource i, so all four unit stages meet in that one slot.
    period = period_s(UNIT_JOBS)
    assert period == 1.0
    assert interleaving_efficiency(UNIT_JOBS, period) == 1.0


def test_four_equal_jobs_of_four_unit_stages_fill_four_slots():
    jobs = [(1.0, 1.0, 1.0, 1.0)] * 4
    assert period_s(jobs) == 4.0
    assert interleaving_efficiency(jobs, 4.0) == 1.0


def test_two_jobs_on_two_resources_with_efficiency_one():
    # Slots: max(A0, B1) = max(2, 2), max(A1, B0) = max(1, 1): nobody waits.
    jobs = [(2.0, 1.0), (1.0, 2.0)]
    assert period_s(jobs) == 3.0
    assert interleaving_efficiency(jobs, 3.0) == 1.0


def test_two_jobs_on_two_resources_with_efficiency_three_quarters():
    # Slots: max(2, 1) + max(1, 2) = 4; resource 0 is busy for 4 of 4 seconds, resource 1 for 2 of 4.
    jobs = [(2.0, 1.0), (2.0, 1.0)]
    period = period_s(jobs)
    assert period == 4.0
    assert interleaving_efficiency(jobs, period) == 0.75


def test_a_resource_that_nobody_uses_costs_a_quarter():
    jobs = [(1.0, 1.0, 1.0, 0.0)] * 4
    assert period_s(jobs) == 4.0
    assert interleaving_efficiency(jobs, 4.0) == 0.75


def test_the_ordering_decides():
    # A first: slot 0 holds both long stages (A0 with B1), so 3 + 1 + 1 + 1. B first: they fall
    # into slots 1 (B1) and 3 (A0), so 1 + 3 + 1 + 3.
    a, b = (3.0, 1.0, 1.0, 1.0), (1.0, 3.0, 1.0, 1.0)
    assert period_s([a, b]) == 6
    assert period_s([b, a]) == 8
    assert interleave([shape(*a), shape(*b)]).order == (0, 1)
    assert interleave([shape(*b), shape(*a)]).order == (1, 0)
    assert interleave([shape(*a), shape(*b)], worst=True).period_s == 8


def test_no_more_members_than_resources():
    with pytest.raises(ProfileError, match="1 to 4 members"):
        interleave([shape(1, 1, 1, 1)] * 5)
    with pytest.raises(ProfileError, match="not 0"):
        interleave([])


def test_members_advance_at_one_rate():
    # Period 6 with iterations of 6 and 3 seconds: the short job runs at half speed.
    found = interleave([shape(3, 1, 1, 1), shape(0, 3, 0, 0)])
    assert found.period_s == 6
    assert found.speed == (1.0, 0.5)


def test_an_iteration_longer_than_its_stages_holds_the_others_up():
    found = interleave([shape(1, 0, 0, 0, iteration_s=10), shape(0, 1, 0, 0)])
    assert found.period_s == 1
    assert found.speed == (1.0, 0.1)


@given(st.lists(shapes, min_size=1, max_size=4))
def test_the_chosen_ordering_is_the_best_of_all(members):
    found = interleave(members)
    stages = [member.stage_s for member in members]
    periods = [period_s(order) for order in permutations(stages)]
    assert found.period_s == pytest.approx(min(periods))
    assert interleave(members, worst=True).period_s == pytest.approx(max(periods))
    assert period_s([stages[index] for index in found.order]) == pytest.approx(found.period_s)
    assert sorted(found.order) == list(range(len(members)))


@given(st.lists(shapes, min_size=1, max_size=4))
def test_efficiency_and_speed_stay_within_their_bounds(members):
    found = interleave(members)
    assert 0 <= found.efficiency <= 1 + 1e-9
    assert all(0 < speed <= 1 for speed in found.speed)
    for resource in range(4):
        assert found.period_s >= sum(member.stage_s[resource] for member in members) - 1e-9


@given(st.lists(shapes, min_size=4, max_size=4), st.integers(0, 3))
def test_turning_a_full_group_changes_nothing(members, turn):
    stages = [member.stage_s for member in members]
    assert period_s(stages[turn:] + stages[:turn]) == pytest.approx(period_s(stages))


def test_as_few_orderings_as_can_differ():
    assert [len(orderings(size)) for size in (1, 2, 3, 4)] == [1, 2, 6, 6]


@given(st.lists(st.lists(shapes, min_size=1, max_size=3), min_size=1, max_size=5), st.booleans())
def test_the_table_says_what_single_evaluations_say(kinds, worst):
    table = merge_table(kinds, worst=worst)
    for row, first in enumerate(kinds):
        for column, second in enumerate(kinds):
            if len(first) + len(second) > 4:
                assert np.isnan(table.efficiency[row, column])
                continue
            single = interleave([*first, *second], worst=worst)
            assert table.efficiency[row, column] == pytest.approx(single.efficiency, abs=1e-9)
            assert table.total_speed[row, column] == pytest.approx(sum(single.speed))


def test_a_large_table_is_computed_in_pieces():
    rng = np.random.default_rng(7)
    kinds = [(shape(*row),) for row in rng.random((400, 4)).round(3)]  # 160,000 cells: several chunks
    table = merge_table(kinds)
    for row, column in ((0, 399), (399, 0), (250, 251), (17, 17)):
        single = interleave([*kinds[row], *kinds[column]])
        assert table.efficiency[row, column] == pytest.approx(single.efficiency)
    np.testing.assert_allclose(table.total_speed, table.total_speed.T)
