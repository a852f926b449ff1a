"""Made-up traces: durations and sizes like Philly's, Poisson arrivals at a given load, a chosen mix of bottlenecks."""

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from statistics import NormalDist
from types import MappingProxyType
from typing import Protocol, TypeVar

from muri.policies.traits import BatchModel
from muri.profiler.records import RESOURCES, StageProfile
from muri.simulator.model import Trace, TraceJob
from muri.simulator.traces.models import profiles_bound_by
from muri.simulator.traces.rows import TraceError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Durations:
    """Chosen durations: a log-normal above a floor, cut off at a longest duration."""

    floor_s: float  # Shortest duration
    median_s: float  # Half of the jobs last no longer
    sigma: float  # Standard deviation of ln(duration − floor): how heavy the tail is
    longest_s: float  # Upper bound

    def quantile_s(self, share: float) -> float:
        """The duration that this share of the jobs does not exceed; 0 < share < 1."""
        above_s = (self.median_s - self.floor_s) * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return min(self.floor_s + above_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class LoggedDurations:
    """Durations as a log has them: between two of its quantiles a Pareto distribution, the last one's going on."""

    # Shares of the jobs, ascending from 0, and the duration that they do not exceed
    quantiles_s: tuple[tuple[float, float], ...]
    longest_s: float  # Upper bound

    def quantile_s(self, share: float) -> float:
        """The duration that this share of the jobs does not exceed; 0 < share < 1."""
        upper = min(bisect(self.quantiles_s, (share, math.inf)), len(self.quantiles_s) - 1)
        (low_share, low_s), (high_share, high_s) = self.quantiles_s[upper - 1], self.quantiles_s[upper]
        # the logarithm of a Pareto-distributed time is linear in that of the share of longer ones
        part = math.log((1 - share) / (1 - low_share)) / math.log((1 - high_share) / (1 - low_share))
        return min(low_s * math.pow(high_s / low_s, part), self.longest_s)


PHILLY_LONGEST_S = 5_196_151.0
PHILLY_SINGLE_GPU = LoggedDurations(
    (
        (0.0, 3_600.0),
        (0.1, 4_334.0),
        (0.25, 5_766.0),
        (0.5, 10_710.0),
        (0.75, 31_648.0),
        (0.9, 140_113.0),
        (0.95, 382_849.0),
        (0.99, 1_845_602.0),
        (0.999, 4_749_178.0),
    ),
    PHILLY_LONGEST_S,
)
PHILLY_MULTI_GPU = LoggedDurations(
    (
        (0.0, 3_600.0),
        (0.1, 7_721.0),
        (0.25, 16_976.0),
        (0.5, 71_015.0),
        (0.75, 200_818.0),
        (0.9, 497_204.0),
        (0.95, 838_069.0),
        (0.99, 2_064_188.0),
        (0.999, 4_628_239.0),
    ),
    PHILLY_LONGEST_S,
)
"""Quantiles of the 33,192 Philly jobs of at least an hour (Jeon et al., ATC 2019), with one GPU and with more."""

PHILLY_GPU_MIX: Mapping[int, float] = MappingProxyType({1: 0.762, 2: 0.020, 4: 0.093, 8: 0.125})
"""Share of these jobs by GPU count."""


class Trainable(Protocol):
    """What jobs can train."""

    def profile(self, gpu_count: int) -> StageProfile:
        """Its profile on this many GPUs."""
        ...

    def batch_on(self, gpu_count: int) -> BatchModel | None:
        """How its batch can be split there; None: it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """The properties of a generated trace."""

    jobs: int  # How many jobs
    gpus: int  # GPUs of the cluster that the load is meant for
    load: float = 0.9  # GPU-seconds of all jobs over those that the cluster has from the first submission to the last
    seed: int = 0  # The same recipe gives the same trace
    gpu_mix: Mapping[int, float] = field(default_factory=lambda: PHILLY_GPU_MIX)  # Weight of each GPU count
    # Weight of each resource as the jobs' bottleneck
    bottlenecks: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(RESOURCES, 1.0))
    users: int = 20  # How many users; the i-th submits in proportion to 1/i (Zipf)
    # Share of jobs that only use what others leave over; one half in the Muri paper's traces
    opportunistic: float = 0.5
    durations: Durations | None = None  # Of all jobs; None: Philly's
    # What the jobs train, each as often; none: the Muri paper's models, by `bottlenecks`
    models: tuple[Trainable, ...] = ()
    name: str = "generated"

    def __post_init__(self) -> None:
        """Refuse what no trace can be like."""
        _check_figures(self)
        _check_mixes(self)


def _check_figures(recipe: Recipe) -> None:
    for name, value in (("jobs", recipe.jobs), ("gpus", recipe.gpus), ("users", recipe.users)):
        if value < 1:
            raise TraceError(f"{name} is {value}; it must be at least 1")
    if not (math.isfinite(recipe.load) and recipe.load > 0):
        raise TraceError(f"load is {recipe.load}; it must be more than 0, for instance 0.9")
    if not 0 <= recipe.opportunistic <= 1:
        raise TraceError(f"the opportunistic share is {recipe.opportunistic}; it must be from 0 to 1")
    times = recipe.durations
    if times is not None and not 0 <= times.floor_s < times.median_s <= times.longest_s < math.inf:
        raise TraceError(
            f"durations: 0 ≤ floor < median ≤ longest must hold; they are "
            f"{times.floor_s:g}, {times.median_s:g} and {times.longest_s:g} s"
        )
    if times is not None and not (math.isfinite(times.sigma) and times.sigma >= 0):
        raise TraceError(f"durations: sigma is {times.sigma}; it must be at least 0")


def _check_mixes(recipe: Recipe) -> None:
    unknown = sorted(set(recipe.bottlenecks) - set(RESOURCES))
    if unknown:
        raise TraceError(f"unknown bottleneck {', '.join(unknown)}; choose among {', '.join(RESOURCES)}")
    for name, weights in (("GPU mix", recipe.gpu_mix.values()), ("bottleneck mix", recipe.bottlenecks.values())):
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
            raise TraceError(f"the {name} needs weights of at least 0, not all of them 0")
    wrong = [count for count in recipe.gpu_mix if not 1 <= count <= recipe.gpus]
    if wrong:
        raise TraceError(f"jobs with {wrong[0]} GPUs can't run on {recipe.gpus}; give a --gpu-mix of smaller ones")


def generate(recipe: Recipe) -> Trace:
    """Make a trace, its jobs numbered from 0 by submit time.

    Arrivals are a Poisson process under the condition that the last of the jobs comes exactly when the load asks for:
    given their number, the arrival times of such a process are independent and uniform. Submit times are whole seconds.
    Only Random.random is used: its numbers are the same in every version of Python.
    """
    random = Random(recipe.seed)
    draw_gpu_count = _drawer(recipe.gpu_mix, sorted(recipe.gpu_mix))
    draw_bottleneck = _drawer(recipe.bottlenecks, RESOURCES)
    users = range(1, recipe.users + 1)
    draw_user = _drawer({number: 1.0 / number for number in users}, users)
    jobs = []
    for number in range(recipe.jobs):
        gpu_count, batch = draw_gpu_count(random), None
        if recipe.models:
            model = recipe.models[int(random.random() * len(recipe.models))]
            profile, batch = model.profile(gpu_count), model.batch_on(gpu_count)
        else:
            profiles = profiles_bound_by(draw_bottleneck(random), gpu_count)
            profile = profiles[int(random.random() * len(profiles))]
        durations = recipe.durations or (PHILLY_SINGLE_GPU if gpu_count == 1 else PHILLY_MULTI_GPU)
        run_s = durations.quantile_s(random.random() or 0.5)  # 0 has no quantile
        job = TraceJob(
            job_id=number,
            submit_s=0.0,
            gpu_count=gpu_count,
            iterations=max(1, round(run_s / profile.iteration_s)),
            profile=profile,
            batch=batch,
            user=f"user{draw_user(random):0{len(str(recipe.users))}d}",
            opportunistic=random.random() < recipe.opportunistic,
        )
        jobs.append(job)
    work_gpu_s = sum(job.gpu_count * job.iterations * job.profile.iteration_s for job in jobs)
    span_s = work_gpu_s / (recipe.gpus * recipe.load)
    times = sorted(random.random() for _ in jobs)
    length = times[-1] - times[0]
    submits_s = [float(round((time - times[0]) / length * span_s)) if length else 0.0 for time in times]
    return Trace(recipe.name, tuple(replace(job, submit_s=time_s) for job, time_s in zip(jobs, submits_s, strict=True)))


def _drawer(weights: Mapping[Item, float], order: Iterable[Item]) -> Callable[[Random], Item]:
    """A draw among the items with weights above 0, in a fixed order, in proportion to their weights."""
    items = [item for item in order if weights.get(item, 0.0) > 0]
    bounds = list(accumulate(weights[item] for item in items))
    # clamped: the product may round up to the last bound itself
    return lambda random: items[min(bisect(bounds, random.random() * bounds[-1]), len(items) - 1)]
