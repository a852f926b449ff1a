"""Job arrays: which tasks get records of their own, how many may start, and how Slurm comes to look at them. Pure.

In Slurm the waiting tasks of an array are one record. A task of which something is to be changed needs its own, with a
job id of its own; from then on it is planned like any job. Only as many tasks get one as could start soon.

When Slurm's schedulers find that a task of an array cannot start, they pass over all its siblings behind that task in
the queue: without Muri all ask for the same. So a task that Muri lets go must stand before those that Muri keeps back,
and a member, which asks for no GPUs, before those that wait for some.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from muri.slurm_plugin.planning.actions import Overtake, SplitTasks
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_MOST_READY: Final = 64
"""So many tasks of an array have records of their own before they start; each costs slurmctld a record."""


def task_numbers(text: str) -> Iterator[int]:
    """Yield the tasks in Slurm's text, such as 0, 2, 4 and 9 for "0-4:2,9"."""
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def task_count(job: Job) -> int:
    """Return how many jobs a record stands for."""
    return sum(1 for _ in task_numbers(job.array_tasks)) if job.several_tasks else 1


def split_soon(records: Iterable[ManagedJob], cycle: CycleInput) -> Iterator[SplitTasks]:
    """Give records to the tasks that could start soon, in their order.

    One task always stays behind: the last one keeps the array's own record.

    Args:
        records: Records of several tasks that wait for nothing but Muri.
        cycle: What the cycle decides on.
    """
    ready = Counter(job.array_job_id for job in cycle.view.having(Role.CANDIDATE) if not job.several_tasks)
    started = _started(cycle.view)
    for record in records:
        array = record.array_job_id
        most = min(_MOST_READY, _most_at_once(record, cycle))
        if record.array_limit:
            most = min(most, record.array_limit - started[array])
        waiting = list(islice(task_numbers(record.array_tasks), max(0, most - ready[array]) + 1))
        tasks = waiting[: most - ready[array]] if most > ready[array] else []
        tasks = tasks if len(waiting) > len(tasks) else tasks[:-1]
        if tasks:
            yield SplitTasks(record.job_id, tuple(tasks))


def _most_at_once(record: ManagedJob, cycle: CycleInput) -> int:
    """How many tasks could run at once, each of them in a group."""
    nodes = [node for node in cycle.nodes if node.usable and record.partition in node.partitions]
    gpus = sum(node.gpu_count for node in nodes)
    return max(1, cycle.config.grouping.max_group_size * gpus // max(1, record.gpu_count))


def _started(view: View) -> Counter[int]:
    """How many tasks of each array have been let go and not ended."""
    return Counter(
        job.array_job_id
        for job in view.jobs.values()
        if job.array_job_id and job.state.is_active and (job.state is not JobState.PENDING or _is_let_go(job))
    )


def _is_let_go(job: ManagedJob) -> bool:
    return job.state is JobState.PENDING and not (job.gated or job.held or job.several_tasks)


def throttled(view: View) -> dict[int, str]:
    """Return why tasks wait whose array runs no more of them at once (`--array=…%N`), by job id.

    Slurm counts them, too; but a member that Slurm keeps waiting would leave its group's GPUs to nobody.
    """
    taken, found = _started(view), dict[int, str]()
    tasks = [job for job in view.having(Role.CANDIDATE) if job.array_limit and job.array_tasks.isdecimal()]
    for job in sorted(tasks, key=lambda job: int(job.array_tasks)):
        if taken[job.array_job_id] >= job.array_limit:
            found[job.job_id] = f"its array runs at most {job.array_limit} tasks at once (%{job.array_limit})"
        taken[job.array_job_id] += 1
    return found


@dataclass(frozen=True, slots=True)
class Siblings:
    """The records of job arrays that Slurm may look at: they wait, and nobody holds them."""

    _waiting: Mapping[int, Sequence[ManagedJob]]

    @classmethod
    def of_queue(cls, view: View) -> "Siblings":
        """Find them in one pass."""
        waiting: defaultdict[int, list[ManagedJob]] = defaultdict(list)
        for job in view.jobs.values():
            if job.array_job_id and job.state is JobState.PENDING and not job.held:
                waiting[job.array_job_id].append(job)
        return cls(waiting)

    def arrays(self) -> Iterable[Sequence[ManagedJob]]:
        """Return the records of each array that has any."""
        return self._waiting.values()

    def of(self, job: Job) -> Sequence[ManagedJob]:
        """Return the other records of a task's array."""
        waiting = self._waiting.get(job.array_job_id, ()) if job.array_job_id else ()
        return [each for each in waiting if each.job_id != job.job_id]


def priority_ahead(job: Job, siblings: Iterable[ManagedJob], *, member: bool) -> int | None:
    """Return the priority with which a task that is let go stands before the siblings that could stop it.

    Args:
        job: The task.
        siblings: Records of its array that wait.
        member: Whether it asks for no GPUs.

    Returns:
        A priority, None where it has it already, or is no task of an array.
    """
    kept = max((each.priority for each in siblings if each.gated), default=0)
    alone = max((each.priority for each in siblings if each.role is Role.RELEASED and not each.gated), default=0)
    # Those that are let go alone together with it stand one before the ones that are kept back.
    needed = max(kept + 2 if kept else 0, alone + 1 if alone else 0) if member else kept + 1 if kept else 0
    return needed if job.priority < needed and not job.held else None


def overtakes(cycle: CycleInput) -> Iterator[Overtake]:
    """Bring tasks before siblings whose priority has grown with their age, or that were released before them."""
    siblings = Siblings.of_queue(cycle.view)
    for records in siblings.arrays():
        for job in records:
            if job.role not in {Role.MEMBER, Role.RELEASED} or not _is_let_go(job):
                continue
            priority = priority_ahead(job, siblings.of(job), member=job.role is Role.MEMBER)
            if priority is not None:
                yield Overtake(job.job_id, priority)
