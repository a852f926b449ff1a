"""Speed models by name, and what holds for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speed_builders import one_group, shape, shapes

from muri.policies.lockstep import speed_model
from muri.policies.options import SPEED_MODELS, OptionsError
from muri.policies.speed import CHUNK, SpeedModelError
from muri.policies.traits import InterferenceTable, PairSpeed
from muri.profiler.records import ProfileError

TABLE = InterferenceTable((PairSpeed("a", "b", 0.9, 0.4), PairSpeed("a", "a", 0.5, 0.5)))


@pytest.mark.parametrize("name", SPEED_MODELS)
@pytest.mark.parametrize("ordering", ["best", "worst"])
@given(members=st.lists(shapes(), min_size=1, max_size=4))
def test_every_model_keeps_the_contract(name, ordering, members):
    model = speed_model(name, ordering=ordering, table=TABLE)
    assert model.name == name
    found = model.evaluate(members, one_group(len(members)))
    assert found.speed.shape == (1, len(members))
    assert ((found.speed > 0) & (found.speed <= 1)).all()
    assert 0 <= found.efficiency[0] <= 1
    assert np.isnan(found.period_s[0]) or found.period_s[0] > 0
    assert sorted(model.order(members)) == list(range(len(members)))
    if len(members) == 1:
        assert found.speed.tolist() == [[1.0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("ordering", ["best", "worst"])
@pytest.mark.parametrize("name", SPEED_MODELS)
def test_many_groups_are_evaluated_as_single_ones(name, ordering, size):
    model, rng = speed_model(name, ordering=ordering, table=TABLE), np.random.default_rng(11)
    # Some pairs of "measured" are in the table, others are not, and groups of both kinds do not mix.
    distinct = [shape(*row, model="abc"[number % 3]) for number, row in enumerate(rng.random((40, 4)).tolist())]
    rows = rng.integers(0, 40, (2 * CHUNK + 17, size))
    many = model.evaluate(distinct, rows)
    assert many.speed.shape == rows.shape
    for row in (*range(40), CHUNK - 1, CHUNK, 2 * CHUNK, len(rows) - 1):
        single = model.evaluate([distinct[index] for index in rows[row]], one_group(size))
        np.testing.assert_array_equal(many.speed[row], single.speed[0])
        assert many.efficiency[row] == single.efficiency[0]
        np.testing.assert_array_equal(many.period_s[row], single.period_s[0])


@pytest.mark.parametrize("name", SPEED_MODELS)
@pytest.mark.parametrize(
    ("shapes", "rows", "error", "message"),
    [
        ([shape(1, 1, 1, 1), shape(1, 1, -1, 1)], [[0, 1]], ProfileError, "shape 1: time of stage 2 is -1"),
        ([shape(1, 1, 1, 1, iteration_s=0)], [[0, 0]], ProfileError, "shape 0: iteration time is 0"),
        ([], [[0]], SpeedModelError, "no shapes"),
        ([shape(1, 1, 1, 1)], [[0] * 65], SpeedModelError, "65 members; it must have 1 to "),
    ],
)
def test_what_no_model_can_evaluate_is_refused(name, shapes, rows, error, message):
    with pytest.raises(error, match=message):
        speed_model(name, table=TABLE).evaluate(shapes, np.array(rows))


def test_measured_falls_back_to_lockstep_of_the_same_ordering():
    members = [shape(3, 1, 1, 1), shape(1, 3, 1, 1)]
    found = speed_model("measured", ordering="worst", table=TABLE).evaluate(members, one_group(2))
    expected = speed_model("lockstep", ordering="worst").evaluate(members, one_group(2))
    np.testing.assert_array_equal(found.speed, expected.speed)


def test_an_unknown_name_is_refused_with_the_valid_ones():
    with pytest.raises(OptionsError, match="'fast'; valid are: lockstep, fair, measured, reference"):
        speed_model("fast")


def test_measured_needs_a_table():
    with pytest.raises(SpeedModelError, match="needs a table of measured pairs"):
        speed_model("measured")


@pytest.mark.parametrize("name", ["lockstep", "reference", "measured"])
def test_an_unknown_ordering_is_refused(name):
    with pytest.raises(OptionsError, match="ordering is 'random'; valid are: best, worst"):
        speed_model(name, ordering="random", table=TABLE)
