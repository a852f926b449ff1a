"""`muri simulate --model reference`: the rules of Muri's and of Synergy's public simulators."""

from collections.abc import Mapping
from typing import Any, Final

from muri.simulator.model import Simulation, SimulationError, SimulationModel, SimulationResult
from muri_lab.muri_reference.run import REFERENCE_POLICIES, check_reference, simulate_reference
from muri_lab.synergy_reference.run import SYNERGY, check_synergy, simulate_synergy

PUBLISHED_POLICIES: Final = (*REFERENCE_POLICIES, SYNERGY)
"""Policies of the reference model: those of Muri's public simulator, then that of Synergy's."""


def check_published(policy: str, options: Mapping[str, Any]) -> None:
    """Refuse a policy or option that the reference model does not know."""
    if policy == SYNERGY:
        check_synergy(options)
    elif policy in REFERENCE_POLICIES:
        check_reference(policy, options)
    else:
        valid = ", ".join(PUBLISHED_POLICIES)
        raise SimulationError(f"the reference model has no policy {policy!r}; valid are: {valid}")


def _simulate(task: Simulation) -> SimulationResult:
    check_published(task.policy, task.options)
    return simulate_synergy(task) if task.policy == SYNERGY else simulate_reference(task)


MODEL: Final = SimulationModel(_simulate, check_published)
