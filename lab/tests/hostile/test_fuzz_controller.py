"""Hostile jobs among ordinary ones, a small part of scripts/fuzz-controller: they harm no other job."""

import pytest
from campaign import Campaign
from fuzz_controller import tried

from muri_lab.twin.shrink import smallest_failing

CAMPAIGNS = [
    Campaign("auto", "license", 3, 200, 12),
    Campaign("auto", "hold", 8, 40, 8, apart=False),
    Campaign("muri-s", "license", 3, 60, 6, profiling="dry-run"),
    Campaign("muri-l", "hold", 4, 60, 6),
    Campaign("synergy", "license", 9, 40, 8, apart=False),
]
MORE_CAMPAIGNS = [
    Campaign("horus", "license", 5, 60, 6, profiling="dry-run"),
    Campaign("sjf-bsbf", "hold", 6, 60, 6),
    Campaign("tiresias", "license", 7, 60, 6),
    Campaign("muri-hybrid", "license", 10, 40, 8, apart=False),
    Campaign("synergy", "license", 9, 40, 8, apart=False, profiling="dry-run"),
]


@pytest.mark.parametrize(
    "campaign",
    [*CAMPAIGNS, *(pytest.param(each, marks=pytest.mark.thorough) for each in MORE_CAMPAIGNS)],
    ids=lambda campaign: f"{campaign.policy}-{campaign.gate}-{campaign.profiling}",
)
def test_every_ordinary_job_runs_once_to_its_end_and_no_cycle_is_lost(campaign):
    outcome = tried(campaign)
    assert outcome.failures == []
    assert outcome.left_out == set()
    assert len(outcome.ends) == campaign.ordinary


@pytest.mark.parametrize("culprits", [{7}, {3, 90}, {0, 1, 2}, set(range(100))])
def test_a_failing_set_is_made_as_small_as_it_can_be(culprits):
    found = smallest_failing(range(100), lambda chosen: culprits <= set(chosen), most_trials=1000)
    assert set(found) == culprits
