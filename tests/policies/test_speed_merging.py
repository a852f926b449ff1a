"""Tables of merged pairs against single evaluations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from speed_builders import every_period, shape, shapes

from muri.policies.speed.merging import interleave, merge_table
from muri.profiler.records import ProfileError

kinds_strategy = st.lists(st.lists(shapes(), min_size=1, max_size=3), min_size=1, max_size=5)


@given(st.lists(shapes(), min_size=1, max_size=4))
def test_the_chosen_ordering_is_the_best_of_all(members):
    assert interleave(members).period_s == pytest.approx(min(every_period(members)))
    assert interleave(members, worst=True).period_s == pytest.approx(max(every_period(members)))


@given(kinds_strategy, st.booleans())
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


def test_no_more_members_than_resources():
    with pytest.raises(ProfileError, match="1 to 4 members"):
        interleave([shape(1, 1, 1, 1)] * 5)
    with pytest.raises(ProfileError, match="not 0"):
        interleave([])
