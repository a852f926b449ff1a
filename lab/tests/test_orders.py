"""The Gittins index, and Tiresias' queues by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import QUEUE, order, queue, tiresias

from muri_lab.policies.orders import GittinsIndex


def test_gittins_prefers_who_is_about_to_finish():
    # Half of the past jobs needed 200 GPU-seconds. Job 1 has had 150 and may end after 50 more, job 3 after 100 more:
    #   job 1: 1 of 2 ends within 50, on average 50 are spent: 1 / (50 + 50)   = 0.0100
    #   job 3: 1 of 2 ends within 100:                         1 / (100 + 100) = 0.0050
    policy = tiresias("tiresias-gittins", service_history_gpu_s=(200.0, 5000.0))
    assert GittinsIndex((200.0, 5000.0)).at(150.0) == pytest.approx(0.01)
    assert GittinsIndex((5000.0, 200.0)).at(100.0) == pytest.approx(0.005)
    older = queue(QUEUE | {3: (5.0, 1, 100.0, 90.0)})
    assert order(tiresias(), older) == [3, 1, 4, 2]
    assert order(policy, older) == [1, 3, 4, 2]


@given(st.lists(st.integers(1, 50).map(float), min_size=1, max_size=8), st.integers(0, 49).map(float))
def test_the_gittins_index_is_the_best_of_all_quanta(history, attained):
    longer = [total - attained for total in history if total > attained]
    rates = [
        sum(needed <= quantum for needed in longer) / sum(min(needed, quantum) for needed in longer)
        for quantum in (step / 4 for step in range(1, 201))
        if longer
    ]
    assert GittinsIndex(tuple(history)).at(attained) == pytest.approx(max(rates, default=0.0))
