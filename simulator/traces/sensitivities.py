"""What CPUs and host memory do for Synergy's models; the figures and their source: synergy_sensitivities.yaml."""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from muri.policies.traits import Demand, Sensitivity


@dataclass(frozen=True, slots=True)
class SynergyFigures:
    """What Synergy's public simulator knows of a model.

    Attributes:
        sensitivity: Throughput over CPUs and memory per GPU, relative to the fair share of 3 CPUs and 62.5 GiB, and
            the demand.
        speedup: Iterations per second with the demand, relative to the fair share. Close to what the matrix says.
    """

    sensitivity: Sensitivity
    speedup: float


def synergy_sensitivity(model: str) -> Sensitivity | None:
    """The sensitivity of one of Synergy's models by its name in traces; None of any other model."""
    known = synergy_figures().get(model)
    return None if known is None else known.sensitivity


@cache
def synergy_figures() -> dict[str, SynergyFigures]:
    """All of Synergy's models, by name."""
    text = files(__package__).joinpath("synergy_sensitivities.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    cpus = tuple(float(count) for count in table["cpus"])
    mem_gib = tuple(float(amount) for amount in table["mem_gib"])
    return {name: _figures(entry, cpus, mem_gib) for name, entry in sorted(table["models"].items())}


def _figures(entry: dict[str, Any], cpus: tuple[float, ...], mem_gib: tuple[float, ...]) -> SynergyFigures:
    rows = entry.get("throughput", [[1.0] * len(mem_gib)] * len(cpus))
    throughput = tuple(tuple(float(value) for value in row) for row in rows)
    demand = Demand(float(entry["demand"]["cpus"]), float(entry["demand"]["mem_gib"]))
    return SynergyFigures(Sensitivity(cpus, mem_gib, throughput, demand), float(entry["speedup"]))
