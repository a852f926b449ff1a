"""From what is known to a policy's request, and what is measured. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from muri.clock import MIB_PER_GIB
from muri.policies.options import MAX_GROUP_SIZE
from muri.policies.types import PlanJob, PlanRequest, ProfileUse, waited_s
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import StartDryRun
from muri.slurm_plugin.planning.cycle_input import Knowledge
from muri.slurm_plugin.planning.gathered import ALONE_ON_REQUEST, Gathered, KnownJob
from muri.slurm_plugin.planning.slurm_requests import dry_run_limit_s
from muri.slurm_plugin.records.cluster import Job, NodeIndex
from muri.slurm_plugin.records.roles import ManagedJob, Role

_CALLS_NOT = (
    "its model was never measured, and its batch script does not call `muri run` itself, without which it takes no "
    "turns"
)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A policy's request, and what was decided before asking it."""

    request: PlanRequest
    dry_runs: tuple[StartDryRun, ...]  # To start now
    waiting: Mapping[int, str]  # Jobs that are not planned, with the reason
    # What the cycle decides on. Its `dry_run_jobs` include the jobs of these dry runs, except those planned with an
    # estimate: they may start, and then nothing is measured with them.
    cycle: Gathered


def prepare(cycle: Gathered, profile_use: ProfileUse = "all", *, allocates_cpus: bool = False) -> Preparation:
    """Turn the queue into a policy's request."""
    config, known, now_s, room = cycle.config, cycle.knowledge, cycle.now_s, cycle.room
    ready = [cycle.known[job_id] for job_id in cycle.ready]
    dry_runs, unmeasured = _within_limits(_dry_runs(ready, cycle, profile_use), cycle, sweeps=allocates_cpus)
    # Jobs that need not wait for their own dry runs, so that their scripts could run twice at once.
    not_waiting = (each for each in ready if each.is_measured or each.alone == ALONE_ON_REQUEST)
    measured_with = {run.job_id for run in dry_runs} & {each.job.job_id for each in not_waiting}
    # Measured in place, a job starts in spite of its dry run, which then ends.
    with_dry_run = frozenset() if config.profiling.in_place else known.dry_run_jobs | measured_with
    cycle = replace(cycle, knowledge=replace(known, dry_run_jobs=with_dry_run))
    if unmeasured:
        failed = ((job_id, each, unmeasured.get(each.key, each.failed)) for job_id, each in cycle.known.items())
        cycle = replace(cycle, known={job_id: each._replace(failed=why) for job_id, each, why in failed})
        ready = [cycle.known[job_id] for job_id in cycle.ready]
    pending = [plan_job(each, room.places.of(each.job).name, cycle, cycle.largest_group) for each in ready]
    unknown = {each.job.job_id for each in ready if each.profile is None}
    waiting = {**cycle.waiting, **_waiting_for_partners(pending, unknown, cycle)}
    in_dry_run = {
        job.job_id
        for job in pending
        if job.job_id in with_dry_run and waited_s(job, now_s) <= config.grouping.max_wait_s
    }
    waiting |= dict.fromkeys(
        sorted(in_dry_run), "its model is being measured with its script, which must not run twice"
    )
    request = PlanRequest(
        jobs=tuple(job for job in pending if job.job_id not in waiting),
        nodes=cycle.nodes,
        now_s=now_s,
        max_group_size=config.grouping.max_group_size,
    )
    return Preparation(request, dry_runs, waiting, cycle)


GroupLimits = Callable[[ManagedJob, int], tuple[int, str]]
"""Tells how large a group a job may be in, of so many jobs at most, and why no larger: `Gathered.largest_group`."""


def plan_job(known: KnownJob, partition: str, cycle: Gathered, limits: GroupLimits | None = None) -> PlanJob:
    """Describe a job to a policy; `partition` is that for planning, and a job that runs has no `limits`."""
    job, memory = known.job, cycle.knowledge
    profile, alone, largest = sharing(known, memory, cycle.config, limits)
    saved_s = memory.saved_gpu_s.get(job.job_id, 0.0) / max(1, job.gpu_count)
    return PlanJob(
        job_id=job.job_id,
        user=job.user,
        partition=partition,
        gpu_count=job.gpu_count,
        submit_s=memory.first_submit_s.get(job.job_id, job.submit_s),
        waiting_since_s=job.submit_s if job.restart_count else None,
        profile=profile,
        remaining_s=None if known.expected is None else max(1.0, known.expected.seconds - saved_s),
        attained_gpu_s=memory.served_gpu_s.get(job.job_id, 0.0),
        groupable=not alone,
        alone_reason=alone,
        node_count=1 if alone and job.gpu_count % max(1, job.node_count) else max(1, job.node_count),
        sensitivity=known.sensitivity or (None if profile is None else known.derived),
        gpu_utilization=None if profile is None else profile.detail.gpu_utilization,
        gpu_mem_request_gib=memory.gpu_mem_gib.get(job.job_id),
        domain=known.domain,
        largest_group=largest,
        priority=job.own_priority,
        min_speed=known.min_speed,
        opportunistic=job.request.opportunistic,
        mem_gib=job.mem_per_node_mib / MIB_PER_GIB,
    )


class Sharing(NamedTuple):
    """Whether a job may share GPUs."""

    profile: StageProfile | None  # None where it may not be planned with one
    alone: str  # Why it must run alone, "" when it may be grouped
    largest: int  # The largest group that it may be in


def sharing(known: KnownJob, knowledge: Knowledge, config: Config, limits: GroupLimits | None) -> Sharing:
    """Return whether a job may share GPUs; `limits` as `plan_job` takes it."""
    job, alone = known.job, known.alone
    # A job whose own script a dry run executes must not start, for the script could overwrite its own files: it waits
    # for the measurement, as the first job of a model does.
    profile = None if job.job_id in knowledge.dry_run_jobs else known.profile
    if profile is not None and known.too_little:
        alone, profile = alone or f"its profile covers too little: {known.too_little}", None
    if not alone and profile is None:
        alone = _why_unknown(known, config)
    elif not alone and profile is not None and profile.is_estimate and config.profiling.in_place:
        alone = "" if job.calls_muri else _CALLS_NOT
    largest, why = knowledge.largest_group.get(job.job_id, (MAX_GROUP_SIZE, ""))
    if not alone and limits is not None and largest > 1:
        largest, why = limits(job, largest)
    if largest == 1 and not alone:
        alone = why
    return Sharing(profile, alone, largest)


def _why_unknown(known: KnownJob, config: Config) -> str:
    """Why nothing will be known of a job's model, "" when it is to be measured."""
    if known.failed:
        what = "it could not be measured in a group" if config.profiling.in_place else "its dry run failed"
        return f"{what}: {known.failed}"
    if known.arguments_unknown:
        return f"its model cannot be measured: {known.arguments_unknown}"
    if config.profiling.at_once == 0:
        return "its model has no profile and profiling is turned off (profiling.at_once is 0)"
    return ""


def _waiting_for_partners(pending: list[PlanJob], unknown: set[int], cycle: Gathered) -> dict[int, str]:
    """Return the young jobs that share a bucket with a model being profiled: better partners may come."""
    if cycle.config.profiling.in_place:
        return {}
    groupable = [job for job in pending if job.groupable]
    buckets = {_bucket(job) for job in groupable if job.job_id in unknown}
    after_s = cycle.now_s - cycle.config.tuning.wait_for_profiles_s
    early = (
        job.job_id
        for job in groupable
        if job.profile is not None and job.submit_s > after_s and _bucket(job) in buckets
    )
    return dict.fromkeys(sorted(early), "it waits for the dry runs of possible partners")


def _bucket(job: PlanJob) -> tuple[str, str, str, int, int]:
    return (job.user, job.domain, job.partition, job.gpu_count, job.node_count)


def _dry_runs(ready: Iterable[KnownJob], cycle: Gathered, profile_use: ProfileUse) -> list[KnownJob]:
    """Return the jobs with whose scripts dry runs are to start now.

    Users with the fewest dry runs go first, so that none has two while others wait for one; then models without any
    profile, then the user whose last dry run began longest ago, whether or not it ever started.
    """
    if not cycle.config.profiling.starts_dry_runs:
        return []
    wanted: dict[ProfileKey, KnownJob] = {}
    for each in sorted(ready, key=lambda each: (each.job.submit_s, each.job.job_id)):
        if _is_to_be_measured(each, cycle.knowledge, profile_use):
            wanted.setdefault(each.key, each)
    at_work = Counter(run.user for run in cycle.view.having(Role.DRY_RUN))
    chosen: list[KnownJob] = []
    for _ in range(min(cycle.config.profiling.at_once - at_work.total(), len(wanted))):
        first = min(
            wanted.values(),
            key=lambda each: (at_work[each.key.user], each.is_measured, cycle.last_dry_run_s.get(each.key.user, 0.0)),
        )
        chosen.append(wanted.pop(first.key))
        at_work[first.key.user] += 1
    return chosen


def _within_limits(
    runs: Iterable[KnownJob], cycle: Gathered, *, sweeps: bool
) -> tuple[tuple[StartDryRun, ...], dict[ProfileKey, str]]:
    """Return the dry runs for which the site's limits have room, and why others are left out, by key."""
    kept: list[StartDryRun] = []
    left_out: dict[ProfileKey, str] = {}
    for known in runs:
        job, traits = known.job, cycle.knowledge.traits
        run = StartDryRun(job.job_id, str(known.key), known.profile is not None)
        partition = cycle.config.profiling.partition or job.partition
        index = cycle.view.node_index
        cpus = sweep_cpus(job, cycle.config, index) if sweeps and not traits.is_measured(known.key) else None
        if cpus is not None and not cycle.room.take_dry_run(
            replace(job, cpu_count=cpus), partition, dry_run_limit_s(cycle.config, cpus)
        ):
            kept.append(replace(run, sweep_cpus=cpus))
            continue
        why = cycle.room.take_dry_run(job, partition, dry_run_limit_s(cycle.config))
        if not why:
            kept.append(run)
        elif not run.again:
            left_out[known.key] = f"there is no room for it: {why}"
    return tuple(kept), left_out


def _is_to_be_measured(known: KnownJob, knowledge: Knowledge, profile_use: ProfileUse) -> bool:
    """Whether a job's model is to be measured in a dry run, and with this job's script it can be."""
    job, key = known.job, known.key
    if known.profile is not None and not knowledge.is_stale(key):
        return False
    # --muri=alone asks for a profile, too.
    if profile_use == "none" or (profile_use == "sharing" and known.alone not in {"", ALONE_ON_REQUEST}):
        return False
    under_way = key in knowledge.profiling or job.job_id in knowledge.dry_run_jobs
    impossible = job.unknown_task or job.het or job.special or known.arguments_unknown
    return not (under_way or impossible or known.failed)


SHARES: Final = 2
"""A sweep goes up to so many GPU-proportional shares: more CPUs are rarely free beside a GPU."""


def sweep_cpus(job: Job, config: Config, index: NodeIndex) -> int | None:
    """Return the CPUs of a dry run that measures the CPU axis as well; None where it does not.

    Only jobs of one GPU are swept: Muri takes each GPU of a larger job to want the same.
    """
    if job.gpu_count != 1 or config.allocation.cpus == "off":
        return None
    nodes = index.by_partition.get(config.profiling.partition or job.partition, ())
    shares = [min(node.cpu_count, SHARES * node.cpu_count // node.gpu_count) for node in nodes if node.gpu_count]
    greatest = max(job.cpu_count, min(shares, default=0))
    return greatest if greatest > 1 else None
