"""The first phase of a cycle: what its decision rests on, each fact looked up once, and who may be planned. Pure.

Users may write anything into their jobs' comments: figures are checked as a dry run's are, and serve the user's own
jobs alone. Of a member only its present run is believed, and only times within it.

In Slurm the waiting tasks of an array are one record. A task of which something is to be changed needs its own, with a
job id of its own; from then on it is planned like any job. Only as many tasks get one as could start soon.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from muri.clock import MIB_PER_GIB, moment, text_of
from muri.policies.traits import Sensitivity
from muri.policies.types import FreeNode
from muri.profiler.records import IN_PLACE, ProfileError, ProfileKey, StageProfile, says_little
from muri.slurm_plugin.config import Config, Grouping
from muri.slurm_plugin.planning.actions import DryRunFailed, KeepProfile, NotMeasured, SplitTasks
from muri.slurm_plugin.planning.cycle_input import START_DELAY_S, CycleInput, Expected, Knowledge, dry_run_key
from muri.slurm_plugin.planning.model_traits import derived_for, sensitivity_in
from muri.slurm_plugin.planning.node_loads import GroupSizes, Need, NodeLoad
from muri.slurm_plugin.planning.placement import free_nodes, node_loads
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import as_asked, as_submitted, pilot_mem_mib
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.comment_reports import profile_in, python_in
from muri.slurm_plugin.records.journal import DRY_RUN, Intent
from muri.slurm_plugin.records.limits import PartitionLimits
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, why_arguments_are_unknown, without_gate

ALONE_ON_REQUEST: Final = "it was submitted with alone"

_CLOCKS_DIFFER_S: Final = 60.0
"""Most that a node's clock, which members' reports use, differs from slurmctld's."""

_SURE: Final = 0.95
"""With this confidence a measurement ends as sure; figures reported earlier have less, and surer ones replace them."""

_UNTRUE: Final = (ProfileError, KeyError, TypeError, ValueError, OverflowError)


def domain_of(job: Job) -> str:
    """Return what jobs of a user must have in common, beside their partition, to share one pilot job."""
    parts = {
        "account": job.account,
        "QOS": job.qos,
        "reservation": job.reservation,
        "licenses": without_gate(job.licenses),
        "constraint": job.features,
        "excluded nodes": job.excluded_nodes,
        "GPUs": job.gpu_request,
    }
    return ", ".join(f"{name} {value!r}" for name, value in parts.items() if value)


class KnownJob(NamedTuple):
    """A job with the facts that a cycle looks up once for it."""

    job: ManagedJob  # As its user submitted it
    key: ProfileKey
    profile: StageProfile | None  # None while nothing is known of its model
    alone: str  # Why it must run alone, whatever is known of its model; "" when it may be grouped
    failed: str  # Why its model is not measured any more, "" while it may be
    too_little: str  # What its profile does not cover, "" where it is enough to plan with
    domain: str  # What jobs of a user must have in common to share its GPUs
    arguments_unknown: str  # Why nothing tells its script's arguments, "" when they are known
    sensitivity: Sensitivity | None  # To CPUs and memory, as measured
    derived: Sensitivity | None  # The same, derived from its profile; None without one
    expected: Expected | None  # How long it runs alone; None where its user did not say
    min_speed: float  # In a group, 1 = as fast as alone: the site's, the job's own or one promised already

    @property
    def is_measured(self) -> bool:
        """Whether its model was measured."""
        return self.profile is not None and not self.profile.is_estimate

    @property
    def planned_profile(self) -> StageProfile:
        """The profile that it was planned with.

        Raises:
            KeyError: Nothing is known of its model; a site's own policy may plan it all the same.
        """
        if self.profile is None:
            raise KeyError(self.key)
        return self.profile


class DryRun(NamedTuple):
    """A dry run that has no result in the journal yet."""

    intent: Intent
    key: ProfileKey
    target: ManagedJob | None  # The job whose script it runs
    run: ManagedJob | None  # The job that executes it, active or not
    result: KeepProfile | DryRunFailed | None

    @property
    def token(self) -> str:
        """Its intent's."""
        return self.intent.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(CycleInput):
    """The facts that a decision rests on."""

    room: SiteRoom  # What the site's limits leave; what is started has to be taken from it
    known: Mapping[int, KnownJob]  # Candidates that can be planned, members of running groups, and jobs that run alone
    ready: tuple[int, ...]  # The candidates among them
    loads: Mapping[str, NodeLoad]  # What is free on each node with GPUs, counted as Slurm does
    sizes: GroupSizes  # The groups that find room there
    nodes: tuple[FreeNode, ...]  # The same for policies, with the candidates' partitions for planning
    waiting: Mapping[int, str]  # Candidates that are not ready, with the reason
    splits: tuple[SplitTasks, ...]  # Tasks of job arrays that need records of their own before they can be planned
    to_slurm: Mapping[int, str]  # Those that Slurm cannot start now, with the reason: Slurm decides about them alone
    dry_runs: tuple[DryRun, ...]
    last_dry_run_s: Mapping[str, float]  # When the last one of a user began, seconds since the epoch
    measured: tuple[KeepProfile | NotMeasured, ...]  # What members report of their models that is new
    untrue: Mapping[int, str]  # Why such reports cannot be true, by job id

    def largest_group(self, job: ManagedJob, most: int) -> tuple[int, str]:
        """Return how large a group a waiting job may start in, 1 when it must run alone, and why no larger.

        It may find room beside a smaller one even where two like it find none. Members that may be threads work in
        their pilot job, whose size depends on who they are.
        """
        size, why = self.room.largest_group(job, most)
        if size < 3 or self.config.grouping.isolation != "process":
            return size, why
        gpus = max(1, job.gpus_per_node)
        pilot = Need(gpus, pilot_mem_mib([job], gpus, self.view.snapshot.limits.partition(job.partition)))
        fits, crowded = self.sizes.largest(job, pilot, self.room.places.of(job).nodes, size)
        return (size, why) if fits == size else (max(2, fits), crowded)

    def doubts(self) -> dict[int, Expected]:
        """Return how long jobs are expected to run whose stated durations are not believed, by job id."""
        stated = (job for job in self.view.jobs.values() if job.state.is_active and job.request.duration_s is not None)
        found = ((job.job_id, self.knowledge.expected(job, self.key_of(job))) for job in stated)
        return {job_id: each for job_id, each in found if each is not None and each.times > 1}


def gather(cycle: CycleInput) -> Gathered:
    """Look up what is known of the jobs that a decision is about."""
    view, now_s = cycle.view, cycle.now_s
    members = (as_submitted(job, group.pilot) for group in view.running_groups for job in group.members)
    room = SiteRoom(view, cycle.config.pilot.qos)
    loads = node_loads(view, cycle.config, room.places)
    ready, waiting, to_slurm = _sorted_out(cycle, room)
    arrays = [view.jobs[job_id] for job_id, why in waiting.items() if why == _IN_ARRAY]
    jobs = chain(ready, members, map(as_asked, running_alone(view)))
    dry_runs = [intent for intent in cycle.intents if intent.kind == DRY_RUN]
    oldest_first = sorted(dry_runs, key=lambda intent: intent.begun_s)
    measured, untrue = _measured_in_place(cycle)
    return Gathered(
        view,
        cycle.knowledge,
        cycle.config,
        cycle.intents,
        room=room,
        known={job.job_id: known_job(job, cycle) for job in jobs},
        ready=tuple(job.job_id for job in ready),
        loads=loads,
        sizes=GroupSizes(loads, view.snapshot.limits),
        nodes=free_nodes(loads, view, cycle.config, room.places, ready),
        waiting=waiting,
        splits=tuple(split_soon(arrays, view, cycle.config)),
        to_slurm=to_slurm,
        dry_runs=tuple(_dry_run(intent, view, now_s) for intent in dry_runs if intent.state == "begun"),
        last_dry_run_s={dry_run_key(intent, view).user: intent.begun_s for intent in oldest_first},
        measured=measured,
        untrue=untrue,
    )


_IN_ARRAY: Final = "these tasks of its array come after those that have job ids of their own"


def _sorted_out(cycle: CycleInput, room: SiteRoom) -> tuple[list[ManagedJob], dict[int, str], dict[int, str]]:
    """Return the candidates that can be planned, and why others have to wait or are left to Slurm."""
    waiting: dict[int, str] = {}
    to_slurm: dict[int, str] = {}
    ready: list[ManagedJob] = []
    too_many = throttled(cycle.view)
    for job in cycle.view.having(Role.CANDIDATE):
        if reason := _not_ready(job, cycle.now_s):
            waiting[job.job_id] = reason
        elif reason := room.places.of(job).left_to_slurm:
            to_slurm[job.job_id] = reason
        elif job.job_id in cycle.knowledge.refused_releases:
            to_slurm[job.job_id] = "Slurm changes nothing in it"
        elif reason := room.why_no_room(job):
            waiting[job.job_id] = reason
        elif job.several_tasks and job.job_id not in cycle.knowledge.exclusions:
            waiting[job.job_id] = _IN_ARRAY
        elif job.job_id in too_many:
            waiting[job.job_id] = too_many[job.job_id]
        else:
            ready.append(job)
    return ready, waiting, to_slurm


def _not_ready(job: ManagedJob, now_s: float) -> str:
    if job.own_dependency:
        return f"it waits for its dependency {job.own_dependency}"
    # After a first run this is not --begin but Slurm's delay after a requeue, which the repairs remove.
    if job.begin_s > now_s + START_DELAY_S and not job.restart_count:
        return "its --begin time has not come"
    return "it is about to get its own CPUs and memory back" if job.given is not None else ""


def throttled(view: View) -> dict[int, str]:
    """Return why tasks wait whose array runs no more of them at once (`--array=…%N`), by job id.

    Slurm counts them, too; but a member that Slurm keeps waiting would leave its group's GPUs idle.
    """
    taken, found = _started(view), dict[int, str]()
    tasks = [job for job in view.having(Role.CANDIDATE) if job.array_limit and job.array_tasks.isdecimal()]
    for job in sorted(tasks, key=lambda job: int(job.array_tasks)):
        if taken[job.array_job_id] >= job.array_limit:
            found[job.job_id] = f"its array runs at most {job.array_limit} tasks at once (%{job.array_limit})"
        taken[job.array_job_id] += 1
    return found


def _started(view: View) -> Counter[int]:
    """How many tasks of each array have been let go and not ended."""
    return Counter(
        job.array_job_id
        for job in view.jobs.values()
        if job.array_job_id and job.state.is_active and (job.state is not JobState.PENDING or is_let_go(job))
    )


_MOST_READY: Final = 64
"""So many tasks of an array have records of their own before they start; each costs slurmctld a record."""


def split_soon(records: Iterable[ManagedJob], view: View, config: Config) -> Iterator[SplitTasks]:
    """Give records to the tasks that could start soon, in their order.

    One task always stays behind: the last one keeps the array's own record.
    """
    ready = Counter(job.array_job_id for job in view.having(Role.CANDIDATE) if not job.several_tasks)
    started = _started(view)
    for record in records:
        array = record.array_job_id
        nodes = (node for node in view.snapshot.nodes if node.usable and record.partition in node.partitions)
        at_once = config.grouping.max_group_size * sum(node.gpu_count for node in nodes) // max(1, record.gpu_count)
        most = min(_MOST_READY, max(1, at_once))
        if record.array_limit:
            most = min(most, record.array_limit - started[array])
        waiting = list(islice(record.tasks, max(0, most - ready[array]) + 1))
        tasks = waiting[: most - ready[array]] if most > ready[array] else []
        tasks = tasks if len(waiting) > len(tasks) else tasks[:-1]
        if tasks:
            yield SplitTasks(record.job_id, tuple(tasks))


def is_let_go(job: ManagedJob) -> bool:
    """Return whether a job waits for nothing but Slurm."""
    return job.state is JobState.PENDING and not (job.gated or job.held or job.several_tasks)


def known_job(job: ManagedJob, cycle: CycleInput) -> KnownJob:
    """Look up what planning a job needs; `job` is as its user submitted it."""
    key, knowledge = cycle.key_of(job), cycle.knowledge
    mem_gib_per_gpu = job.mem_per_node_mib / max(1, job.gpus_per_node) / MIB_PER_GIB
    # A member keeps its promised speed, whatever the site promises to others now.
    promised = 0.0 if job.membership is None else job.membership.min_speed
    profile = knowledge.profile_of(key)
    measured = None if profile is None or profile.is_estimate else profile
    return KnownJob(
        job,
        key,
        profile,
        alone=alone_reason(job, cycle.view, knowledge, cycle.config),
        failed=knowledge.failed(key),
        too_little="" if measured is None else says_little(measured.stage_s, measured.iteration_s),
        domain=domain_of(job),
        arguments_unknown=why_arguments_are_unknown(job),
        sensitivity=knowledge.traits.sensitivity(key, mem_gib_per_gpu),
        derived=derived_for(job, profile, cycle.view.node_index),
        expected=knowledge.expected(job, key),
        min_speed=max(cycle.config.grouping.min_speed, job.request.min_speed, promised),
    )


def running_alone(view: View) -> Iterator[ManagedJob]:
    """Yield the running jobs on GPUs of their own that Muri has started or let go."""
    for job in view.having(Role.RELEASED):
        if job.state is JobState.RUNNING and job.gpu_count and not (job.array or job.het):
            yield job


def alone_reason(job: ManagedJob, view: View, knowledge: Knowledge, config: Config) -> str:
    """Return why a job must run alone, "" when it may be grouped."""
    partition = view.snapshot.limits.partition(job.partition)
    reasons = chain(_why_unknown_or_alone(job, partition, view), _why_not_possible(job, partition, config.grouping))
    return next(reasons, "") or knowledge.exclusions.get(job.job_id, "")


def _why_unknown_or_alone(job: ManagedJob, partition: PartitionLimits, view: View) -> Iterator[str]:
    """Why Muri cannot or must not take a job's GPUs away."""
    removal = view.snapshot.gpu_removal.way_for(job.gpu_request)
    if not removal.request:
        yield f"its GPUs cannot be taken away while it waits, which a group needs ({removal.why})"
    if job.facts is None and not job.request.model and (why := why_arguments_are_unknown(job)):
        yield why
    if job.request.alone:
        yield ALONE_ON_REQUEST
    if job.unknown_task:
        yield "nothing tells which of its array's tasks it is"


def _why_not_possible(job: ManagedJob, partition: PartitionLimits, grouping: Grouping) -> Iterator[str]:
    """Yield the requests of a job that a group could not meet."""
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


def ran_s(job: Job, now_s: float) -> float:
    """Return the seconds of a job's last run, 0 when it has not started."""
    return max(0.0, (job.end_s or now_s) - job.start_s) if job.start_s else 0.0


def _dry_run(intent: Intent, view: View, now_s: float) -> DryRun:
    """Look up a dry run; its result stands in its own comment or in that of the job whose script it runs."""
    run = next((job for job in view.jobs.values() if job.dry_run == intent.token), None)
    found = DryRun(intent, dry_run_key(intent, view), view.jobs.get(int(intent.payload["job_id"])), run, None)
    # No dry run that slurmctld has forgotten has taken longer than this.
    took_s = now_s - intent.begun_s if run is None else ran_s(run, now_s)
    comments = (job.reports.dry_run for job in (found.target, run) if job is not None)
    measured = next((each for each in comments if each is not None and each.get("token") == intent.token), None)
    return found if measured is None or not took_s else found._replace(result=_result(found, measured, took_s))


def _result(dry_run: DryRun, measured: Mapping[str, Any], took_s: float) -> KeepProfile | DryRunFailed:
    intent, key = dry_run.intent, dry_run.key
    if "error" in measured:
        return DryRunFailed(intent.token, str(key), str(measured["error"]))
    try:
        profile = profile_in(measured, key, text_of(intent.begun_s), took_s)
    except _UNTRUE as error:
        return DryRunFailed(intent.token, str(key), f"the dry run sent figures that cannot be true: {error}")
    environment = str(intent.payload.get("environment", ""))
    sensitivity = sensitivity_in(measured, profile, int(intent.payload.get("sweep_cpus") or 0))
    accumulates = bool(measured.get("accumulates"))
    return KeepProfile(intent.token, profile, accumulates, python_in(measured), environment, sensitivity)


def _measured_in_place(cycle: CycleInput) -> tuple[tuple[KeepProfile | NotMeasured, ...], dict[int, str]]:
    """Return what members report that is new, of each key the newest profile; and why other reports cannot be true."""
    failures: list[NotMeasured] = []
    kept: dict[ProfileKey, KeepProfile] = {}
    untrue: dict[int, str] = {}
    for job in cycle.view.jobs.values() if cycle.config.profiling.in_place else ():
        measured, membership = job.reports.measured, job.membership
        pilot = None if measured is None or membership is None else cycle.view.jobs.get(membership.pilot)
        if measured is None or pilot is None or not ran_s(job, cycle.now_s):
            continue
        try:
            report = _read_report(job, measured, cycle.key_of(as_submitted(job, pilot)), cycle)
        except _UNTRUE as error:
            untrue[job.job_id] = f"its figures of its model cannot be true: {error}"
            continue
        if isinstance(report, NotMeasured):
            failures.append(report)
        elif report is not None:
            earlier = kept.get(report.profile.key)
            if earlier is None or _is_before(earlier.profile.measured_at, report.profile.measured_at):
                kept[report.profile.key] = report
    return (*failures, *kept.values()), untrue


def _read_report(
    job: ManagedJob, measured: Mapping[str, Any], key: ProfileKey, cycle: CycleInput
) -> KeepProfile | NotMeasured | None:
    """Return the new information in a member's report; None where it is known already, or of an earlier run.

    Raises:
        ProfileError, KeyError, TypeError, ValueError, OverflowError: It cannot be true.
    """
    at_s, now_s, knowledge = float(measured["at"]), cycle.now_s, cycle.knowledge
    if at_s > now_s + _CLOCKS_DIFFER_S:
        raise ValueError("it names a time to come")
    if not job.start_s - _CLOCKS_DIFFER_S <= at_s <= now_s:
        return None
    if "error" in measured:
        known, counted_s = knowledge.profile_of(key), knowledge.failed_s.get(str(key), 0.0)
        if (known is not None and not known.is_estimate) or not counted_s < at_s:
            return None  # the model needs no more runs, or the failure is counted
        return NotMeasured(str(key), str(measured["error"]), at_s)
    profile = profile_in(measured, key, text_of(at_s), ran_s(job, now_s), IN_PLACE)
    if not _is_wanted(profile, knowledge, cycle.config):
        return None
    environment = "" if job.facts is None else job.facts.environment
    return KeepProfile("", profile, bool(measured.get("accumulates")), python_in(measured), environment)


def _is_wanted(profile: StageProfile, knowledge: Knowledge, config: Config) -> bool:
    """Whether a measurement takes the place of what is known."""
    known = knowledge.profile_of(profile.key)
    if known is None or known.is_estimate:
        return True
    if _is_before(profile.measured_at, known.measured_at):
        return False
    if doubt(known, config):
        return not doubt(profile, config)
    before, now = known.detail.confidence, profile.detail.confidence
    if known.source == IN_PLACE and before is not None and now is not None and before < min(now, _SURE):
        return True
    stale = knowledge.is_stale(profile.key)
    return stale and _is_before(knowledge.stale_since(profile.key), profile.measured_at)


def doubt(profile: StageProfile, config: Config) -> str:
    """Return why a profile is not known well enough to plan with, "" when it is.

    Only measurements of a few iterations are doubted: imported or corrected figures are vouched for by a person.
    """
    sure, least = profile.detail.confidence, config.tuning.least_confidence
    if profile.source not in {"dry-run", IN_PLACE} or sure is None or sure >= least:
        return ""
    return f"it was {sure:.0%} sure of its means, less than {least:.0%}"


def _is_before(one: str, other: str) -> bool:
    """Whether a time is earlier than another; one that cannot be read is."""
    earlier, later = moment(one), moment(other)
    return earlier is None or (later is not None and earlier < later)
