"""Jobs that do not slow each other share first: nothing is better, so nothing else is computed."""

import pytest
from speed_builders import kinds_with

from muri.policies.grouping.engine import unslowed_groups
from muri.policies.grouping.problem import BucketProblem
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.speed import Shape

FAIR = speed_model("fair")
JCT = PolicyOptions(grouping="optimal", objective="jct", speed_model="fair")
STORAGE, CPU, GPU = (Shape(tuple(float(place == resource) for place in range(4)), 1.0, 10.0) for resource in (0, 1, 2))


def problem(*shapes, slots, memory=float("inf")):
    worth = [float(len(shapes) - index) for index in range(len(shapes))]
    return BucketProblem(kinds_with(shapes, worth), 1, slots, memory)


def test_no_more_pairs_than_it_takes_and_of_the_least_urgent_jobs():
    found = unslowed_groups(problem(STORAGE, CPU, STORAGE, GPU, STORAGE, CPU, slots=5), JCT, FAIR)
    assert found == ((0,), (1,), (2,), (3,), (4, 5))


def test_the_greedy_choice_is_mended_where_it_leaves_too_few_pairs():
    # The last two would pair up, and leave the others, which slow each other, without a partner.
    found = unslowed_groups(problem(STORAGE, STORAGE, GPU, CPU, slots=2), JCT, FAIR)
    assert found is not None
    assert sorted(map(len, found)) == [2, 2]
    assert {0, 1} not in map(set, found)


@pytest.mark.parametrize("slots", [1, 2])
def test_there_is_no_answer_where_pairs_are_not_enough_or_would_slow_each_other(slots):
    assert unslowed_groups(problem(STORAGE, CPU, GPU, slots=1), JCT, FAIR) is None
    assert unslowed_groups(problem(STORAGE, STORAGE, STORAGE, slots=slots), JCT, FAIR) is None


def test_limits_hold():
    assert unslowed_groups(problem(STORAGE, CPU, slots=1, memory=19.0), JCT, FAIR) is None
    for models, fits in (((1, 1), False), ((1, 2), True)):
        guesses = [kind._replace(guess=guess) for kind, guess in zip(kinds_with([STORAGE, CPU]), models, strict=True)]
        assert (unslowed_groups(BucketProblem(tuple(guesses), 1, 1), JCT, FAIR) is not None) == fits
    alone = [kind._replace(largest=1) for kind in kinds_with([STORAGE, CPU])]
    assert unslowed_groups(BucketProblem(tuple(alone), 1, 1), JCT, FAIR) is None
