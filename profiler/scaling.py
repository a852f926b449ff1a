"""From the profile of a model on some GPUs to an estimate for more or fewer. Pure.

Training is data-parallel and the batch size is per GPU, so that each GPU's own work does not change: load,
preprocess and propagate are taken over. Only the all-reduce of the gradients depends on the number of GPUs; it
follows the ring model of `muri.profiler.bandwidth`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from muri.profiler.bandwidth import (
    DEFAULT_LATENCY_S,
    DEFAULT_MIB_PER_S,
    Bandwidth,
    nearest_bandwidth,
    ring_s,
    ring_share,
)
from muri.profiler.records import STAGES, ProfileDetail, ProfileKey, StageProfile

NETWORK: Final = STAGES.index("synchronize")
GRADIENT_SHARE: Final = 0.25
"""Of the GPU memory, where the size of the gradients was not measured: Adam keeps weights, gradients and two
moments of one size each, so that it is at most this."""

STAGE_SPREAD: Final = (0.39, 0.39, 0.09)
NETWORK_AND_ITERATION_SPREAD: Final = {
    (True, True): (0.09, 0.12),
    (True, False): (0.27, 0.32),
    (False, True): (0.17, 0.22),
    (False, False): (0.20, 0.35),
}
"""Nine of ten published measurements were within these (benchmarks/scaling_error.py; docs/profiles.md, Scaling):
shares of load, preprocess and propagate; then, by whether the model's own all-reduce was known and whether the
GPUs are at most `ONE_NODE`, that of synchronize as a share of the iteration, and that of the iteration."""

ONE_NODE: Final = 8
"""GPUs of a node in what the spreads were found with."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a model's all-reduce takes on a ring.

    Attributes:
        size_over_bandwidth_s: Gradient size over bandwidth.
        latency_s: Seconds of a step of the ring.
        basis: Where the two come from, for people.
        own: Whether from the model's own all-reduce.
        alone_s: Seconds per iteration that the network owns on one GPU too, for something else than the all-reduce.
    """

    size_over_bandwidth_s: float
    latency_s: float
    basis: str
    own: bool = False
    alone_s: float = 0.0

    def all_reduce_s(self, ranks: int) -> float:
        """Seconds per iteration that the all-reduce takes."""
        return ring_s(self.size_over_bandwidth_s, self.latency_s, ranks)


@dataclass(frozen=True, slots=True)
class Scaled:
    """An estimate and what it rests on.

    Attributes:
        profile: The estimate; its source is "scaled".
        base: The measured profile that it starts from.
        basis: Assumptions, a sentence each, for people.
        interval_s: Least and most seconds of each stage and of the iteration, right nine times in ten.
    """

    profile: StageProfile
    base: StageProfile
    basis: tuple[str, ...]
    interval_s: tuple[tuple[float, float], ...]


def scale(profiles: Sequence[StageProfile], key: ProfileKey, known: Sequence[Bandwidth] = ()) -> Scaled | None:
    """Estimate a profile from those of the same model on other numbers of GPUs.

    Args:
        profiles: All profiles; those of other models, batch sizes, GPU types, and estimates are left out.
        key: What to estimate.
        known: Measured bandwidths.

    Returns:
        The estimate, or None when the model was measured on no other number of GPUs.
    """
    measured = [item for item in profiles if _same_but_for_count(item.key, key) and not item.is_estimate]
    if not measured:
        return None
    base = min(measured, key=lambda item: (abs(math.log(item.key.gpu_count / key.gpu_count)), item.key.gpu_count))
    traffic = traffic_of(measured, key, known)
    basis = (f"load, preprocess and propagate as measured on {base.key.gpu_count} × {key.gpu_type}", traffic.basis)
    profile = _scaled(base, key, traffic)
    return Scaled(profile, base, basis, _interval_s(profile, traffic))


def _interval_s(profile: StageProfile, traffic: Traffic) -> tuple[tuple[float, float], ...]:
    """Turn the spreads, which are shares of what was true, into bounds around what is estimated."""
    network, whole = NETWORK_AND_ITERATION_SPREAD[traffic.own, profile.key.gpu_count <= ONE_NODE]
    iteration = _bounds(profile.iteration_s, whole)
    by_s = network * iteration[1] if profile.key.gpu_count > 1 else 0.0
    return (
        *(_bounds(value, share) for value, share in zip(profile.stage_s[:NETWORK], STAGE_SPREAD, strict=True)),
        (max(0.0, profile.synchronize_s - by_s), profile.synchronize_s + by_s),
        iteration,
    )


def _bounds(value: float, share: float) -> tuple[float, float]:
    return value / (1 + share), value / (1 - share)


def _same_but_for_count(one: ProfileKey, other: ProfileKey) -> bool:
    return replace(one, gpu_count=other.gpu_count) == other and one.gpu_count != other.gpu_count


def _scaled(base: StageProfile, key: ProfileKey, traffic: Traffic) -> StageProfile:
    """The base with another all-reduce; as much of it is hidden behind the other stages as was before."""
    alone = base.key.gpu_count == 1  # then its network use is no all-reduce, which can't be hidden therefore
    hidden_s = 0.0 if alone else network_busy_s(base) - base.synchronize_s
    owned_s = traffic.alone_s + max(0.0, traffic.all_reduce_s(key.gpu_count) - hidden_s)
    others_s = max(base.iteration_s - base.synchronize_s, *base.stage_s[:NETWORK])
    return replace(
        base,
        key=key,
        synchronize_s=owned_s,
        iteration_s=others_s + owned_s or base.iteration_s,
        iterations=0,
        source="scaled",
        detail=ProfileDetail(gradient_mib=base.detail.gradient_mib, host_mem_gib=base.detail.host_mem_gib),
    )


def network_busy_s(profile: StageProfile) -> float:
    """Seconds per iteration in which the network was used, also where another stage owned the time."""
    busy = profile.detail.busy_s
    return max(profile.synchronize_s, busy[NETWORK] if busy else 0.0)


def traffic_of(measured: Sequence[StageProfile], key: ProfileKey, known: Sequence[Bandwidth]) -> Traffic:
    """How much the model's ranks send, from the best that is known.

    Its own all-reduce on another number of GPUs is worth most; next the size of its gradients and the measured
    bandwidth; else assumptions, which `basis` names.
    """
    link = nearest_bandwidth(known, key.gpu_type, key.gpu_count)
    latency_s = link.latency_s if link else DEFAULT_LATENCY_S
    alone_s = sum(item.synchronize_s for item in measured if item.key.gpu_count == 1)
    seen = [item for item in measured if item.key.gpu_count > 1]
    if seen:
        counts = ", ".join(str(item.key.gpu_count) for item in sorted(seen, key=lambda item: item.key))
        seconds = fmean(_size_over_bandwidth_s(item, latency_s, alone_s) for item in seen)
        basis = f"synchronize by the ring model from the model's own on {counts} GPUs"
        return Traffic(seconds, latency_s, basis, own=True, alone_s=alone_s)
    return replace(_from_size(measured, link, latency_s), alone_s=alone_s)


def _size_over_bandwidth_s(profile: StageProfile, latency_s: float, alone_s: float) -> float:
    ranks = profile.key.gpu_count
    return max(0.0, network_busy_s(profile) - alone_s - ring_s(0.0, latency_s, ranks)) / ring_share(ranks)


def _from_size(measured: Sequence[StageProfile], link: Bandwidth | None, latency_s: float) -> Traffic:
    sizes = [item.detail.gradient_mib for item in measured if item.detail.gradient_mib is not None]
    gradient_mib = sizes[0] if sizes else GRADIENT_SHARE * 1024 * measured[0].gpu_mem_gib
    size = f"{gradient_mib:.1f} MiB of gradients"
    size += "" if sizes else " (ASSUMED: a quarter of the GPU memory; the size was not measured)"
    if link:
        mib_per_s, over = link.mib_per_s, f"{link.mib_per_s:.0f} MiB/s as measured on {link.name}"
    else:
        mib_per_s, over = DEFAULT_MIB_PER_S, f"{DEFAULT_MIB_PER_S:.0f} MiB/s (ASSUMED; measure: muri profile bandwidth)"
    return Traffic(gradient_mib / mib_per_s, latency_s, f"synchronize by the ring model from {size} at {over}")
