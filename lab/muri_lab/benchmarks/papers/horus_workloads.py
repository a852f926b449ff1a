"""Workloads like those that Horus was judged on, as far as these are known, and what is measured of a simulation.

The published traces are not available. The assumptions were made before any result was seen, but for those named:

- Each job trains one of the twelve configurations of `CONFIGURATIONS`; predictions of utilization and memory are right.
- The truth is f of the RTX 2080, the GPU of the testbed, as published.

On the large cluster 398 jobs of one user, as many as in the paper, come within an hour at random times. They ask for 1
to 32 GPUs, in all for 2.7 times the cluster, so that there is a queue, as the published waits say. Durations alone are
log-normal with a median of one hour, in three cases:

- "long-tail": σ = 1, at most 12 hours.
- "even": σ = 0.5, at most 3 hours; added after "long-tail" had been seen, where the last long job ends long after all
  others, so that no policy can change the makespan by much.
- "backlog": as "even" with twice the GPUs; added after "even", to see what the depth of the queue has to do with it.

On the testbed 100 jobs of one GPU wait from the start and take 3 minutes to 2 hours, log-uniform among the short ones
(up to 800 s) and among the long ones. How many are short was chosen so that FIFO's makespan is near the published one:
60 % in W-Small, 50 % in W-Large. The pictures of CIFAR-10 are small: jobs need half of the memory.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.metrics import metrics_of
from muri.simulator.model import Cluster, Settings, SimulationResult, Trace, TraceJob
from muri.simulator.run import simulate

LARGE: Final = Cluster(128, 8, gpu_mem_gib=11.0)
TESTBED: Final = Cluster(3, 4, gpu_mem_gib=8.0)
JOBS: Final = 398
TESTBED_JOBS: Final = 100
ITERATION_S: Final = 0.2
GPU_MIX: Final = {1: 0.35, 2: 0.15, 4: 0.15, 8: 0.15, 16: 0.12, 32: 0.08}
ARRIVALS_S: Final = 3600.0
MEDIAN_S: Final = 3600.0
SHORT_S, SPLIT_S, LONG_S = 180.0, 800.0, 7200.0
SHORT_SHARE: Final = {"W-Large": 0.5, "W-Small": 0.6}
PER_ROUND: Final = 15  # β of the paper's runs
CASES: Final = {"long-tail": (1.0, 12 * 3600.0, 1), "even": (0.5, 3 * 3600.0, 1), "backlog": (0.5, 3 * 3600.0, 2)}
"""σ of the durations, the longest one in seconds, and how many times the GPUs are asked for, by name."""

CONFIGURATIONS: Final = {
    "lstm": (0.18, 1.9),
    "dcgan": (0.30, 2.2),
    "mobilenet-small": (0.32, 2.4),
    "alexnet": (0.40, 2.9),
    "squeezenet": (0.45, 2.6),
    "shufflenet": (0.52, 3.3),
    "mobilenet": (0.60, 3.9),
    "googlenet": (0.68, 4.2),
    "resnet18": (0.75, 3.6),
    "resnet50": (0.90, 6.8),
    "densenet121": (0.94, 7.4),
    "vgg16": (0.97, 8.1),
}
"""GPU utilization and GiB of GPU memory, by name. Assumed: from light recurrent models to VGG, evenly spread."""


class Figures(NamedTuple):
    """Figures of one simulation, or the means of several."""

    makespan_s: float  # From the first submission to the last end
    utilization: float  # Of all GPUs, 0 to 1
    wait_s: float  # Mean wait for GPUs
    median_wait_s: float  # Its median over jobs
    wait_spread_s: float  # Its standard deviation
    run_s: float  # Mean time on GPUs, from start to end but for being put back; the paper calls it JCT
    jct_s: float  # Mean time from submission to end


def large_workload(case: str, seed: int, jobs: int = JOBS) -> Trace:
    """A workload for the large cluster."""
    random, (sigma, longest_s, times) = np.random.default_rng(seed), CASES[case]
    submit_s = np.sort(random.uniform(0.0, ARRIVALS_S, jobs))
    counts = times * random.choice(list(GPU_MIX), jobs, p=list(GPU_MIX.values()))
    service_s = np.minimum(longest_s, MEDIAN_S * np.exp(random.normal(0.0, sigma, jobs)))
    models = random.choice(list(CONFIGURATIONS), jobs)
    return _trace(f"{case}, seed {seed}", submit_s, counts, service_s, models)


def testbed_workload(case: str, seed: int, jobs: int = TESTBED_JOBS) -> Trace:
    """A workload for the testbed."""
    random = np.random.default_rng(seed)
    short = random.permutation(jobs) < round(SHORT_SHARE[case] * jobs)
    low, high = np.where(short, SHORT_S, SPLIT_S), np.where(short, SPLIT_S, LONG_S)
    service_s = low * (high / low) ** random.uniform(size=jobs)
    models = random.choice(list(CONFIGURATIONS), jobs)
    return _trace(f"{case}, seed {seed}", np.zeros(jobs), np.ones(jobs, dtype=int), service_s, models, mem_share=0.5)


def measured(
    policy: str, options: Mapping[str, Any], traces: Sequence[Trace], cluster: Cluster, interval_s: float
) -> Figures:
    """Return the means of a policy's figures over some workloads, planning every `interval_s` seconds."""
    settings = Settings(interval_s=interval_s, slowdown="utilization")
    runs = [_figures(simulate(trace, policy, cluster, settings, options)) for trace in traces]
    return Figures(*(statistics.fmean(values) for values in zip(*runs, strict=True)))


def change(of: Callable[[Figures], float], found: Figures, against: Figures) -> float:
    """How much more a figure is than another, in per cent."""
    return round(100 * (of(found) / of(against) - 1), 1)


def _figures(result: SimulationResult) -> Figures:
    figures = metrics_of(result)
    waits_s = [record.start_s - record.job.submit_s for record in result.records]
    return Figures(
        figures.makespan_s,
        figures.utilization["gpu"],
        statistics.fmean(waits_s),
        statistics.median(waits_s),
        statistics.pstdev(waits_s),
        statistics.fmean(record.run_s for record in result.records),
        figures.avg_jct_s,
    )


def _trace(
    name: str,
    submit_s: Sequence[float],
    counts: Sequence[int],
    service_s: Sequence[float],
    models: Sequence[str],
    *,
    mem_share: float = 1.0,
) -> Trace:
    jobs = tuple(
        TraceJob(number, float(at_s), int(count), max(1, round(alone_s / ITERATION_S)),
                 _profile(str(model), int(count), mem_share))
        for number, (at_s, count, alone_s, model) in enumerate(zip(submit_s, counts, service_s, models, strict=True))
    )  # fmt: skip
    return Trace(name, jobs)


def _profile(model: str, gpu_count: int, mem_share: float) -> StageProfile:
    """A configuration: its iteration keeps the GPU busy for its utilization, and waits for data otherwise."""
    utilization, mem_gib = CONFIGURATIONS[model]
    key = ProfileKey(model, 32, gpu_count, "rtx2080")
    busy_s = utilization * ITERATION_S
    return StageProfile(key, ITERATION_S - busy_s, 0.0, busy_s, 0.0, ITERATION_S, gpu_mem_gib=mem_share * mem_gib)
