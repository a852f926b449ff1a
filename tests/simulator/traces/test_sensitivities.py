"""Synergy's figures as the product ships them."""

import json
from pathlib import Path

import pytest

from muri.simulator.traces.models import synergy_figures

PUBLISHED = Path(__file__).parents[4] / "shared" / "reference" / "synergy_sensitivity.json"
FAIR_SHARE = (3.0, 62.5)


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
