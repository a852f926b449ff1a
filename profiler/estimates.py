"""The best that is known of a model: measured, else scaled from other GPU counts, else by another distribution.

Scaling: training is data-parallel and the batch size is per GPU, so each GPU's own work does not change; load,
preprocess and propagate are taken over. Only the all-reduce of the gradients depends on the number of GPUs; it
follows a ring model. A model of which nothing is known gets the mean of the site's models.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from itertools import groupby
from statistics import fmean, median
from typing import Final, NamedTuple, Self

from muri.clock import MIB_PER_GIB
from muri.profiler.records import (
    BANDWIDTH_MIB_PER_S,
    GPU_COUNT,
    STAGES,
    TIME_S,
    Document,
    ProfileDetail,
    ProfileError,
    ProfileKey,
    StageProfile,
    first_fault,
)
from muri.profiler.store import ProfileStore

log = logging.getLogger("muri.profiler")

BANDWIDTH_KIND: Final = "bandwidth"
"""Kind of the store's documents that hold bandwidths."""

DEFAULT_MIB_PER_S: Final = 10.0 * MIB_PER_GIB
"""Assumed where nothing was measured: between a 100 Gbit/s network and PCIe 3.0 × 16."""

DEFAULT_LATENCY_S: Final = 20e-6
"""Assumed for one step of the ring: the order of NCCL's over PCIe and InfiniBand."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured all-reduce between the ranks of one job."""

    gpu_type: str  # GRES type of the GPUs
    nodes: int  # Nodes that the ranks ran on
    ranks_per_node: int  # Ranks on each node, one for each GPU
    mib_per_s: float  # What each link of the ring carries, MiB per second
    latency_s: float  # Seconds that a step of the ring takes beside that
    measured_at: str = ""  # UTC time, ISO-8601

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give."""
        checks = (
            ("number of nodes", GPU_COUNT, self.nodes),
            ("number of ranks per node", GPU_COUNT, self.ranks_per_node),
            ("MiB/s", BANDWIDTH_MIB_PER_S, self.mib_per_s),
            ("latency", TIME_S, self.latency_s),
        )
        if fault := first_fault(checks):
            raise ProfileError(f"bandwidth {self.name}: {fault}")

    @property
    def name(self) -> str:
        """Name in the store: GPU type, ranks per node × nodes."""
        return f"{self.gpu_type}/{self.ranks_per_node}x{self.nodes}"

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Read a document that a command of 0.2 stored (ProfileError: a figure is missing or cannot be true)."""
        known = {item.name: document.body[item.name] for item in fields(cls) if item.name in document.body}
        try:
            return cls(**known, measured_at=document.measured_at)
        except TypeError as error:
            raise ProfileError(f"bandwidth {document.name} in the store: {error}") from error


def bandwidths(store: ProfileStore) -> tuple[Bandwidth, ...]:
    """All bandwidths in the store; one that cannot be true is left out, and the log names it."""
    found: list[Bandwidth] = []
    for document in store.documents(BANDWIDTH_KIND):
        try:
            found.append(Bandwidth.from_document(document))
        except ProfileError as error:
            log.warning("%s", error)
    return tuple(found)


def ring_share(ranks: int) -> float:
    """How often each link of a ring carries the gradients in an all-reduce: 2 (n − 1) / n."""
    return 2 * (ranks - 1) / ranks


def ring_s(size_over_bandwidth_s: float, latency_s: float, ranks: int) -> float:
    """Seconds of a ring all-reduce: 2 (n − 1) steps, each of one n-th of the data.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    return ring_share(ranks) * size_over_bandwidth_s + 2 * (ranks - 1) * latency_s


def nearest_bandwidth(known: Iterable[Bandwidth], gpu_type: str, ranks: int) -> Bandwidth | None:
    """The measurement between GPUs of this type whose number of ranks is nearest, None without any."""
    of_type = [item for item in known if item.gpu_type == gpu_type and item.ranks > 1]
    return min(of_type, key=lambda item: (abs(math.log(item.ranks / ranks)), -item.nodes), default=None)


NETWORK: Final = STAGES.index("synchronize")
GRADIENT_SHARE: Final = 0.25
"""Of the GPU memory, where the size of the gradients was not measured: Adam keeps weights, gradients and two
moments of one size each, so gradients take at most this."""

STAGE_SPREAD: Final = (0.39, 0.39, 0.09)
NETWORK_AND_ITERATION_SPREAD: Final = {
    (True, True): (0.09, 0.12),
    (True, False): (0.27, 0.32),
    (False, True): (0.17, 0.22),
    (False, False): (0.20, 0.35),
}
"""Nine of ten published measurements were within these (the scaling_error benchmark of 0.2, docs/profiles.md, Scaling):
shares of load, preprocess and propagate; then, by whether the model's own all-reduce was known and whether the
GPUs are at most `ONE_NODE`, that of synchronize as a share of the iteration, and that of the iteration."""

_BASES: Final = {
    "scaled": "scaled from another number of GPUs",
    "predicted": "predicted from the model's graph",
    "average": "the mean of this site's models",
    "guess": "a guess: no model of this site has been measured",
}
"""What estimates rest on, by their source."""

GROUP: Final = "muri.estimators"
"""Entry points of other distributions' estimators, each an `Estimator`."""

FEATURES: Final = "features"
"""Kind of the store's documents that hold the figures of a model's graph for an estimator."""

ONE_NODE: Final = 8
"""GPUs of a node in the measurements that gave the spreads."""


GUESSED_SHARES: Final = (1 / 6, 1 / 6, 1 / 2, 1 / 6)
"""Of a model at a site that knows none: training keeps the GPU busy at least as long as anything else."""

GUESSED_ITERATION_S: Final = 0.3

_Figures = tuple[float, ...]
"""The share of an iteration that each stage has, and the logarithm of its seconds."""

_GUESS: Final[_Figures] = (*GUESSED_SHARES, math.log(GUESSED_ITERATION_S))


@dataclass(frozen=True, slots=True)
class ProfileEstimate:
    """An estimated profile and its basis."""

    profile: StageProfile  # Its `source` says whether it is scaled or predicted
    basis: tuple[str, ...]  # A sentence each
    # Least and most seconds of each stage and of the iteration, right nine times in ten
    interval_s: tuple[tuple[float, float], ...]


class Estimator(NamedTuple):
    """Another distribution's way to estimate, such as from a model's graph."""

    keys: Callable[[ProfileStore], Collection[ProfileKey]]  # Of which keys' models it knows anything
    # The estimate of a key, None where it has none
    estimate: Callable[[ProfileStore, ProfileKey], ProfileEstimate | None]


def estimators() -> list[Estimator]:
    """Those of the installed distributions."""
    return [offer.load() for offer in entry_points(group=GROUP)]


def estimated(store: ProfileStore, key: ProfileKey) -> ProfileEstimate | None:
    """The estimate of a key, whether it was measured or not; None when nothing is known."""
    scaled = scale(store.list(), key, bandwidths(store))
    return scaled or next(filter(None, (each.estimate(store, key) for each in estimators())), None)


def estimates_of(store: ProfileStore, keys: Iterable[ProfileKey]) -> dict[ProfileKey, StageProfile]:
    """Estimates of those keys that were not measured and can be estimated; reads the store once for all.

    An estimate for a user rests on his own profiles and published ones alone.

    Raises:
        StoreError: The store cannot be read.
    """
    families: dict[ProfileKey, list[StageProfile]] = {}
    for item in store.list():
        families.setdefault(replace(item.key, gpu_count=1), []).append(item)
    known = bandwidths(store)
    modeled = [(each, {key.model for key in each.keys(store)}) for each in estimators()]
    found = {}
    for key in keys:
        family = [item for each in key.lookup_order for item in families.get(replace(each, gpu_count=1), [])]
        if any(item.key in key.lookup_order and not item.is_estimate for item in family):
            continue
        try:
            others = (each.estimate(store, key) for each, models in modeled if key.model in models)
            estimate = scale(family, key, known) or next(filter(None, others), None)
            if estimate is not None:
                found[key] = estimate.profile
        except (ProfileError, ArithmeticError) as error:  # odd figures cost one estimate, not all
            log.warning("no estimate of %s: %s", key, error)
    return found


def why_estimated(profile: StageProfile) -> str:
    """What people should know of an estimated profile; "" for a measured one."""
    if not profile.is_estimate:
        return ""
    return f"its profile is estimated ({_BASES[profile.source]}) until it has been measured"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The cost of a model's all-reduce on a ring."""

    size_over_bandwidth_s: float  # Gradient size over bandwidth
    latency_s: float  # Seconds of a step of the ring
    basis: str  # Where the two come from, for people
    own: bool = False  # Whether from the model's own all-reduce
    alone_s: float = 0.0  # Seconds per iteration that the network owns even on one GPU, which is not an all-reduce

    def all_reduce_s(self, ranks: int) -> float:
        """Seconds per iteration that the all-reduce takes."""
        return ring_s(self.size_over_bandwidth_s, self.latency_s, ranks)


def scale(profiles: Sequence[StageProfile], key: ProfileKey, known: Sequence[Bandwidth] = ()) -> ProfileEstimate | None:
    """Estimate a profile from those of the same model on other numbers of GPUs."""
    if key.gpu_count < 1:
        return None
    measured = [
        item
        for item in profiles
        if item.key.gpu_count != key.gpu_count
        and replace(item.key, gpu_count=key.gpu_count) in key.lookup_order
        and not item.is_estimate
    ]
    if not measured:
        return None
    # One profile of each number of GPUs: the user's own rather than a published one.
    by_user = sorted(measured, key=lambda item: item.key.user)
    measured = list({item.key.gpu_count: item for item in by_user}.values())
    base = min(measured, key=lambda item: (abs(math.log(item.key.gpu_count / key.gpu_count)), item.key.gpu_count))
    traffic = traffic_of(measured, key, known)
    basis = (f"load, preprocess and propagate as measured on {base.key.gpu_count} × {key.gpu_type}", traffic.basis)
    try:
        profile = _scaled(base, key, traffic)
    except ProfileError as error:
        log.warning("no estimate of %s: %s", key, error)
        return None
    return ProfileEstimate(profile, basis, _interval_s(profile, traffic))


def _interval_s(profile: StageProfile, traffic: Traffic) -> tuple[tuple[float, float], ...]:
    """Turn the spreads, which are shares of the true value, into bounds around the estimate."""
    network, whole = NETWORK_AND_ITERATION_SPREAD[traffic.own, profile.key.gpu_count <= ONE_NODE]
    times_s = (*profile.stage_s[:NETWORK], profile.iteration_s)
    *stages, iteration = [
        (value / (1 + share), value / (1 - share)) for value, share in zip(times_s, (*STAGE_SPREAD, whole), strict=True)
    ]
    by_s = network * iteration[1] if profile.key.gpu_count > 1 else 0.0
    return (*stages, (max(0.0, profile.synchronize_s - by_s), profile.synchronize_s + by_s), iteration)


def _scaled(base: StageProfile, key: ProfileKey, traffic: Traffic) -> StageProfile:
    """The base with another all-reduce; the other stages hide as much of it as before."""
    # On one GPU there is no all-reduce, so the base does not show how much of one the other stages would hide.
    hidden_s = 0.0 if base.key.gpu_count == 1 else base.network_busy_s - base.synchronize_s
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


def traffic_of(measured: Sequence[StageProfile], key: ProfileKey, known: Sequence[Bandwidth]) -> Traffic:
    """How much the model's ranks send, from the best that is known.

    The model's own all-reduce on another number of GPUs is worth most, then the size of its gradients with the
    measured bandwidth, then assumptions, which `basis` names.
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
    return max(0.0, profile.network_busy_s - alone_s - ring_s(0.0, latency_s, ranks)) / ring_share(ranks)


def _from_size(measured: Sequence[StageProfile], link: Bandwidth | None, latency_s: float) -> Traffic:
    sizes = [item.detail.gradient_mib for item in measured if item.detail.gradient_mib is not None]
    gradient_mib = sizes[0] if sizes else GRADIENT_SHARE * MIB_PER_GIB * measured[0].gpu_mem_gib
    size = f"{gradient_mib:.1f} MiB of gradients"
    size += "" if sizes else " (ASSUMED: a quarter of the GPU memory; the size was not measured)"
    if link:
        mib_per_s, over = link.mib_per_s, f"{link.mib_per_s:.0f} MiB/s as measured on {link.name}"
    else:
        mib_per_s, over = DEFAULT_MIB_PER_S, f"{DEFAULT_MIB_PER_S:.0f} MiB/s (ASSUMED)"
    return Traffic(gradient_mib / mib_per_s, latency_s, f"synchronize by the ring model from {size} at {over}")


def unknown_models(known: Iterable[StageProfile], keys: Collection[ProfileKey]) -> dict[ProfileKey, StageProfile]:
    """Return what models of which nothing is known are planned with, until they have been measured.

    The user's own models and published ones are averaged. Of other users, who may have had anything measured, each has
    one vote, as the guess has one: the median of these counts like one model more. The shares of an iteration are
    averaged, not the seconds, in which a few slow models would outweigh all others.
    """
    measured = sorted((each for each in known if not each.is_estimate), key=lambda each: each.key.user)
    found = {}
    for gpu_count in sorted({key.gpu_count for key in keys}):
        alike = [each for each in measured if each.key.gpu_count == gpu_count] or measured
        users = {user: list(map(_figures, each)) for user, each in groupby(alike, lambda each: each.key.user)}
        votes = {user: _mean(models) for user, models in users.items()}
        for key in (key for key in keys if key.gpu_count == gpu_count):
            own = {"", key.user}
            site = _median([_GUESS, *(vote for user, vote in votes.items() if user not in own)])
            trusted = [figures for user in sorted(own) for figures in users.get(user, ())]
            *shares, _ = _mean([*trusted, site])
            iteration_s = math.exp(_mean(trusted or [site])[-1])
            found[key] = _profile(key, shares, iteration_s, "average" if alike else "guess")
    return found


def _figures(profile: StageProfile) -> _Figures:
    return (*(seconds / profile.iteration_s for seconds in profile.stage_s), math.log(profile.iteration_s))


def _mean(models: Sequence[_Figures]) -> _Figures:
    return tuple(fmean(column) for column in zip(*models, strict=True))


def _median(votes: Sequence[_Figures]) -> _Figures:
    return tuple(median(column) for column in zip(*votes, strict=True))


def _profile(key: ProfileKey, shares: Sequence[float], iteration_s: float, source: str) -> StageProfile:
    load, preprocess, propagate, synchronize = shares
    if key.gpu_count == 1:  # it exchanges no gradients: the GPU has that time
        propagate, synchronize = propagate + synchronize, 0.0
    # Stages that overlap can add up to more than the iteration, which they then fill.
    whole = max(1.0, sum((load, preprocess, propagate, synchronize)))
    load_s, preprocess_s, propagate_s, synchronize_s = (
        iteration_s * share / whole for share in (load, preprocess, propagate, synchronize)
    )
    return StageProfile(key, load_s, preprocess_s, propagate_s, synchronize_s, iteration_s, source=source)
