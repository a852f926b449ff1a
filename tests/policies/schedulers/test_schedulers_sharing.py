"""What the sharing policies make of the same small queue."""

import pytest
from policy_builders import KINDS, make_job, make_node, make_request

from muri.policies.registry import get_policy


def complementary(remaining_s=10.0):
    return [make_job(number, kind, remaining_s=remaining_s) for number, kind in enumerate(KINDS, start=1)]


def sizes(name, gpus):
    plan = get_policy(name).plan(make_request(complementary(), [make_node("n1", gpus, gpu_count=4)]))
    return sorted([1] * len(plan.solo) + [len(group.members) for group in plan.groups])


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("muri-s", 4, [1, 1, 1, 1]),  # room for all: nobody shares
        ("muri-s", 3, [2, 2]),  # the paper merges all pairs of a round, and leaves a GPU idle
        ("auto", 3, [1, 1, 2]),
        ("muri-s", 1, [4]),
        ("auto", 1, [4]),
        ("srsf", 1, [1]),
    ],
)
def test_how_far_jobs_are_merged(name, gpus, expected):
    assert sizes(name, gpus) == expected
