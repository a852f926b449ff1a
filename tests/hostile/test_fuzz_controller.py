"""Hostile jobs among ordinary ones, a small part of scripts/fuzz-controller: nobody's jobs harm another's."""

import pytest
from campaign import Campaign
from fuzz_controller import tried
from users import attacks

from muri.simulator.twin.shrink import smallest_failing

CAMPAIGNS = [
    Campaign("muri-s", "licence", 3, 200, 12),
    Campaign("muri-l", "hold", 4, 60, 6),
    Campaign("horus", "licence", 5, 60, 6),
    Campaign("sjf-bsbf", "hold", 6, 60, 6),
    Campaign("tiresias", "licence", 7, 60, 6),
    Campaign("auto", "hold", 8, 40, 8, apart=False),
    Campaign("synergy-tune", "licence", 9, 40, 8, apart=False),
    Campaign("muri-hybrid", "licence", 10, 40, 8, apart=False),
]


@pytest.mark.parametrize("campaign", CAMPAIGNS, ids=lambda campaign: f"{campaign.policy}-{campaign.gate}")
def test_every_ordinary_job_runs_once_to_its_end_and_no_cycle_is_lost(campaign):
    outcome = tried(campaign)
    assert outcome.failures == []
    assert outcome.left_out == set()
    assert len(outcome.ends) == campaign.ordinary


def test_an_attack_is_the_same_by_itself():
    all_of_them = attacks(1, 50, "main", licence=True)
    assert all_of_them == attacks(1, 60, "main", licence=True)[:50]
    assert all_of_them != attacks(2, 50, "main", licence=True)


@pytest.mark.parametrize("culprits", [{7}, {3, 90}, {0, 1, 2}, set(range(100))])
def test_a_failing_set_is_made_as_small_as_it_can_be(culprits):
    found = smallest_failing(range(100), lambda chosen: culprits <= set(chosen), most_trials=1000)
    assert set(found) == culprits


def test_making_a_set_smaller_ends_after_so_many_trials():
    trials = []
    found = smallest_failing(range(100), lambda chosen: bool(trials.append(1)) or {3, 90} <= set(chosen), most_trials=5)
    assert len(trials) == 5
    assert {3, 90} <= set(found)
