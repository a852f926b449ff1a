"""What is known of each job's appetite for CPUs and memory: from the trace, from Synergy's table, or derived."""

import math
from collections.abc import Sequence

from muri.policies.allocation.demand import derived_sensitivity
from muri.policies.traits import Demand, Sensitivity
from muri.profiler.records import StageProfile
from muri.simulator.model import Cluster, TraceJob
from muri.simulator.traces.sensitivities import synergy_sensitivity


def sensitivities_of(jobs: Sequence[TraceJob], cluster: Cluster, fair: Demand) -> dict[int, Sensitivity | None]:
    """The sensitivity of every job, by id; equal ones are one object. None where nothing can make a difference.

    Args:
        jobs: The jobs.
        cluster: Whose nodes they run on.
        fair: The GPU-proportional share of one GPU there; infinite where unlimited.
    """
    if fair == (math.inf, math.inf):
        return {job.job_id: None for job in jobs}
    derived: dict[StageProfile, Sensitivity | None] = {}
    found: dict[int, Sensitivity | None] = {}
    for job in jobs:
        known = job.sensitivity or synergy_sensitivity(job.key.model)
        if known is None:
            if job.profile not in derived:
                on_one_node = min(job.gpu_count, cluster.gpus_per_node)
                derived[job.profile] = derived_sensitivity(job.profile, fair, cluster.cpus_per_node / on_one_node)
            known = derived[job.profile]
        found[job.job_id] = known
    return found
