"""Synergy's figures as the product ships them."""

import json
from pathlib import Path

import pytest

from muri.policies.traits import Demand
from muri.simulator.traces.models import synergy_figures, synergy_models, synergy_sensitivity

PUBLISHED = Path(__file__).parents[4] / "shared" / "reference" / "synergy_sensitivity.json"
FAIR_SHARE = (3.0, 62.5)


def test_every_model_of_the_traces_has_one() -> None:
    assert synergy_figures().keys() == synergy_models().keys()


def test_a_model_of_another_system_has_none() -> None:
    assert synergy_sensitivity("vgg19") is None


@pytest.mark.parametrize("model", sorted(synergy_figures()))
def test_throughput_is_relative_to_the_fair_share(model: str) -> None:
    figures = synergy_figures()[model]
    assert figures.sensitivity.throughput_at(*FAIR_SHARE) == 1.0


@pytest.mark.parametrize("model", sorted(synergy_figures()))
def test_the_demand_gives_the_listed_speedup(model: str) -> None:
    """m5's demand is where its matrix is highest; nothing gives more than the demand."""
    figures = synergy_figures()[model]
    demand = figures.sensitivity.demand
    highest = max(max(row) for row in figures.sensitivity.throughput)
    assert figures.sensitivity.throughput_at(*demand) == pytest.approx(highest)
    assert figures.speedup == pytest.approx(highest)


def test_a_model_that_needs_more_than_its_share() -> None:
    alexnet = synergy_figures()["alexnet"]
    assert alexnet.sensitivity.demand == Demand(12.0, 125.0)
    assert alexnet.speedup == 2.94
    assert alexnet.sensitivity.throughput_at(6, 62.5) == 1.75


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"no published figures at {PUBLISHED}")
def test_the_figures_are_the_published_ones() -> None:
    document = json.loads(PUBLISHED.read_text())
    published = {
        name.removesuffix("_1"): entry for name, entry in document["models"]["models"].items() if name.endswith("_1")
    }
    assert synergy_figures().keys() == published.keys()
    for name, entry in published.items():
        ours = synergy_figures()[name]
        assert list(map(list, ours.sensitivity.throughput)) == entry["tput"], name
        assert list(ours.sensitivity.cpus) == document["_axes"]["cpu_per_gpu"]
        assert list(ours.sensitivity.mem_gib) == document["_axes"]["mem_gb_per_gpu"]
        assert (*ours.sensitivity.demand, ours.speedup) == (entry["cpus"], entry["mem"], entry["speedup"]), name
