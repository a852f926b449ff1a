"""The reference model: each policy as the public simulator has it that its paper's authors published."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from muri.policies.allocation.names import parse_name
from muri.simulator.model import Cluster, Settings, SimulationError, SimulationResult, Trace
from muri.simulator.reference.run import REFERENCE_POLICIES, check_reference, simulate_reference
from muri.simulator.synergy_reference.run import SYNERGY_REFERENCE_POLICIES, check_synergy, simulate_synergy

PUBLISHED_POLICIES: Final = (*REFERENCE_POLICIES, *SYNERGY_REFERENCE_POLICIES)
"""Those of Muri's public simulator, then those of Synergy's."""


def simulate_published(
    trace: Trace,
    policy: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    *,
    with_spans: bool = False,
) -> SimulationResult:
    """Simulate a trace with the semantics of the policy's public simulator.

    Args:
        trace: The jobs.
        policy: One of `PUBLISHED_POLICIES`.
        cluster: Where they run.
        settings: Few of them count; see the two models.
        options: Options of the policy.
        progress: Called now and then with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result tells who shared GPUs with whom and when.

    Raises:
        SimulationError: The policy, an option or a setting is one that the model doesn't know, or the trace cannot run
            on the cluster.
    """
    check_published(policy, options or {})
    model = simulate_reference if parse_name(policy) is None else simulate_synergy
    return model(trace, policy, cluster, settings, options, progress, with_spans=with_spans)


def check_published(policy: str, options: Mapping[str, Any]) -> None:
    """Refuse a policy or option that the reference model doesn't know.

    Raises:
        SimulationError: Lists the valid ones.
    """
    if parse_name(policy) is not None:
        check_synergy(policy, options)
    elif policy in REFERENCE_POLICIES:
        check_reference(policy, options)
    else:
        valid = ", ".join(PUBLISHED_POLICIES)
        raise SimulationError(f"the reference model has no policy {policy!r}; valid are: {valid}")
