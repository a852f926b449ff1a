"""Theorem 1 of SJF-BSBF: a job joins another now or after it, whatever takes less time on average."""

import numpy as np
import pytest
from completions import completions
from hypothesis import given
from hypothesis import strategies as st

from muri.policies.wise_sharing.partners import mean_after, mean_now

seconds = st.floats(1, 1e6)
slowdowns = st.floats(1, 10)


def test_a_pair_worked_by_hand():
    """A needs 100 s, B 50 s, both run at two thirds beside each other.

    Now: B ends at 75, by when A has done 50 of its 100, and ends at 125. After: A ends at 100, B at 150.
    """
    assert completions(100.0, 50.0, 1.5, 1.5) == (125.0, 75.0)
    assert completions(100.0, 50.0, 1.5, 1.5, insert_s=100.0) == (100.0, 150.0)
    assert (mean_now(100.0, 50.0, 1.5, 1.5), mean_after(100.0, 50.0)) == (100.0, 125.0)
    # A joins 80 s later: B has done 20 when A ends at 110, and ends at 140.
    assert completions(100.0, 50.0, 1.5, 1.5, insert_s=80.0) == pytest.approx((110.0, 140.0))


@given(seconds, seconds, slowdowns, slowdowns)
def test_no_time_of_joining_beats_now_and_after(running_s, joining_s, running_xi, joining_xi):
    best = min(
        completions(running_s, joining_s, running_xi, joining_xi, insert_s).mean_s
        for insert_s in np.linspace(0, running_s, 101)
    )
    now, after = mean_now(running_s, joining_s, running_xi, joining_xi), mean_after(running_s, joining_s)
    assert min(now, after) == pytest.approx(best)
    assert now == pytest.approx(completions(running_s, joining_s, running_xi, joining_xi).mean_s)
