"""From the queue to a policy's request: who may be planned, with what, on which nodes, and what is measured. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final, NamedTuple

from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.types import PlanJob, PlanRequest, ProfileUse, waited_s
from muri.profiler.records import ProfileKey, StageProfile, says_little
from muri.slurm_plugin.config import Config, Grouping
from muri.slurm_plugin.planning.actions import SplitTasks, StartDryRun
from muri.slurm_plugin.planning.cycle_input import ATTEMPTS, START_DELAY_S, CycleInput, Knowledge, dry_run_key
from muri.slurm_plugin.planning.model_traits import derived_for, gpu_utilization, sweep_cpus
from muri.slurm_plugin.planning.placement import domain_of, free_nodes
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import dry_run_limit_s
from muri.slurm_plugin.records.cluster import Job, JobState, Node, NodeIndex, task_numbers
from muri.slurm_plugin.records.journal import DRY_RUN, Intent
from muri.slurm_plugin.records.limits import PartitionLimits
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, why_arguments_are_unknown
from muri.units import MIB_PER_GIB

_ALONE_ON_REQUEST = "it was submitted with alone"

_CALLS_NOT = (
    "its model was never measured, and its batch script does not call `muri run` itself, without which it has no GPU "
    "in a group"
)


def ranks_reason(job: Job) -> str:
    """Return why a job on several GPUs or nodes must run alone, "" when it may be grouped.

    Its group has one runtime per GPU, so the job must tell its GPUs per node, and start one task per GPU: with
    srun (as many tasks as GPUs) or with torchrun (one task per node).
    """
    if job.task_count == job.gpu_count == job.node_count == 1:
        return ""
    if job.gpu_count % max(1, job.node_count) or not job.gpu_request:
        return (
            f"it asks for {job.gpu_count} GPUs on {job.node_count} node(s) without saying how many on each; "
            "--gres=gpu:N or --gpus-per-node=N would let it be grouped"
        )
    if job.task_count not in (job.gpu_count, job.node_count):
        return (
            f"it has {job.task_count} tasks for {job.gpu_count} GPU{'s' * (job.gpu_count > 1)}; a job with a task per "
            "GPU, or one per node for torchrun, can be grouped"
        )
    return ""


class KnownJob(NamedTuple):
    """A job, and what a cycle looks up once for it."""

    job: ManagedJob  # As its user submitted it
    key: ProfileKey  # Its model's
    profile: StageProfile | None  # What is known of its model, None while nothing is
    alone: str  # Why it must run alone, whatever is known of its model; "" when it may be grouped

    @property
    def is_measured(self) -> bool:
        """Whether its model was measured."""
        return self.profile is not None and not self.profile.is_estimate


@dataclass(frozen=True, slots=True)
class Preparation:
    """A policy's request, and what was decided before asking it."""

    request: PlanRequest  # For the policy
    dry_runs: tuple[StartDryRun, ...]  # To start now
    waiting: Mapping[int, str]  # Jobs that are not ready, with the reason
    # What the cycle decides on. Its `dry_run_jobs` include the jobs of these dry runs, except those planned with an
    # estimate: they may start, and then nothing is measured with them.
    cycle: CycleInput
    # Jobs that Slurm cannot start now, whoever plans them, with the reason: Slurm decides about them alone
    to_slurm: Mapping[int, str]
    room: SiteRoom  # What the site's limits leave; what is started has to be taken from it
    known: Mapping[int, KnownJob]  # What was looked up of each job that is ready, by job id
    splits: tuple[SplitTasks, ...] = ()  # Tasks of job arrays that need records of their own before they can be planned


def alone_reason(job: ManagedJob, view: View, knowledge: Knowledge, config: Config) -> str:
    """Return why a job must run alone, "" when it may be grouped."""
    partition = view.snapshot.limits.partition(job.partition)
    impossible = _why_not_possible(job, partition, config.grouping)
    reasons = chain(_why_unknown_or_alone(job, partition, view), impossible)
    return next(reasons, "") or knowledge.exclusions.get(job.job_id, "")


def _why_unknown_or_alone(job: ManagedJob, partition: PartitionLimits, view: View) -> Iterator[str]:
    """Why Muri cannot or must not take a job's GPUs away."""
    removal = view.snapshot.gpu_removal.way_for(job.gpu_request, partition)
    if not removal.request:
        yield f"its GPUs cannot be taken away while it waits, which a group needs ({removal.why})"
    if job.facts is None and not job.request.model and (why := why_arguments_are_unknown(job)):
        yield why
    if job.request.alone:
        yield _ALONE_ON_REQUEST
    if job.unknown_task:
        yield "nothing tells which of its array's tasks it is"


def _why_not_possible(job: ManagedJob, partition: PartitionLimits, grouping: Grouping) -> Iterator[str]:
    """What a job asks for that a group could not give it."""
    if job.het:
        yield "heterogeneous jobs are not grouped"
    if not job.can_requeue:
        yield "it was submitted with --no-requeue, and a group's failure would have to requeue it"
    if why := ranks_reason(job):
        yield why
    if partition.all_mem and not job.mem_per_node_mib:
        yield "it asks for no memory, so Slurm gives it all of its node's; with --mem it could share"
    if job.special:
        yield f"it asks for {', '.join(job.special)}, which a group could not give it"
    if job.required_nodes:
        yield f"it asks for the nodes {job.required_nodes} by name"
    if job.gpu_count > grouping.max_gpus_per_job:
        yield f"it asks for {job.gpu_count} GPUs; jobs of up to {grouping.max_gpus_per_job} are grouped"
    if grouping.max_group_size == 1:
        yield "grouping is turned off (grouping.max_group_size is 1)"


def _not_ready(job: ManagedJob, now_s: float) -> str:
    if job.own_dependency:
        return f"it waits for its dependency {job.own_dependency}"
    # After a first run this is not --begin but Slurm's delay after a requeue, which the repairs remove.
    if job.begin_s > now_s + START_DELAY_S and not job.restart_count:
        return "its --begin time has not come"
    if job.given is not None:
        return "it is about to get its own CPUs and memory back"
    return ""


def known_job(job: ManagedJob, cycle: CycleInput) -> KnownJob:
    """Look up what planning a job needs; `job` is as its user submitted it."""
    key = cycle.key_of(job)
    return KnownJob(
        job, key, cycle.knowledge.profile_of(key), alone_reason(job, cycle.view, cycle.knowledge, cycle.config)
    )


def prepare(cycle: CycleInput, profile_use: ProfileUse = "all", *, allocates_cpus: bool = False) -> Preparation:
    """Turn the queue into a policy's request."""
    room = SiteRoom(cycle.view, cycle.config.pilot.qos)
    places = room.places
    waiting: dict[int, str] = {}
    to_slurm: dict[int, str] = {}
    ready: dict[int, KnownJob] = {}
    arrays: list[ManagedJob] = []
    too_many = throttled(cycle.view)
    for job in cycle.view.having(Role.CANDIDATE):
        if reason := _not_ready(job, cycle.now_s):
            waiting[job.job_id] = reason
        elif reason := places.of(job).left_to_slurm:
            to_slurm[job.job_id] = reason
        elif job.job_id in cycle.knowledge.refused_releases:
            to_slurm[job.job_id] = "Slurm changes nothing in it"
        elif reason := room.why_no_room(job):
            waiting[job.job_id] = reason
        elif job.several_tasks and job.job_id not in cycle.knowledge.exclusions:
            waiting[job.job_id] = "these tasks of its array come after those that have job ids of their own"
            arrays.append(job)
        elif job.job_id in too_many:
            waiting[job.job_id] = too_many[job.job_id]
        else:
            ready[job.job_id] = known_job(job, cycle)
    wanted = _dry_runs(ready.values(), cycle, profile_use)
    dry_runs, unmeasured = _within_limits(wanted, cycle, room, sweeps=allocates_cpus)
    failures = {**cycle.knowledge.failures, **unmeasured}
    # Jobs that need not wait for their own dry runs, so that their scripts could run twice at once.
    not_waiting = (each for each in ready.values() if each.is_measured or each.alone == _ALONE_ON_REQUEST)
    measured_with = {run.job_id for run in dry_runs} & {each.job.job_id for each in not_waiting}
    # Measured in place, a job starts in spite of its dry run, which then ends.
    with_dry_run = frozenset() if cycle.config.profiling.in_place else cycle.knowledge.dry_run_jobs | measured_with
    knowledge = replace(cycle.knowledge, failures=failures, dry_run_jobs=with_dry_run)
    cycle = replace(cycle, knowledge=knowledge)
    pending = [
        plan_job(each, places.of(each.job).name, cycle.knowledge, cycle.config, cycle.node_index, room.largest_group)
        for each in ready.values()
    ]
    unknown = {job_id for job_id, each in ready.items() if each.profile is None}
    waiting_for_partners = _waiting_for_partners(pending, unknown, cycle.config, cycle.now_s)
    waiting |= dict.fromkeys(sorted(waiting_for_partners), "it waits for the dry runs of possible partners")
    in_dry_run = {
        job.job_id
        for job in pending
        if job.job_id in with_dry_run and waited_s(job, cycle.now_s) <= cycle.config.grouping.max_wait_s
    }
    waiting |= dict.fromkeys(
        sorted(in_dry_run), "its model is being measured with its script, which must not run twice"
    )
    request = PlanRequest(
        jobs=tuple(job for job in pending if job.job_id not in waiting),
        nodes=free_nodes(cycle, places, [each.job for each in ready.values()]),
        now_s=cycle.now_s,
        max_group_size=cycle.config.grouping.max_group_size,
    )
    return Preparation(
        request,
        dry_runs,
        waiting,
        cycle,
        to_slurm,
        room,
        ready,
        tuple(split_soon(arrays, cycle.view, cycle.config, cycle.nodes)),
    )


GroupLimits = Callable[[ManagedJob, int], tuple[int, str]]
"""Tells how large a group a job may be in, of so many jobs at most, and why no larger."""


def plan_job(
    known: KnownJob,
    partition: str,
    knowledge: Knowledge,
    config: Config,
    index: NodeIndex,
    limits: GroupLimits | None = None,
) -> PlanJob:
    """Describe a job to a policy."""
    job, key = known.job, known.key
    profile, alone, largest = sharing(known, knowledge, config, limits)
    expected = knowledge.expected(job, key)
    saved_s = knowledge.saved_gpu_s.get(job.job_id, 0.0) / max(1, job.gpu_count)
    mem_gib_per_gpu = job.mem_per_node_mib / max(1, job.gpus_per_node) / MIB_PER_GIB
    sensitivity = knowledge.traits.sensitivity(key, mem_gib_per_gpu)
    return PlanJob(
        job_id=job.job_id,
        user=job.user,
        partition=partition,
        gpu_count=job.gpu_count,
        submit_s=knowledge.first_submit_s.get(job.job_id, job.submit_s),
        waiting_since_s=job.submit_s if job.restart_count else None,
        profile=profile,
        remaining_s=None if expected is None else max(1.0, expected.seconds - saved_s),
        attained_gpu_s=knowledge.served_gpu_s.get(job.job_id, 0.0),
        groupable=not alone,
        alone_reason=alone,
        node_count=1 if alone and job.gpu_count % max(1, job.node_count) else max(1, job.node_count),
        sensitivity=sensitivity or derived_for(job, profile, index),
        gpu_utilization=gpu_utilization(profile),
        gpu_mem_request_gib=knowledge.gpu_mem_gib.get(job.job_id),
        domain=domain_of(job),
        largest_group=largest,
        priority=job.own_priority,
        min_speed=promised_to(job),
        opportunistic=job.request.opportunistic,
        mem_gib=job.mem_per_node_mib / MIB_PER_GIB,
    )


class Sharing(NamedTuple):
    """Whether a job may share GPUs."""

    profile: StageProfile | None  # What it may be planned with
    alone: str  # Why it must run alone, "" when it may be grouped
    largest: int  # The largest group that it may be in


def sharing(known: KnownJob, knowledge: Knowledge, config: Config, limits: GroupLimits | None) -> Sharing:
    """Return whether a job may share GPUs; `limits` as `plan_job` takes it."""
    job, alone = known.job, known.alone
    # A job whose own script a dry run executes must not start, for the script could overwrite its own files: it waits
    # for the measurement, as the first job of a model does.
    profile = None if job.job_id in knowledge.dry_run_jobs else known.profile
    if profile is not None and not profile.is_estimate:
        little = says_little(profile.stage_s, profile.iteration_s)
        if little:
            alone, profile = alone or f"its profile covers too little: {little}", None
    if not alone:
        alone = (
            _why_unknown(known, knowledge, config) if profile is None else _why_not_measured_there(job, profile, config)
        )
    largest, why = knowledge.largest_group.get(job.job_id, (MAX_GROUP_SIZE, ""))
    if not alone and limits is not None and largest > 1:
        largest, why = limits(job, largest)
    if largest == 1 and not alone:
        alone = why
    return Sharing(profile, alone, largest)


def _why_unknown(known: KnownJob, knowledge: Knowledge, config: Config) -> str:
    """Why nothing will be known of a job's model, "" when it is to be measured."""
    if failed := knowledge.failed(known.key):
        what = "it could not be measured in a group" if config.profiling.in_place else "its dry run failed"
        return f"{what}: {failed}"
    if why := why_arguments_are_unknown(known.job):
        return f"its model cannot be measured: {why}"
    if config.profiling.at_once == 0:
        return "its model has no profile and profiling is turned off (profiling.at_once is 0)"
    return ""


def _why_not_measured_there(job: ManagedJob, profile: StageProfile, config: Config) -> str:
    """Why a job whose model is only estimated cannot be measured in a group."""
    return _CALLS_NOT if profile.is_estimate and config.profiling.in_place and not job.calls_muri else ""


def promised_to(job: ManagedJob) -> float:
    """Return the speed that a job has asked for, or that it was promised already; 0 for none."""
    # What was promised stays so, whatever the site promises to others now.
    return max(job.request.min_speed, 0.0 if job.membership is None else job.membership.min_speed)


def _waiting_for_partners(pending: list[PlanJob], unknown: set[int], config: Config, now_s: float) -> set[int]:
    """Return the young jobs that share a bucket with a model being profiled: better partners may come."""
    if config.profiling.in_place:
        return set()
    buckets = {_bucket(job) for job in pending if job.groupable and job.job_id in unknown}
    return {
        job.job_id
        for job in pending
        if job.groupable
        and job.profile is not None
        and _bucket(job) in buckets
        and now_s - job.submit_s < config.tuning.wait_for_profiles_s
    }


def _bucket(job: PlanJob) -> tuple[str, str, str, int, int]:
    return (job.user, job.domain, job.partition, job.gpu_count, job.node_count)


def _dry_runs(ready: Iterable[KnownJob], cycle: CycleInput, profile_use: ProfileUse) -> tuple[StartDryRun, ...]:
    """Return the dry runs to start now.

    A user whose dry runs are fewer goes first, so that nobody has two while others wait for one; then models without
    any profile, then the user whose last dry run began longest ago, such as before one that never started.
    """
    if not cycle.config.profiling.starts_dry_runs:
        return ()
    wanted: dict[ProfileKey, int] = {}
    for each in sorted(ready, key=lambda each: (each.job.submit_s, each.job.job_id)):
        if _is_to_be_measured(each, cycle.knowledge, profile_use):
            wanted.setdefault(each.key, each.job.job_id)
    at_work = Counter(run.user for run in cycle.view.having(Role.DRY_RUN))
    last_s = _last_dry_runs_s(cycle.view, cycle.intents)
    chosen: list[ProfileKey] = []
    for _ in range(min(cycle.config.profiling.at_once - at_work.total(), len(wanted))):
        left = (key for key in wanted if key not in chosen)
        first = min(
            left, key=lambda key: (at_work[key.user], _is_measured(key, cycle.knowledge), last_s.get(key.user, 0.0))
        )
        chosen.append(first)
        at_work[first.user] += 1
    return tuple(StartDryRun(wanted[key], str(key), cycle.knowledge.profile_of(key) is not None) for key in chosen)


def _within_limits(
    runs: tuple[StartDryRun, ...], cycle: CycleInput, room: SiteRoom, *, sweeps: bool
) -> tuple[tuple[StartDryRun, ...], dict[str, tuple[int, str]]]:
    """Leave out the dry runs for which the site's limits have no room; their jobs need not wait for them."""
    kept: list[StartDryRun] = []
    left_out: dict[str, tuple[int, str]] = {}
    for run in runs:
        job = cycle.view.jobs[run.job_id]
        partition = cycle.config.profiling.partition or job.partition
        cpus = sweep_cpus(job, cycle.knowledge.traits, cycle.node_index, cycle.config) if sweeps else None
        if cpus is not None and not room.take_dry_run(
            replace(job, cpu_count=cpus), partition, dry_run_limit_s(cycle.config, cpus)
        ):
            kept.append(replace(run, sweep_cpus=cpus))
            continue
        why = room.take_dry_run(job, partition, dry_run_limit_s(cycle.config))
        if not why:
            kept.append(run)
        elif not run.again:
            left_out[run.key] = (ATTEMPTS, f"there is no room for it: {why}")
    return tuple(kept), left_out


def _is_measured(key: ProfileKey, knowledge: Knowledge) -> bool:
    profile = knowledge.profile_of(key)
    return profile is not None and not profile.is_estimate


def _last_dry_runs_s(view: View, intents: tuple[Intent, ...]) -> dict[str, float]:
    """When the last dry run of each user began, seconds since the epoch."""
    runs = (intent for intent in intents if intent.kind == DRY_RUN)
    return {dry_run_key(run, view).user: run.begun_s for run in sorted(runs, key=lambda run: run.begun_s)}


def _is_to_be_measured(known: KnownJob, knowledge: Knowledge, profile_use: ProfileUse) -> bool:
    """Whether a job's model is to be measured in a dry run, and with this job's script it can be."""
    job, key = known.job, known.key
    if known.profile is not None and not knowledge.is_stale(key):
        return False
    # --muri=alone asks for a profile, too.
    if profile_use == "none" or (profile_use == "sharing" and known.alone not in {"", _ALONE_ON_REQUEST}):
        return False
    under_way = key in knowledge.profiling or job.job_id in knowledge.dry_run_jobs
    impossible = job.unknown_task or job.het or job.special or why_arguments_are_unknown(job)
    return not (under_way or impossible or knowledge.failed(key))


_MOST_READY: Final = 64
"""So many tasks of an array have records of their own before they start; each costs slurmctld a record."""


def split_soon(
    records: Iterable[ManagedJob], view: View, config: Config, nodes: Sequence[Node]
) -> Iterator[SplitTasks]:
    """Give records to the tasks that could start soon, in their order.

    One task always stays behind: the last one keeps the array's own record.
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
        if job.array_job_id and job.state.is_active and (job.state is not JobState.PENDING or is_let_go(job))
    )


def is_let_go(job: ManagedJob) -> bool:
    """Return whether a job waits for nothing but Slurm."""
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
