"""The fair model: feasible, max-min fair, work-conserving, and below the linear program's bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csc_array
from speed_builders import one_group, shape, shapes

from muri.policies.grouping.solvers import linear_value
from muri.policies.lockstep import Lockstep
from muri.policies.speed import Fair, SpeedModelError, figures_of

members_strategy = st.lists(shapes(), min_size=1, max_size=5)
ROUNDING = 1e-9


def share_of(members):
    """u_i^j, one row per member."""
    return np.array([[min(1.0, stage / m.iteration_s) for stage in m.stage_s] for m in members])


def throughput_bound(members):
    """Greatest total speed of any way of sharing: a linear program, which may starve a member."""
    share, ones = figures_of(members).share, np.ones(len(members))
    return linear_value(ones, csc_array(share), np.ones(len(share)), ones)


def speeds(members):
    return Fair().evaluate(members, one_group(len(members))).speed[0]


def test_whoever_does_not_want_the_full_resource_goes_on():
    # Resource 0 is full at speed 1/2 for both of its users. The third is limited by resource 1
    # alone, of which the second takes 0.5 × 0.5.
    members = [shape(2, 0, iteration_s=2), shape(2, 1, iteration_s=2), shape(0, 1.5, iteration_s=2)]
    assert speeds(members) == pytest.approx([0.5, 0.5, 1.0])
    found = Fair().evaluate(members, one_group(3))
    assert found.efficiency[0] == pytest.approx((1.0 + 1.0) / 2)
    assert np.isnan(found.period_s[0])


def test_resources_fill_one_after_the_other():
    # All rise to 1/3, where resource 0 is full (three users). The fourth goes on until resource 1 is:
    # 1/3 · 0.6 + s · 1 = 1.
    members = [shape(1, 0), shape(1, 0), shape(1, 0.6, iteration_s=1), shape(0, 1)]
    assert speeds(members) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.8])


def test_a_trace_of_a_full_resource_stops_nobody_completely():
    # Resources 2 and 3 fill together at 3/7, up to rounding; what rounding leaves of the
    # last one must not be all that the fourth member gets.
    third = 1 / 3
    members = [
        shape(0.9999, third, third, third, iteration_s=1),
        shape(0, 0, 1, 1, iteration_s=1),
        shape(0, third, 2 * third, 1, iteration_s=1),
        shape(third, 2 * third, 0, 1e-16, iteration_s=1),
        shape(0, 2 * third, third, 0, iteration_s=1),
    ]
    assert speeds(members) == pytest.approx([3 / 7] * 5)


def test_it_beats_lockstep_for_short_iterations():
    # In lockstep the short job waits for the long one's iteration, here it runs as often as it can.
    members = [shape(5, 5), shape(0.1, 0.1)]
    lockstep = Lockstep().evaluate(members, one_group(2)).speed[0]
    assert lockstep == pytest.approx([10 / 10, 0.2 / 10])
    assert speeds(members) == pytest.approx([1.0, 1.0])


@given(st.lists(shapes(shortest=0.01), min_size=2, max_size=5))
def test_nobody_can_gain_but_at_the_cost_of_somebody_no_faster(members):
    # The definition of max-min fairness by bottlenecks: each job below 1 uses a full resource, and
    # none of that resource's users is faster.
    found, share = speeds(members), share_of(members)
    full = found @ share >= 1 - ROUNDING
    for member, speed in enumerate(found):
        if speed < 1 - ROUNDING:
            bottlenecks = [j for j in np.flatnonzero(full) if share[member, j] > 0]
            assert any(found[share[:, j] > 0].max() <= speed + ROUNDING for j in bottlenecks)


@given(members_strategy)
def test_speeds_are_feasible_and_the_linear_program_bounds_fair_and_lockstep(members):
    bound, found = throughput_bound(members), Fair().evaluate(members, one_group(len(members)))
    used = found.speed[0] @ share_of(members)
    assert ((found.speed > 0) & (found.speed <= 1)).all()
    assert (used <= 1 + ROUNDING).all()
    assert found.efficiency[0] == pytest.approx(used.mean(), abs=1e-9)
    assert bound <= len(members) + ROUNDING
    assert speeds(members).sum() <= bound + 1e-6
    if len(members) <= 4:
        for model in (Lockstep(), Lockstep("worst")):
            lockstep = model.evaluate(members, one_group(len(members))).speed[0]
            assert (lockstep @ share_of(members) <= 1 + ROUNDING).all()
            assert lockstep.sum() <= bound + 1e-6


def test_the_linear_program_may_starve_a_member():
    # The job that uses both resources costs two others their speed.
    members = [shape(1, 1, iteration_s=1), shape(1, 0), shape(0, 1)]
    assert throughput_bound(members) == pytest.approx(2.0)
    assert speeds(members) == pytest.approx([0.5, 0.5, 0.5])


def test_more_members_than_can_share_a_gpu_are_refused():
    with pytest.raises(SpeedModelError, match="65 members; it must have 1 to 64"):
        Fair().evaluate([shape(1, 1)], np.zeros((1, 65), dtype=np.intp))
