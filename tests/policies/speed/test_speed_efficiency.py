"""Eq. 3 and 4 against figures worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speed_builders import interleaving_efficiency, rotation_period

from muri.policies.speed.lockstep import period_s

stages = st.tuples(*[st.floats(0, 10)] * 4)


def test_two_jobs_of_two_unit_stages_fill_two_slots():
    # One computes while the other preprocesses, then they swap: neither resource ever idles.
    jobs = [(1.0, 1.0), (1.0, 1.0)]
    assert period_s(jobs) == 2.0
    assert interleaving_efficiency(jobs, 2.0) == 1.0


def test_two_jobs_that_complement_each_other_have_efficiency_one():
    # Slots: max(A0, B1) = max(2, 2), max(A1, B0) = max(1, 1): nobody waits.
    jobs = [(2.0, 1.0), (1.0, 2.0)]
    assert period_s(jobs) == 3.0
    assert interleaving_efficiency(jobs, 3.0) == 1.0


def test_two_jobs_with_the_same_bottleneck_have_efficiency_three_quarters():
    # Slots: max(2, 1) + max(1, 2) = 4; resource 0 is busy for 4 of 4 seconds, resource 1 for 2 of 4.
    jobs = [(2.0, 1.0), (2.0, 1.0)]
    assert period_s(jobs) == 4.0
    assert interleaving_efficiency(jobs, 4.0) == 0.75


def test_four_jobs_that_each_fill_one_slot_use_every_resource_all_the_time():
    # In slot 0 position i holds resource i, so all four unit stages meet in that one slot.
    jobs = [(1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)]
    assert period_s(jobs) == 1.0
    assert interleaving_efficiency(jobs, 1.0) == 1.0


def test_four_equal_jobs_of_four_unit_stages_fill_four_slots():
    jobs = [(1.0, 1.0, 1.0, 1.0)] * 4
    assert period_s(jobs) == 4.0
    assert interleaving_efficiency(jobs, 4.0) == 1.0


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


def test_positions_may_leave_a_gap():
    # Half a turn apart slot 0 holds A0 with B2, slot 1 A1 with B3, and nothing is left for the others.
    a, b = (1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 1.0)
    assert period_s([a, b]) == 3
    assert period_s([a, b], positions=(0, 2)) == 2
    assert period_s([b, a], positions=(2, 0)) == 2


def test_nobody_uses_anything():
    assert interleaving_efficiency([(0.0, 0.0)], 0.0) == 0.0


@given(st.lists(stages, min_size=4, max_size=4), st.integers(0, 3))
def test_turning_a_full_group_changes_nothing(members, turn):
    assert period_s(members[turn:] + members[:turn]) == pytest.approx(period_s(members))


@given(st.lists(stages, min_size=1, max_size=4))
def test_the_formula_is_a_rotation_step_by_step(members):
    assert period_s(members) == pytest.approx(rotation_period([*members, *[None] * (4 - len(members))]))
