"""Small traces, and an engine run in one line."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from muri.policies.types import Policy
from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator import run as run_module
from muri.simulator.model import Cluster, JobRecord, Settings, SimulationResult, Trace, TraceJob
from muri.simulator.run import simulate

STORAGE = (1.0, 0.0, 0.0, 0.0)
CPU = (0.0, 1.0, 0.0, 0.0)
GPU = (0.0, 0.0, 1.0, 0.0)
NETWORK = (0.0, 0.0, 0.0, 1.0)


def profile(stage_s: Sequence[float], name: str = "", gpu_count: int = 1, gpu_mem_gib: float = 0.0) -> StageProfile:
    """A profile whose iteration is the sum of its stages."""
    key = ProfileKey(name or "-".join(map(str, stage_s)), 32, gpu_count, "gpu")
    return StageProfile(key, *stage_s, iteration_s=sum(stage_s), gpu_mem_gib=gpu_mem_gib)


MODELS = [
    profile(stages, f"model-{index}", gpu_mem_gib=4.0 + 12.0 * index)
    for index, stages in enumerate(
        [(0.5, 0.1, 0.2, 0.0), (0.1, 0.7, 0.3, 0.1), (0.0, 0.1, 0.9, 0.2), (0.1, 0.1, 0.3, 0.4)]
    )
]
"""Four jobs of one GPU that wait for different resources, the later the more GPU memory they need."""


def job(job_id: int, submit_s: float, service_s: float, stage_s: Sequence[float] = GPU, **fields: Any) -> TraceJob:
    """A job that needs `service_s` alone; its stages must divide that."""
    gpu_count = fields.pop("gpu_count", 1)
    known = profile(stage_s, fields.pop("name", ""), gpu_count, fields.pop("gpu_mem_gib", 0.0))
    iterations = round(service_s / known.iteration_s)
    assert iterations * known.iteration_s == service_s
    return TraceJob(job_id, submit_s, gpu_count, iterations, known, **fields)


def run(jobs: Sequence[TraceJob], policy: str, cluster: Cluster, **how: Any) -> SimulationResult:
    """Simulate; what is not a setting is an argument of `simulate`."""
    extra = {name: how.pop(name) for name in ("options", "progress", "with_spans") if name in how}
    return simulate(Trace("made", tuple(jobs)), policy, cluster, Settings(**how), **extra)


def run_under(policy: Policy, jobs: Sequence[TraceJob], cluster: Cluster, **how: Any) -> SimulationResult:
    """Simulate under a policy of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "get_policy", lambda *_: policy)
        return run(jobs, policy.name, cluster, **how)


def by_id(result: SimulationResult) -> dict[int, JobRecord]:
    """The records by job id."""
    return {record.job.job_id: record for record in result.records}


def ends(result: SimulationResult) -> dict[int, float]:
    """When each job ended."""
    return {record.job.job_id: record.end_s for record in result.records}


_count_of_jobs = functools.cache(functools.partial(st.integers, 1))
_bursts, _gpus, _iterations = st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 3, 4]), st.integers(1, 2000)
_models, _either = st.sampled_from(MODELS), st.booleans()


@st.composite
def traces(draw: st.DrawFn, most: int = 14) -> list[TraceJob]:
    """Jobs of all sizes and both classes, in bursts."""
    count = draw(_count_of_jobs(most))
    return [
        TraceJob(
            job_id=index,
            submit_s=float(draw(_bursts) * 50),
            gpu_count=draw(_gpus),
            iterations=draw(_iterations),
            profile=draw(_models),
            opportunistic=draw(_either),
        )
        for index in range(count)
    ]
