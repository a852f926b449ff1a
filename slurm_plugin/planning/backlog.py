"""How many of the jobs that Slurm alone decides about it gets at once: more than can start soon, not all. Pure."""

from collections import Counter
from collections.abc import Sequence

from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.request import starts_by_itself
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import ManagedJob, Role

LATER = "more than enough jobs of its partition wait for Slurm already (slurm_backlog); it is let go as they start"


def to_let_go(jobs: Sequence[ManagedJob], cycle: CycleInput) -> tuple[ManagedJob, ...]:
    """Return the jobs that Slurm gets now: of each partition those of the highest priority, of these the oldest.

    A partition gets one for each idle CPU and `slurm_backlog` more, less those that compete there already. So a job is
    held back only behind more jobs of a higher priority than Slurm's schedulers look at. What has been let go and waits
    for something else than resources, such as a limit, keeps nobody back.

    Args:
        jobs: Those that are left to Slurm.
        cycle: What the cycle decides on.
    """
    by_priority = sorted(jobs, key=lambda job: (-job.own_priority, job.submit_s, job.job_id))
    partitions = {job.partition for job in jobs}
    competing = Counter(job.partition for job in cycle.view.having(Role.RELEASED) if _competes(job))
    room = {each: _idle_cpus(each, cycle) + cycle.config.slurm_backlog - competing[each] for each in partitions}
    taken: Counter[str] = Counter()
    chosen: list[ManagedJob] = []
    for job in by_priority:
        if taken[job.partition] < room[job.partition]:
            taken[job.partition] += 1
            chosen.append(job)
    return tuple(chosen)


def _competes(job: ManagedJob) -> bool:
    return job.state is JobState.PENDING and starts_by_itself(job)


def _idle_cpus(partition: str, cycle: CycleInput) -> int:
    """Return an upper bound of how many jobs could start in a partition, or one of several, at once."""
    names = set(partition.split(","))
    nodes = (node for node in cycle.nodes if node.usable and not names.isdisjoint(node.partitions))
    return sum(max(0, node.cpu_count - node.cpus_allocated) for node in nodes)
