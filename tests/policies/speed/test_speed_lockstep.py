"""The lockstep model against every ordering tried one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speed_builders import every_period, interleaving_efficiency, one_group, rotation_period, shape, shapes

from muri.policies.lockstep import Lockstep, period_s
from muri.policies.speed import Shape, SpeedModelError
from muri.profiler.records import ProfileError

LOCKSTEP = Lockstep()
MODELS = [Lockstep(ordering) for ordering in ("best", "worst")]
groups = st.integers(1, 6).flatmap(
    lambda resources: st.lists(shapes(resources), min_size=1, max_size=min(resources, 5 if resources < 6 else 4))
)


def evaluate(members, model=LOCKSTEP):
    return model.evaluate(members, one_group(len(members)))


@pytest.mark.parametrize("model", MODELS, ids=str)
@settings(max_examples=60)
@given(members=groups)
def test_the_period_is_that_of_the_best_or_worst_ordering(model, members):
    found = evaluate(members, model)
    longest = max(member.iteration_s for member in members)
    extreme = (max if model.ordering == "worst" else min)(every_period(members))
    period = max(extreme, longest) if len(members) > 1 else longest
    assert found.period_s[0] == pytest.approx(period, rel=1e-12)
    assert found.speed[0] == pytest.approx([member.iteration_s / period for member in members], rel=1e-12)
    stages = [member.stage_s for member in members]
    if len(members) > 1:
        assert found.efficiency[0] == pytest.approx(interleaving_efficiency(stages, found.period_s[0]), abs=1e-12)
    order = model.order(members)
    assert sorted(order) == list(range(len(members)))
    assert period_s(stages, [order.index(index) for index in range(len(members))]) == pytest.approx(extreme, rel=1e-9)


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 4), min_size=1, max_size=4))
def test_the_formula_is_a_rotation_step_by_step(members):
    assert period_s(members) == pytest.approx(rotation_period([*members, *[None] * (4 - len(members))]))


@pytest.mark.parametrize(
    ("jobs", "period", "efficiency"),
    [
        # One computes while the other preprocesses, then they swap: neither resource ever idles.
        ([(1.0, 1.0), (1.0, 1.0)], 2.0, 1.0),
        # Slots: max(A0, B1) = max(2, 2), max(A1, B0) = max(1, 1): no job waits.
        ([(2.0, 1.0), (1.0, 2.0)], 3.0, 1.0),
        # Slots: max(2, 1) + max(1, 2) = 4; resource 0 is busy for 4 of 4 seconds, resource 1 for 2 of 4.
        ([(2.0, 1.0), (2.0, 1.0)], 4.0, 0.75),
        # A first: slot 0 holds both long stages (A0 with B1), so 3 + 1 + 1 + 1.
        ([(3.0, 1.0, 1.0, 1.0), (1.0, 3.0, 1.0, 1.0)], 6.0, 0.5),
        # B first: they fall into slots 1 (B1) and 3 (A0), so 1 + 3 + 1 + 3.
        ([(1.0, 3.0, 1.0, 1.0), (3.0, 1.0, 1.0, 1.0)], 8.0, 0.375),
    ],
)
def test_eq_3_and_4_by_hand(jobs, period, efficiency):
    assert period_s(jobs) == period
    assert interleaving_efficiency(jobs, period) == efficiency


def test_members_advance_at_one_rate():
    # Period 6 with iterations of 6 and 3 seconds: the short job runs at half speed.
    found = evaluate([shape(3, 1, 1, 1), shape(0, 3, 0, 0)])
    assert found.period_s[0] == 6
    assert found.speed[0].tolist() == [1.0, 0.5]


def test_an_iteration_longer_than_its_stages_holds_the_others_up():
    # Eq. 3 alone would give 1 second; the first job's iterations take 10, busy for 2 s of 4 × 10.
    found = evaluate([shape(1, 0, 0, 0, iteration_s=10), shape(0, 1, 0, 0)])
    assert found.period_s[0] == 10
    assert found.speed[0].tolist() == [1.0, 0.1]
    assert found.efficiency[0] == pytest.approx(2 / 40)


def test_a_job_alone_runs_as_fast_as_alone_even_if_it_overlaps_its_own_stages():
    found = evaluate([shape(3, 1, 4, 0, iteration_s=4)])
    assert found.speed[0].tolist() == [1.0]
    assert found.period_s[0] == 4
    assert found.efficiency[0] == pytest.approx(0.5)


def test_a_pair_cannot_run_half_a_turn_apart():
    # One needs storage and CPU, the other GPU and network: side by side they wait for each other, as in the paper.
    assert evaluate([shape(1, 1, 0, 0), shape(0, 0, 1, 1)]).period_s[0] == 3.0


def test_equal_members_keep_the_order_given():
    for size in (2, 3, 4):
        for model in MODELS:
            assert model.order([shape(1, 2, 3, 4)] * size) == tuple(range(size))


def test_rounding_does_not_decide_between_orderings():
    # Turning a pair by hand gives the same period up to rounding; the first way wins on both sides of it.
    base = (0.1, 0.2, 0.3, 0.7)
    for digit in (-1e-15, 0.0, 1e-15):
        members = [shape(*base), shape(*(value + digit for value in base))]
        assert Lockstep().order(members) == (0, 1)


def test_members_that_use_nothing():
    found = evaluate([shape(0, 0, iteration_s=2), shape(0, 0, iteration_s=1)])
    assert found.speed[0].tolist() == [1.0, 0.5]
    assert found.efficiency[0] == 0


@pytest.mark.parametrize(
    ("stage_s", "iteration_s", "message"),
    [
        ((1.0, -1.0), 1.0, r"shape 1 \(bert\): time of stage 1 is -1.0; it must be ≥ 0"),
        ((float("nan"), 1.0), 1.0, r"shape 1 \(bert\): time of stage 0 is nan"),
        ((1.0, float("inf")), 1.0, r"shape 1 \(bert\): time of stage 1 is inf"),
        ((1.0, 1.0), 0.0, r"shape 1 \(bert\): iteration time is 0.0; it must be > 0"),
        ((1.0, 1.0), float("nan"), r"shape 1 \(bert\): iteration time is nan"),
    ],
)
def test_impossible_times_are_refused(stage_s, iteration_s, message):
    wrong = Shape(stage_s, iteration_s, 0.0, "bert")
    with pytest.raises(ProfileError, match=message):
        evaluate([shape(1, 1), wrong])
    with pytest.raises(ProfileError, match=message):
        Lockstep().order([shape(1, 1), wrong])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 0, 0]], "a group has 3 members; it must have 1 to 2"),
        (np.empty((1, 0), dtype=np.intp), "a group has 0 members; it must have 1 to 2"),
        ([[0, 2]], "groups name shape 2; there are shapes 0 to 1"),
        ([[-1, 0]], "groups name shape -1"),
        ([0, 1], "two-dimensional array of indices, not 1-d"),
        ([[0.5, 1.0]], "two-dimensional array of indices, not 2-d float64"),
    ],
)
def test_malformed_groups_are_refused(rows, message):
    with pytest.raises(SpeedModelError, match=message):
        Lockstep().evaluate([shape(1, 1), shape(1, 2)], np.array(rows))


def test_malformed_shapes_are_refused():
    with pytest.raises(SpeedModelError, match="no shapes"):
        Lockstep().order([])
    with pytest.raises(SpeedModelError, match=r"same number of stages, at least 1; these have \[2, 3\]"):
        evaluate([shape(1, 1), shape(1, 1, 1)])
    with pytest.raises(SpeedModelError, match=r"\[0\]"):
        evaluate([shape(iteration_s=1)])
    with pytest.raises(SpeedModelError, match="7 stages; this model takes at most 6"):
        evaluate([shape(*[1] * 7)])
    with pytest.raises(SpeedModelError, match="3 members; it must have 1 to 2"):
        Lockstep().order([shape(1, 1)] * 3)
