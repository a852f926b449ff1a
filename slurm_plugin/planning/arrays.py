"""Job arrays: which tasks get records of their own, how many may start, and how Slurm comes to look at them. Pure.

In Slurm the waiting tasks of an array are one record. A task of which something is to be changed needs its own, with a
job id of its own; from then on it is planned like any job. Only as many tasks get one as could start soon.

When Slurm's schedulers find that a task of an array cannot start, they pass over all its siblings behind that task in
the queue: without Muri all ask for the same. So those that Muri keeps back must stand behind those that it lets go. No
job gets more priority for that than Slurm gives it: the ones that are kept back get less, by a nice value, which costs
neither age nor fair share and gives way to a priority that an administrator has fixed. Where a nice value does nothing,
as among jobs of the least priority, they wait for their siblings' start by a dependency, which ends by itself.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Final

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Action, ResumeGroup, SplitTasks, StandBack, members_in, started
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.comment_tags import Place
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_MOST_READY: Final = 64
"""So many tasks of an array have records of their own before they start; each costs slurmctld a record."""

_MOST_NICE: Final = 2_000_000_000
"""Slurm takes nice values up to 2,147,483,645."""


def task_numbers(text: str) -> Iterator[int]:
    """Yield the tasks in Slurm's text, such as 0, 2, 4 and 9 for "0-4:2,9"."""
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        yield from range(int(first), int(last or first) + 1, int(step or 1))


def task_count(job: Job) -> int:
    """Return how many jobs a record stands for."""
    return sum(1 for _ in task_numbers(job.array_tasks)) if job.several_tasks else 1


def split_soon(
    records: Iterable[ManagedJob], view: View, config: Config, nodes: Sequence[Node]
) -> Iterator[SplitTasks]:
    """Give records to the tasks that could start soon, in their order.

    One task always stays behind: the last one keeps the array's own record.

    Args:
        records: Records of several tasks that wait for nothing but Muri.
        view: The queue.
        config: The configuration.
        nodes: The nodes.
    """
    ready = Counter(job.array_job_id for job in view.having(Role.CANDIDATE) if not job.several_tasks)
    started = _started(view)
    for record in records:
        array = record.array_job_id
        most = min(_MOST_READY, _most_at_once(record, config, nodes))
        if record.array_limit:
            most = min(most, record.array_limit - started[array])
        waiting = list(islice(task_numbers(record.array_tasks), max(0, most - ready[array]) + 1))
        tasks = waiting[: most - ready[array]] if most > ready[array] else []
        tasks = tasks if len(waiting) > len(tasks) else tasks[:-1]
        if tasks:
            yield SplitTasks(record.job_id, tuple(tasks))


def _most_at_once(record: ManagedJob, config: Config, nodes: Sequence[Node]) -> int:
    """How many tasks could run at once, each of them in a group."""
    usable = [node for node in nodes if node.usable and record.partition in node.partitions]
    gpus = sum(node.gpu_count for node in usable)
    return max(1, config.grouping.max_group_size * gpus // max(1, record.gpu_count))


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


def stand_backs(cycle: CycleInput, actions: Sequence[Action]) -> Iterator[StandBack]:
    """Let tasks that are kept back stand behind siblings that may start, and others where Slurm has them.

    A nice value stays until its task is let go: until then Muri alone decides when it starts.

    Args:
        cycle: What the cycle decides on.
        actions: What else it does, starts above all.
    """
    resumed = {action.token for action in actions if isinstance(action, ResumeGroup)}
    groups = [members_in(intent.payload) for intent in cycle.intents if intent.token in resumed]
    starts = started(actions) | {member.job_id for members in groups for member in members}
    arrays: defaultdict[int, list[ManagedJob]] = defaultdict(list)
    for job in cycle.view.jobs.values():
        if job.array_job_id and job.state is JobState.PENDING:
            arrays[job.array_job_id].append(job)
    for records in arrays.values():
        ahead = [
            job
            for job in records
            if not job.held and (job.job_id in starts or (job.role in {Role.MEMBER, Role.RELEASED} and _is_let_go(job)))
        ]
        # What goes away goes first: two tasks that wait for each other's start Slurm would refuse.
        yield from (StandBack(job.job_id, None) for job in records if _stands_back_for_nobody(job, ahead, starts))
        for job in records:
            may_wait = job.role is Role.CANDIDATE and job.given is None and job.job_id not in starts
            if may_wait and _is_looked_at(job, cycle.now_s) and (place := _place_behind(job, ahead)) is not None:
                yield StandBack(job.job_id, place)


def _stands_back_for_nobody(job: ManagedJob, ahead: Sequence[ManagedJob], starts: AbstractSet[int]) -> bool:
    if job.place is None or job.held:
        return False
    if job.role is not Role.CANDIDATE:
        return True
    waits_for = set() if job.dependency == job.own_dependency else set(job.dependency.split(","))
    return bool(waits_for) and (job.job_id in starts or waits_for.isdisjoint(map(_start_of, ahead)))


def _is_looked_at(job: ManagedJob, now_s: float) -> bool:
    """Whether Slurm's schedulers look at a waiting record."""
    return not (job.held or job.dependency or job.begin_s > now_s)


def _place_behind(job: ManagedJob, ahead: Sequence[ManagedJob]) -> Place | None:
    """What makes a task stand behind siblings, None where it does already."""
    passed = [
        each
        for each in ahead
        if each.partition == job.partition and _order(job, job.priority) < _order(each, each.own_priority)
    ]
    if not passed:
        return None
    lowest, own_nice = min(each.own_priority for each in passed), job.own_nice
    nice = job.nice + job.priority - lowest + 1
    was_in_vain = job.place is not None and job.place.nice not in {job.nice, job.place.own_nice}
    if lowest > 1 and nice <= _MOST_NICE and not was_in_vain:
        return Place(own_nice, nice)
    return Place(own_nice, own_nice, ",".join(sorted(map(_start_of, passed))))


def _start_of(job: Job) -> str:
    """The dependency on a task's start."""
    return f"after:{job.name_in_slurm}"


def _order(job: Job, priority: int) -> tuple[float, float, float]:
    """Slurm's order among an array's records; the record of several tasks comes last."""
    return -priority, job.submit_s, float("inf") if job.several_tasks else int(job.array_tasks or 0)
