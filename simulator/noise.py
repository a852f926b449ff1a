"""Profiles as policies see them: the true ones, or with an error of the size that Muri's section 6.4 studies."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from muri.profiler.records import StageProfile
from muri.simulator.model import TraceJob


def planned_profiles(jobs: Sequence[TraceJob], noise: float, seed: int) -> dict[int, StageProfile]:
    """What is planned with, by job id; equal profiles are one object, for planning looks at each object once.

    Every stage of every job gets a factor of its own from U[1 − n_p, 1 + n_p], drawn from the seed and the job's
    id alone. The iteration time changes as the sum of the stages does.

    Args:
        jobs: The jobs.
        noise: n_p, 0 to 1.
        seed: Seed.
    """
    if noise <= 0:
        same: dict[StageProfile, StageProfile] = {}
        return {job.job_id: same.setdefault(job.profile, job.profile) for job in jobs}
    return {job.job_id: _noisy(job, noise, seed) for job in jobs}


def _noisy(job: TraceJob, noise: float, seed: int) -> StageProfile:
    true = job.profile
    factors = np.random.default_rng((seed, job.job_id)).uniform(1.0 - noise, 1.0 + noise, len(true.stage_s)).tolist()
    stages = [stage_s * factor for stage_s, factor in zip(true.stage_s, factors, strict=True)]
    busy_s = sum(true.stage_s)
    stretch = sum(stages) / busy_s if busy_s > 0 else 1.0
    if stretch <= 0:
        return true
    return replace(
        true,
        load_s=stages[0],
        preprocess_s=stages[1],
        propagate_s=stages[2],
        synchronize_s=stages[3],
        iteration_s=true.iteration_s * stretch,
    )
