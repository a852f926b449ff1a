"""The jobs that Muri submits and its changes of others, materialized in full before anything is sent. Pure."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from muri.clock import whole_minutes
from muri.group_spec import GroupSpec, MemberSpec
from muri.pythons import DECIDING, MEMBERS_PREFIX
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import GivenShare, Join, MemberPlan, StartGroup
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob
from muri.slurm_plugin.records.comment_tags import MemoryRetry, encode_words
from muri.slurm_plugin.records.limits import PartitionLimits
from muri.slurm_plugin.records.roles import ManagedJob, View, without_gate

# Variables of the submission that describe the old job, or would mark the new one for Muri.
_STALE_PREFIXES = ("SLURM_", "SPANK_", "_SLURM_", "SBATCH_", "MURI_")

_KEPT = ("SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "MURI_RUN_DIR")

DRY_RUN_NAME: Final = "muri-dryrun"

_NO_CHANGE: Final = JobChange()

MEMBER_MEM_MIB: Final = 512
"""Memory of the batch script of a member whose work runs as a thread, in its pilot job."""

PILOT_MEM_MIB: Final = 512
"""Memory of a pilot job for each of its GPUs, where its members work in their own jobs: Muri's processes there, a
runtime for each GPU, stay below 200 MiB; the rest absorbs the page cache that Slurm counts, too."""


def pilot_mem_mib(jobs: Iterable[Job | tags.Original], gpus_per_node: int, partition: PartitionLimits) -> int:
    """Return the memory on each node of a pilot whose members work in their own jobs; 0 where no job asks for any."""
    asks = partition.counts_mem or any(job.mem_per_node_mib for job in jobs)
    return PILOT_MEM_MIB * gpus_per_node if asks else 0


def pilot_name(members: Iterable[int]) -> str:
    """Return the name of a pilot job, which tells users whose GPUs it holds: "muri:8+12". Muri itself goes by tags."""
    return f"muri:{'+'.join(map(str, members))}"


def plain_environment(user: str) -> dict[str, str]:
    """Return the least environment that a batch script needs."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "USER": user, "LOGNAME": user, "LANG": "C.UTF-8"}


def group_spec(action: StartGroup, config: Config) -> GroupSpec:
    """Return what the pilot, the runtime and the members of a group are told."""
    return GroupSpec(
        members=tuple(
            MemberSpec(
                job_id=str(member.job_id),
                solo_iteration_s=member.solo_iteration_s,
                predicted_speed=None if member.solo_iteration_s is None else member.speed,
                gpu_mem_gib=member.gpu_mem_gib or None,
                accumulate_steps=member.accumulate_steps,
                min_speed=member.min_speed,
                isolation=member.isolation,
            )
            for member in action.members
        ),
        discipline="plain" if action.mode == "plain" else config.grouping.discipline,
        node_count=action.node_count,
        gpus_per_node=action.gpus_per_node,
        python=action.python,
        attach_timeout_s=config.tuning.attach_timeout_s,
        telemetry_s=config.tuning.telemetry_s,
        poll_s=config.tuning.poll_s,
        hang_timeout_s=config.pilot.hang_timeout_s,
        trace=config.pilot.trace,
    )


def pilot_job(action: StartGroup, token: str, config: Config, submitted: Mapping[str, str] | None = None) -> NewJob:
    """Return the pilot job, which holds a group's GPUs and runs its runtime."""
    told = submitted if action.python and submitted else {}
    of_members = {MEMBERS_PREFIX + name: told[name] for name in DECIDING if name in told}
    members = tuple(member.job_id for member in action.members)
    spec, tag = group_spec(action, config).to_text(), tags.PILOT_PREFIX + tags.format_pilot(token, members)
    command = [config.node_python, "-m", "muri.slurm_plugin.node.pilot", "--group", spec]
    return NewJob(
        name=pilot_name(members),
        uid=action.uid,
        gid=action.gid,
        script=f"#!/bin/sh\nexec {shlex.join(command)}\n",
        environment=plain_environment(action.user) | of_members,
        partition=action.partition,
        account=action.account,
        qos=config.pilot.qos or action.qos,
        gpu_request=action.gpu_request,
        node_count=action.node_count,
        tasks_per_node=action.gpus_per_node,
        cpu_count=action.cpu_count,
        mem_per_node_mib=action.mem_per_node_mib,
        time_limit_s=action.time_limit_s,
        required_nodes=action.node,
        reservation=action.reservation,
        oversubscribe=action.oversubscribe,
        admin_comment=tags.with_token(tag, tags.MODE_PREFIX, "plain") if action.mode == "plain" else tag,
    )


def dry_run_environment(submitted: dict[str, str] | None, user: str) -> dict[str, str]:
    """Return the environment of a dry run: the job's own without what names the old job."""
    if submitted is None:
        return plain_environment(user)
    return {name: value for name, value in submitted.items() if name in _KEPT or not name.startswith(_STALE_PREFIXES)}


def array_environment(job: Job) -> dict[str, str]:
    """Return what tells a script which task of an array it is; {} for other jobs."""
    if not job.array_tasks.isdecimal():
        return {}
    return {"SLURM_ARRAY_JOB_ID": str(job.array_job_id), "SLURM_ARRAY_TASK_ID": job.array_tasks}


def arguments_in_line(job: Job) -> list[str]:
    """Return what the user passed to the batch script of a job without facts, read from the submit line.

    Slurm keeps that line without quotes, so an argument that holds a space becomes several.
    """
    script = job.command.split()[0] if job.command else ""
    words = job.submit_line.split()
    for index, word in enumerate(words[1:], start=1):
        if script and str(PurePosixPath(job.work_dir, word)) == script:
            return words[index + 1 :]
    return []


def dry_run_job(
    job: ManagedJob, token: str, environment: dict[str, str], config: Config, sweep_cpus: int | None = None
) -> NewJob:
    """Return the job that measures a model by the first iterations of a waiting job's script.

    It reads that script itself, as the user. The user's arguments stand behind the command, in an alphabet that needs
    no quotes.
    """
    words = arguments_in_line(job) if job.facts is None else job.facts.arguments or ()
    command = [
        config.node_python, "-m", "muri.slurm_plugin.node.dry_run",
        "--target", str(job.job_id),
        "--token", token,
        "--limits", config.profiling.limits.text,
        "--time-limit-s", str(config.profiling.time_limit_s),
        *(["--sweep", str(job.cpu_count), str(sweep_cpus)] if sweep_cpus else []),
        "--words", encode_words(words),
    ]  # fmt: skip
    return NewJob(
        name=DRY_RUN_NAME,
        uid=job.uid,
        gid=job.gid,
        script=f"#!/bin/sh\nexec {shlex.join(command)}\n",
        environment=environment,
        partition=config.profiling.partition or job.partition,
        account=job.account,
        qos=job.qos,
        work_dir=job.work_dir,
        gpu_request=job.gpu_request,
        node_count=job.node_count,
        tasks_per_node=max(1, job.task_count // max(1, job.node_count)) if job.gpu_count > 1 else 1,
        cpu_count=sweep_cpus or (job.cpus_per_task if job.gpu_count > 1 else job.cpu_count),
        mem_per_node_mib=job.mem_per_node_mib,
        time_limit_s=dry_run_limit_s(config, sweep_cpus),
        required_nodes=job.required_nodes,
        licenses=without_gate(job.licenses),
        reservation=job.reservation,
        features=job.features,
        excluded_nodes=job.excluded_nodes,
        admin_comment=tags.DRY_RUN_PREFIX + token,
    )


def dry_run_limit_s(config: Config, sweep_cpus: int | None = None) -> int:
    """Return the time limit of a dry run's job: it ends itself before. A sweep may take as long as the rest."""
    return config.profiling.time_limit_s * (2 if sweep_cpus else 1) + 60


def original_request(job: ManagedJob, why: str = "") -> JobChange:
    """Return the change that gives a job its own request back and lets it start at once."""
    if job.membership is None:
        own = JobChange() if job.given is None else reset_change(job, job.given.original)
        told = job.admin_comment if own.admin_comment is None else own.admin_comment
        comment = without_membership(told)
        return replace(own, start_now=True, admin_comment=own.admin_comment if comment == told else comment)
    original = job.membership.original
    return replace(
        _own_cpus_and_memory(job, original),
        gpu_request=original.gpu_request,
        # Its user may have made it wait for something else meanwhile.
        dependency="" if job.dependency in {"", f"after:{job.membership.pilot}"} else None,
        start_now=True,
        time_limit_s=None if job.has_changed_limit else original.time_limit_s or None,
        admin_comment=tags.with_plan(without_membership(job.admin_comment), tags.Planned((why,)) if why else None),
    )


def without_membership(admin_comment: str) -> str:
    """Return an AdminComment that makes its job no group's member, and grants it no pilot's GPUs."""
    return tags.with_token(tags.with_token(admin_comment, tags.STATE_PREFIX, None), tags.GRANT_PREFIX, None)


def placed(job: ManagedJob, place: tags.Place) -> JobChange:
    """Return the change that makes a task that is kept back stand behind siblings."""
    back = in_own_place(job)
    return replace(
        back,
        nice=place.nice if place.nice != job.nice else None,
        dependency=place.dependency or back.dependency,
        admin_comment=tags.with_token(job.admin_comment, tags.PLACE_PREFIX, tags.format_record(place)),
    )


def in_own_place(job: ManagedJob, change: JobChange = _NO_CHANGE) -> JobChange:
    """Return a change after which a task stands where Slurm has it, with the nice value that its user wrote.

    One that is held keeps the given value: with priority/basic, a new nice value would lift the hold.
    """
    if job.place is None or job.held:
        return change
    comment = job.admin_comment if change.admin_comment is None else change.admin_comment
    waits = job.own_dependency != job.dependency and change.dependency is None
    return replace(
        change,
        nice=job.own_nice if job.own_nice != job.nice else None,
        dependency="" if waits else change.dependency,
        admin_comment=tags.with_token(comment, tags.PLACE_PREFIX, None),
    )


def with_memory_retry(admin_comment: str, retry: MemoryRetry) -> str:
    """Return a member's AdminComment that says what becomes of it when it runs out of GPU memory beside others."""
    return tags.with_token(admin_comment, tags.RETRY_MEMORY_PREFIX, retry or None)


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a member goes."""

    pilot: int  # The pilot job of its group
    node: str  # Where that runs: a node, or a folded list of them
    why: tuple[str, ...]  # Why the group was formed, or why the job joins it
    oversubscribe: bool = False  # Whether the jobs of the group share their CPUs


def member_change(
    member: MemberPlan,
    place: GroupPlace,
    job: Job,
    *,
    no_gpus: str,
    mem_per_gpu: bool = False,
    memory_retry: MemoryRetry = MemoryRetry.ALONE,
) -> JobChange:
    """Return the change that makes a held job a member: without GPUs of its own, behind its group's pilot job.

    It keeps its CPUs, tasks and memory, unless its work runs as a thread, in the pilot job. CPUs and memory that Slurm
    gives it only for its GPUs (`mem_per_gpu`: its partition has a default) are asked for by their number. Slurm has no
    way to take back that it shares CPUs.
    """
    limit_s = 60 * whole_minutes(member.time_limit_s)
    state = tags.MemberState(place.pilot, member.original, member.accumulate_steps, limit_s, member.min_speed)
    comment = tags.with_token(job.admin_comment, tags.STATE_PREFIX, tags.format_state(state))
    comment = tags.with_token(comment, tags.GRANT_PREFIX, str(place.pilot))
    is_thread, comes_with_gpus = member.isolation == "thread", job.given_cpus != job.cpu_count
    each_task = job.given_cpus // job.task_count if job.task_count > 1 else None
    own_mib = job.mem_per_node_mib or None if mem_per_gpu and not job.mem_per_cpu_mib else None
    kind = (f"{member.isolation}: {member.isolation_why}",) if member.isolation_why else ()
    planned = tags.Planned((*place.why, *kind), member.speed, member.solo_iteration_s, member.estimated)
    return JobChange(
        gpu_request=no_gpus,
        required_nodes=place.node,
        cpu_count=member.cpu_count if is_thread else job.given_cpus if comes_with_gpus else None,
        cpus_per_task=1 if is_thread else each_task if comes_with_gpus else None,
        dependency=f"after:{place.pilot}",
        mem_per_node_mib=(member_mem_mib(member) or None) if is_thread else own_mib,
        time_limit_s=limit_s or None,
        oversubscribe=True if place.oversubscribe and not job.oversubscribe else None,
        admin_comment=tags.with_plan(with_memory_retry(comment, memory_retry), planned),
    )


def longer_limit_change(member: ManagedJob, limit_s: int) -> JobChange:
    """Return the change that gives a member more time, because another job joins its group."""
    comment, limit_s = member.admin_comment, 60 * whole_minutes(limit_s)
    if member.membership is not None:
        state = tags.format_state(replace(member.membership, limit_s=limit_s))
        comment = tags.with_token(comment, tags.STATE_PREFIX, state)
    return JobChange(time_limit_s=limit_s, admin_comment=comment)


def join_change(pilot: ManagedJob, join: Join, view: View) -> JobChange:
    """Return the change that tells a pilot of its new member and extends its time limit.

    It is named after those of its members that have not ended.
    """
    token, members = pilot.pilot_tag or tags.PilotTag("", ())
    known = tuple(dict.fromkeys((*members, join.member.job_id)))
    comment = tags.with_token(pilot.admin_comment, tags.PILOT_PREFIX, tags.format_pilot(token, known))
    name = pilot_name(each for each in known if each == join.member.job_id or view.active.get(each) is not None)
    return JobChange(name=name, admin_comment=comment, time_limit_s=join.pilot_limit_s or None)


def changed_pilot(pilot: ManagedJob, change: JobChange) -> ManagedJob:
    """Return a pilot as it is after a `join_change`."""
    comment = pilot.admin_comment if change.admin_comment is None else change.admin_comment
    limit_s = pilot.time_limit_s if change.time_limit_s is None else change.time_limit_s
    return replace(pilot, admin_comment=comment, pilot_tag=tags.parse_pilot(comment), time_limit_s=limit_s)


def given_comment(job: Job, share: GivenShare, now_s: float) -> str:
    """Return a job's AdminComment with its own request."""
    given = tags.Given(int(now_s), share.original)
    return tags.with_token(job.admin_comment, tags.GIVEN_PREFIX, tags.format_record(given))


def given_change(job: Job, share: GivenShare) -> JobChange:
    """Return the change that gives a held job its share, in its user's name: the user's limits hold for it.

    Memory is always given per node: a request per CPU would grow and shrink with the CPUs.
    """
    return JobChange(
        required_nodes=share.nodes,
        cpu_count=share.cpu_count,
        cpus_per_task=share.cpus_per_task,
        mem_per_node_mib=share.mem_per_node_mib or None,
        owner=(job.uid, job.gid),
    )


def reset_change(job: Job, original: tags.Original) -> JobChange:
    """Return the change that gives a pending job its own CPUs, memory and nodes back, and drops the tag."""
    comment = tags.with_token(job.admin_comment, tags.GIVEN_PREFIX, None)
    return replace(_own_cpus_and_memory(job, original), admin_comment=comment)


def _own_cpus_and_memory(job: Job, original: tags.Original) -> JobChange:
    """The change of a job's request back, in its user's name: it must leave nothing that exempts it from limits."""
    per_cpu_mib = original.mem_per_cpu_mib
    return JobChange(
        owner=(job.uid, job.gid),
        required_nodes=original.required_nodes,
        cpu_count=original.cpu_count,
        cpus_per_task=original.cpus_per_task,
        mem_per_node_mib=None if per_cpu_mib else original.mem_per_node_mib or None,
        mem_per_cpu_mib=per_cpu_mib or None,
    )


def member_mem_mib(member: MemberPlan) -> int:
    """Return the memory of a member's own job on each node, 0 where it asks for none.

    A thread's keeps a little of it, for its batch script.
    """
    own_mib = member.original.mem_per_node_mib
    return min(own_mib, MEMBER_MEM_MIB) if member.isolation == "thread" else own_mib


def as_submitted(job: ManagedJob, pilot: Job) -> ManagedJob:
    """A member with the request that it had before it was grouped."""
    if job.membership is None:
        return job
    return with_request(job, job.membership.original, pilot.gpu_count)


def asked_by(job: Job) -> tags.Original:
    """Return a job's present request in Slurm."""
    return tags.Original(
        gpu_request=job.gpu_request,
        required_nodes=job.required_nodes,
        cpu_count=job.cpu_count,
        cpus_per_task=job.cpus_per_task,
        mem_per_node_mib=job.mem_per_node_mib,
        time_limit_s=job.time_limit_s,
        mem_per_cpu_mib=job.mem_per_cpu_mib,
    )


def was_changed(job: ManagedJob, member: MemberPlan) -> bool:
    """Whether a job that is not a member yet asks for something else than when it was planned as one."""
    return job.membership is None and asked_by(job) != member.original


def as_asked(job: ManagedJob) -> ManagedJob:
    """A job with the CPUs, memory and nodes that its user asked for, whatever it was given."""
    if job.given is None:
        return job
    asked = with_request(job, job.given.original, job.gpu_count)
    return replace(asked, gpu_request=job.gpu_request, time_limit_s=job.time_limit_s)


def with_request(job: ManagedJob, original: tags.Original, gpu_count: int) -> ManagedJob:
    """A job with the request that its user wrote, on so many GPUs."""
    return replace(
        job,
        gpu_count=gpu_count,
        gpu_request=original.gpu_request,
        required_nodes=original.required_nodes,
        cpu_count=original.cpu_count,
        cpus_per_task=original.cpus_per_task,
        mem_per_node_mib=original.mem_per_node_mib,
        mem_per_cpu_mib=original.mem_per_cpu_mib,
        time_limit_s=original.time_limit_s,
    )
