"""The workloads of the Synergy paper, section 5.1: derived from Philly, with a load, a split and sizes of jobs."""

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from muri.simulator.model import Cluster, Settings, SimulationResult, Trace, TraceJob
from muri.simulator.run import simulate
from muri.simulator.traces.generator import PHILLY_GPU_MIX
from muri.simulator.traces.models import synergy_figures, synergy_models
from muri.simulator.traces.read import read_trace
from muri_lab.benchmarks.papers.frame import ROOT, needed

PUBLISHED: Final = ROOT.parent / "shared" / "traces" / "synergy_single_gpu_load9.csv"
PUBLISHED_LOAD: Final = 9.0
FIRST, LAST = 4_000, 5_000  # The jobs that count: the cluster is in its steady state

QUICK: Final = (200, 260)

MODELS: Final = (
    ("alexnet", "res18", "res50", "mobilenet", "shufflenet"),
    ("gnmt", "transformer", "lstm"),
    ("m5", "deepspeech"),
)
"""Image, language and speech."""

USUAL: Final = (20, 70, 10)  # The paper's usual split, percent
HOUR_S: Final = 3600.0

Jcts = npt.NDArray[np.float64]  # Array (jobs,): hours

SHORT_H: Final = 4.0  # A job with a lower JCT is short


class Workload(NamedTuple):
    """A workload."""

    load: float  # Jobs per hour
    split: tuple[int, int, int] = USUAL  # Percent of image, language and speech jobs
    multi: bool = False  # Whether jobs have the sizes of Philly's, else one GPU each


def counted_jobs(quick: bool) -> tuple[int, int]:
    """Which jobs count, the first and the one after the last; fewer in a small run."""
    if quick:
        return QUICK
    needed(PUBLISHED, "the trace of Synergy's authors")
    return FIRST, LAST


@cache
def drawn_jobs() -> tuple[tuple[float, float], ...]:
    """Return submission times at 9 jobs an hour and durations with the proportional share, seconds, of each job.

    They come from the authors' own trace where it is at hand; else, for small runs, from the paper's recipe.
    """
    if PUBLISHED.exists():
        jobs = read_trace(PUBLISHED).jobs
        return tuple((job.submit_s, job.iterations * job.profile.iteration_s) for job in jobs[: 2 * LAST])
    draw, now_s, found = Random(42), 0.0, []
    for _ in range(2 * LAST):
        now_s += math.ceil(-math.log(1.0 - draw.random()) / PUBLISHED_LOAD * HOUR_S)
        low, high = (3.0, 4.0) if draw.random() >= 0.8 else (1.5, 3.0)
        found.append((now_s, 60.0 * 10 ** draw.uniform(low, high)))
    return tuple(found)


def models_of(split: tuple[int, int, int], count: int) -> list[str]:
    """The model of each job: the kind that lacks most to its percentage, and its models in turn."""
    counts, found = [0, 0, 0], []
    for number in range(count):
        lacking = [percent / 100 - done / max(number, 1) for percent, done in zip(split, counts, strict=True)]
        kind = lacking.index(max(lacking))
        found.append(MODELS[kind][counts[kind] % len(MODELS[kind])])
        counts[kind] += 1
    return found


def trace_of(workload: Workload, count: int) -> Trace:
    """The first jobs of a workload."""
    draw, models = Random(7), synergy_models()
    sizes = draw.choices(list(PHILLY_GPU_MIX), list(PHILLY_GPU_MIX.values()), k=count)
    jobs = []
    for number, model in enumerate(models_of(workload.split, count)):
        submit_s, duration_s = drawn_jobs()[number]
        gpus = sizes[number] if workload.multi else 1
        profile = models[model].profile(gpus)
        iterations = max(1, int(duration_s / profile.iteration_s))
        submit_s = math.ceil(submit_s * PUBLISHED_LOAD / workload.load)
        jobs.append(TraceJob(number, submit_s, gpus, iterations, profile))
    kind = "multi" if workload.multi else "single"
    return Trace(f"synergy-{kind}-{workload.load:g}", tuple(jobs))


def simulated(
    workload: Workload, way: str, *, cpus_per_gpu: int = 3, jobs: tuple[int, int] = (FIRST, LAST)
) -> SimulationResult:
    """The model of the public simulator, until the last job that counts has ended; see `jct_h`."""
    cluster = Cluster(16, 8, cpus_per_node=8 * cpus_per_gpu, mem_gib_per_node=500)
    trace = trace_of(workload, jobs[1] + jobs[1] // 4)
    if cpus_per_gpu != 3:
        trace = replace(trace, jobs=tuple(_longer(job, cpus_per_gpu) for job in trace.jobs))
    options = dict(zip(("mechanism", "order"), way.split("-"), strict=True))
    return simulate(trace, "synergy", cluster, Settings(model="reference", until=jobs[1]), options)


def jct_h(workload: Workload, way: str, *, cpus_per_gpu: int = 3, jobs: tuple[int, int] = (FIRST, LAST)) -> Jcts:
    """JCT, hours, of the jobs of the steady state under the model of the public simulator."""
    result = simulated(workload, way, cpus_per_gpu=cpus_per_gpu, jobs=jobs)
    records = sorted(result.records, key=lambda record: (record.job.submit_s, record.job.job_id))
    return np.array([record.jct_s for record in records[slice(*jobs)]]) / HOUR_S


def simulated_by_default(workload: Workload, policy: str, count: int) -> SimulationResult:
    """The default model, with plans every 300 s, until all of the first jobs have ended."""
    cluster = Cluster(16, 8, cpus_per_node=24, mem_gib_per_node=500)
    return simulate(trace_of(workload, count), policy, cluster, Settings(interval_s=300.0))


def _longer(job: TraceJob, cpus_per_gpu: int) -> TraceJob:
    faster = synergy_figures()[job.profile.key.model].sensitivity.throughput_at(cpus_per_gpu, 62.5)
    return replace(job, iterations=max(1, int(job.iterations * faster)))
