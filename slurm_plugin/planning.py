"""From a view of the queue to a policy's request, and from its plan to actions. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ClusterShell.NodeSet import NodeSet

from muri.policies.schedulers.base import ProfileUse
from muri.policies.types import Group, Plan, PlanJob, PlanRequest, Solo, sentences
from muri.profiler.estimates import why_estimated
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import Action, MemberPlan, ReleaseSolo, StartDryRun, StartGroup
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.free_resources import free_nodes
from muri.slurm_plugin.host_shares import asked_by, group_cpus, group_mem_mib, share_of, share_text
from muri.slurm_plugin.known_traits import KnownTraits, gpu_utilization, with_derived
from muri.slurm_plugin.model import GPUS_CAN_BE_TAKEN_AWAY, Job
from muri.slurm_plugin.records.submit_option import SubmitRequest, parse_request
from muri.slurm_plugin.shapes import cpus_of_a_rank, cpus_side_by_side, ranks_reason
from muri.slurm_plugin.view import Role, View, profile_key

_ALONE_BY_WISH = "it was submitted with alone"
# What a member's own batch script needs while the runtime does its work.
_MEMBER_MEM_MIB = 512
# A host outlives its members by this much, for the last of them to leave in order.
_HOST_EXTRA_S = 600
_MIB_PER_GIB = 1024.0


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a cycle knows beyond the snapshot.

    Attributes:
        profiles: Stored profiles, and estimates of models without one.
        profiling: Keys that a dry run is measuring now.
        targets: Jobs whose script a dry run executes, or is about to; they wait for it.
        stale: Keys whose profile serves, but is to be measured again.
        failures: Failed dry runs by key text: how many, and the last cause.
        bars: Why a job must not be grouped again, by job id.
        served_gpu_s: GPU-seconds that a job had before it was stopped, by job id.
        traits: What is stored of models beyond their stage profiles.
        gpu_mem_gib: GPU memory that jobs ask for since they ran out of it, by job id.
    """

    profiles: Mapping[ProfileKey, StageProfile]
    profiling: frozenset[ProfileKey] = frozenset()
    targets: frozenset[int] = frozenset()
    stale: frozenset[ProfileKey] = frozenset()
    failures: Mapping[str, tuple[int, str]] | None = None
    bars: Mapping[int, str] | None = None
    served_gpu_s: Mapping[int, float] | None = None
    traits: KnownTraits = field(default_factory=KnownTraits)
    gpu_mem_gib: Mapping[int, float] = field(default_factory=dict)

    def profile_for(self, job: Job, key: ProfileKey) -> StageProfile | None:
        """Return what a job may be planned with.

        The job whose own script a dry run executes has nothing: twice at once it could spoil its own files. It
        waits for the measurement, as the first job of a model does.
        """
        return None if job.job_id in self.targets else self.profiles.get(key)

    def needed_gib(self, job_id: int, profile: StageProfile) -> float:
        """Return the GPU memory that a job asks for: what it asked for anew, else what its profile says."""
        return self.gpu_mem_gib.get(job_id, profile.gpu_mem_gib)

    def failed(self, key: ProfileKey, config: Config) -> str:
        """Return why a model is not profiled any more, "" when it still may be."""
        count, why = (self.failures or {}).get(str(key), (0, ""))
        return why if count >= config.profiling.attempts else ""


@dataclass(frozen=True, slots=True)
class Preparation:
    """A policy's request, and what was decided before asking it.

    Attributes:
        request: For the policy.
        dry_runs: To start now.
        waiting: Jobs that are not ready, with the reason.
        know: What the cycle knows, the jobs of these dry runs among the targets unless they are planned with an
            estimate: those may start, and then nothing is measured with them.
    """

    request: PlanRequest
    dry_runs: tuple[StartDryRun, ...]
    waiting: Mapping[int, str]
    know: Knowledge


def alone_reason(job: Job, slurm_version: str, know: Knowledge, config: Config) -> str:
    """Return why a job must run alone, "" when it may be grouped."""
    request = parse_request(job.admin_comment) or SubmitRequest()
    old_slurm = tuple(map(int, re.findall(r"\d+", slurm_version)[:2])) < GPUS_CAN_BE_TAKEN_AWAY
    checks = (
        (old_slurm, f"Slurm {slurm_version} cannot take the GPUs from a waiting job, which a group needs"),
        (request.alone, _ALONE_BY_WISH),
        (job.array, "job arrays are not grouped"),
        (job.het, "heterogeneous jobs are not grouped"),
        (not job.can_requeue, "it was submitted with --no-requeue, and a group's failure would have to requeue it"),
        (bool(reason := ranks_reason(job)), reason),
        (bool(job.required_nodes), f"it asks for the nodes {job.required_nodes} by name"),
        (
            job.gpu_count > config.grouping.max_gpus_per_job,
            f"it asks for {job.gpu_count} GPUs; jobs of up to {config.grouping.max_gpus_per_job} are grouped",
        ),
        (config.grouping.max_group_size == 1, "grouping is turned off (grouping.max_group_size is 1)"),
    )
    for applies, reason in checks:
        if applies:
            return reason
    return (know.bars or {}).get(job.job_id, "")


def _not_ready(job: Job, now_s: float) -> str:
    if job.dependency:
        return f"it waits for its dependency {job.dependency}"
    if job.begin_s > now_s:
        return "its --begin time has not come"
    if tags.parse_given(job.admin_comment) is not None:
        return "it is about to get its own CPUs and memory back"
    return ""


def prepare(view: View, know: Knowledge, config: Config, now_s: float, profile_use: ProfileUse = "all") -> Preparation:
    """Turn the queue into a policy's request.

    Args:
        view: The snapshot by roles.
        know: Profiles and what the journal remembers.
        config: Limits.
        now_s: The cycle's time, seconds since the epoch.
        profile_use: Whose profiles matter to the policy; nobody else's model is measured.
    """
    waiting: dict[int, str] = {}
    ready: list[tuple[Job, ProfileKey]] = []
    for job in view.having(Role.CANDIDATE):
        reason = _not_ready(job, now_s)
        if reason:
            waiting[job.job_id] = reason
        else:
            ready.append((job, profile_key(job, view.snapshot.nodes)))
    version = view.snapshot.slurm_version
    dry_runs = _dry_runs(view, ready, know, config, profile_use)
    measured = {str(key) for key, profile in know.profiles.items() if not profile.is_estimate}
    wished = {job.job_id for job, _ in ready if alone_reason(job, version, know, config) == _ALONE_BY_WISH}
    lent = {run.job_id for run in dry_runs if run.key in measured or run.job_id in wished}
    know = replace(know, targets=know.targets | lent)
    nodes = view.snapshot.nodes
    pending = [with_derived(plan_job(job, key, version, know, config), job, nodes) for job, key in ready]
    unknown = {job.job_id for job, key in ready if key not in know.profiles}
    patient = _patient(pending, unknown, config, now_s)
    waiting |= dict.fromkeys(sorted(patient), "it waits for the dry runs of possible partners")
    lenders = {job.job_id for job in pending if job.job_id in know.targets and not _overdue(job, config, now_s)}
    waiting |= dict.fromkeys(sorted(lenders), "its model is being measured with its script, which must not run twice")
    request = PlanRequest(
        jobs=tuple(job for job in pending if job.job_id not in waiting),
        nodes=free_nodes(view, config),
        now_s=now_s,
        max_group_size=config.grouping.max_group_size,
    )
    return Preparation(request, dry_runs, waiting, know)


def plan_job(job: Job, key: ProfileKey, slurm_version: str, know: Knowledge, config: Config) -> PlanJob:
    """Describe a job to a policy."""
    request = parse_request(job.admin_comment) or SubmitRequest()
    alone = alone_reason(job, slurm_version, know, config)
    profile = know.profile_for(job, key)
    if not alone and profile is None:
        failed = know.failed(key, config)
        if failed:
            alone = f"its dry run failed: {failed}"
        elif config.profiling.at_once == 0:
            alone = "its model has no profile and profiling is turned off (profiling.at_once is 0)"
    served_gpu_s = (know.served_gpu_s or {}).get(job.job_id, 0.0)
    served_s = served_gpu_s / max(1, job.gpu_count)
    return PlanJob(
        job_id=job.job_id,
        user=job.user,
        partition=job.partition,
        gpu_count=job.gpu_count,
        submit_s=job.submit_s,
        profile=profile,
        remaining_s=None if request.duration_s is None else max(1.0, request.duration_s - served_s),
        attained_gpu_s=served_gpu_s,
        groupable=not alone,
        alone_reason=alone,
        node_count=1 if alone and job.gpu_count % max(1, job.node_count) else max(1, job.node_count),
        sensitivity=know.traits.sensitivity(key, _mem_gib_per_gpu(job)),
        gpu_utilization=gpu_utilization(profile),
        gpu_mem_request_gib=know.gpu_mem_gib.get(job.job_id),
    )


def _mem_gib_per_gpu(job: Job) -> float:
    return job.mem_per_node_mib / max(1, job.gpus_per_node) / _MIB_PER_GIB


def _patient(pending: list[PlanJob], unknown: set[int], config: Config, now_s: float) -> set[int]:
    """Return the young jobs that share a bucket with a model being profiled: better partners may come.

    Args:
        pending: The jobs that are ready.
        unknown: Those among them whose models have no profile.
        config: Limits.
        now_s: The cycle's time.
    """
    buckets = {_bucket(job) for job in pending if job.groupable and job.job_id in unknown}
    return {
        job.job_id
        for job in pending
        if job.groupable
        and job.profile is not None
        and _bucket(job) in buckets
        and now_s - job.submit_s < config.grouping.wait_for_profiles_s
    }


def _overdue(job: PlanJob, config: Config, now_s: float) -> bool:
    return now_s - job.submit_s > config.grouping.max_wait_s


def _bucket(job: PlanJob) -> tuple[str, str, int, int]:
    return (job.user, job.partition, job.gpu_count, job.node_count)


def _dry_runs(
    view: View, ready: list[tuple[Job, ProfileKey]], know: Knowledge, config: Config, profile_use: ProfileUse
) -> tuple[StartDryRun, ...]:
    room = config.profiling.at_once - len(view.having(Role.DRY_RUN))
    wanted: dict[ProfileKey, int] = {}
    for job, key in sorted(ready, key=lambda item: (item[0].submit_s, item[0].job_id)):
        useful = profile_use == "all" or (profile_use == "sharing" and _may_share(job, view, know, config))
        measurable = useful and not (job.array or job.het or know.failed(key, config))
        known = key in know.profiles and key not in know.stale
        if measurable and not known and key not in know.profiling:
            wanted.setdefault(key, job.job_id)
    measured = {key for key, profile in know.profiles.items() if not profile.is_estimate}
    new_first = sorted(wanted.items(), key=lambda item: item[0] in measured)
    return tuple(StartDryRun(job_id, str(key), key in know.profiles) for key, job_id in new_first[: max(room, 0)])


def _may_share(job: Job, view: View, know: Knowledge, config: Config) -> bool:
    """Whether a job's profile says who may share with it. Who is alone by its user's wish is measured on demand."""
    return alone_reason(job, view.snapshot.slurm_version, know, config) in {"", _ALONE_BY_WISH}


def actions_of(plan: Plan, view: View, know: Knowledge, config: Config) -> tuple[Action, ...]:
    """Turn a plan into actions, groups first, in the plan's order."""
    groups = tuple(_start_group(group, plan, view, know, config) for group in plan.groups)
    return groups + tuple(_release_solo(solo, plan, view, know, config) for solo in plan.solo)


def _release_solo(solo: Solo, plan: Plan, view: View, know: Knowledge, config: Config) -> ReleaseSolo:
    job = view.jobs[solo.job_id]
    measured = know.traits.is_measured(profile_key(job, view.snapshot.nodes))
    planned = plan.host_shares.get(solo.job_id, ())
    names = {share.node for share in planned}
    threads = max((node.threads_per_core for node in view.snapshot.nodes if node.name in names), default=1)
    share = share_of(job, planned, config.allocation, measured=measured, threads_per_core=threads)
    reasons = sentences(solo.reasons)
    return ReleaseSolo(solo.job_id, reasons if share is None else (*reasons, share_text(share)), share)


def _start_group(group: Group, plan: Plan, view: View, know: Knowledge, config: Config) -> StartGroup:
    jobs = [view.jobs[job_id] for job_id in group.members]
    names = {share.node for share in group.gpus}
    nodes = [node for node in view.snapshot.nodes if node.name in names]
    profiles = [know.profiles[profile_key(job, view.snapshot.nodes)] for job in jobs]
    members = tuple(_member(job, group, profile, know) for job, profile in zip(jobs, profiles, strict=True))
    gpus_per_node = group.gpu_count // len(nodes)
    first = jobs[0]
    limits = [member.time_limit_s for member in members]
    shares = [plan.host_shares.get(job.job_id, ()) for job in jobs]
    # A plan counts on one member at a time at the CPUs.
    least_cpus = cpus_side_by_side(jobs, nodes[0]) if group.mode == "plain" else 0
    cpus = max(least_cpus, group_cpus(shares, config.allocation))
    return StartGroup(
        members=members,
        node=str(NodeSet.fromlist(sorted(names))),
        uid=first.uid,
        gid=first.gid,
        user=first.user,
        partition=first.partition,
        account=first.account,
        qos=first.qos,
        gpu_request=first.gpu_request,
        cpu_count=cpus_of_a_rank(jobs, nodes, gpus_per_node, cpus),
        mem_per_node_mib=group_mem_mib(jobs, shares, config.allocation),
        time_limit_s=0 if 0 in limits else max(limits) + _HOST_EXTRA_S,
        efficiency=group.efficiency,
        period_s=group.period_s,
        reasons=(*sentences(group.reasons), *_estimated(profiles, jobs)),
        node_count=len(nodes),
        gpus_per_node=gpus_per_node,
        mode=group.mode,
    )


def _estimated(profiles: Sequence[StageProfile], jobs: Sequence[Job]) -> Iterator[str]:
    for job, profile in zip(jobs, profiles, strict=True):
        if why := why_estimated(profile):
            yield f"job {job.job_id}: {why}"


def _member(job: Job, group: Group, profile: StageProfile, know: Knowledge) -> MemberPlan:
    return MemberPlan(
        job_id=job.job_id,
        original=asked_by(job),
        solo_iteration_s=profile.iteration_s,
        speed=group.speed[job.job_id],
        # The user's limit was meant for the job alone; sharing must not make it run out of time.
        time_limit_s=job.time_limit_s * len(group.members),
        cpu_count=job.task_count if job.gpu_count > 1 else 1,
        gpu_mem_gib=know.needed_gib(job.job_id, profile),
        estimated=profile.is_estimate,
    )


def member_mem_mib(original: tags.Original) -> int | None:
    """Return the memory that a member keeps for its batch script, None to leave it as it is."""
    return min(original.mem_per_node_mib, _MEMBER_MEM_MIB) if original.mem_per_node_mib else None
