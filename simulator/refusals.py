"""What neither model can simulate: the checks that both of them make."""

import math

from muri.simulator.model import Cluster, Settings, SimulationError, Trace


def check_noise(settings: Settings) -> None:
    """Refuse noise that would make stage times negative.

    Raises:
        SimulationError: Says what is valid.
    """
    if not 0 <= settings.profile_noise <= 1:
        raise SimulationError(f"profile_noise is {settings.profile_noise}; it must be 0 to 1")


def check_cluster(cluster: Cluster) -> None:
    """Refuse a cluster without GPUs, or with amounts that no node can have.

    Raises:
        SimulationError: Says what it has.
    """
    if cluster.node_count < 1 or cluster.gpus_per_node < 1:
        raise SimulationError(
            f"the cluster has {cluster.node_count} nodes with {cluster.gpus_per_node} GPUs each; both must be ≥ 1"
        )
    for name in ("gpu_mem_gib", "cpus_per_node", "mem_gib_per_node"):
        amount = getattr(cluster, name)
        if not 0 <= amount < math.inf:
            raise SimulationError(f"{name} is {amount}; it must be a finite number ≥ 0 (0: unlimited)")


def check_sizes(trace: Trace, cluster: Cluster) -> None:
    """Refuse a trace without jobs, or with one that is larger than the cluster.

    Raises:
        SimulationError: Names the trace or the job.
    """
    if not trace.jobs:
        raise SimulationError(f"trace {trace.name} has no jobs; there is nothing to simulate")
    for job in trace.jobs:
        if not 1 <= job.gpu_count <= cluster.gpu_count:
            raise SimulationError(
                f"job {job.job_id} needs {job.gpu_count} GPUs, but the cluster has {cluster.gpu_count}; "
                "simulate more nodes, or leave the job out"
            )
