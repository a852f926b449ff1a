"""Muri's reading of a snapshot: which job is what to Muri. Pure."""

import re
from dataclasses import dataclass
from enum import StrEnum

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Snapshot
from muri.slurm_plugin.records.submit_option import SubmitRequest, parse_request


class Role(StrEnum):
    """What a job is to Muri; a job has exactly one role.

    CANDIDATE: submitted with `--muri`, held, and Muri decides when it starts. Leaves by a release or by
        becoming a member.
    MEMBER: was given to a group; carries its original request. Leaves by ending or by being restored.
    RELEASED: submitted with `--muri` and no longer held: Slurm alone decides.
    HOST: holds a group's GPUs.
    DRY_RUN: measures a model.
    NOT_OURS: held with a tag, but Muri cannot plan it (a partition it does not serve, no GPU count that it can
        read). Leaves by an immediate release.
    USER_HELD: submitted with `--muri --hold`, or set aside by Slurm after it failed; only its user releases it.
    OTHER: none of Muri's business.
    """

    CANDIDATE = "candidate"
    MEMBER = "member"
    RELEASED = "released"
    HOST = "host"
    DRY_RUN = "dry-run"
    NOT_OURS = "not-ours"
    USER_HELD = "user-held"
    OTHER = "other"


def role_of(job: Job) -> Role:
    """Return a job's role from its AdminComment and whether it is held."""
    comment = job.admin_comment
    if tags.token(comment, tags.HOST_PREFIX) is not None:
        return Role.HOST
    if tags.token(comment, tags.DRY_RUN_PREFIX) is not None:
        return Role.DRY_RUN
    request = parse_request(comment)
    if request is None:
        return Role.OTHER
    if tags.token(comment, tags.STATE_PREFIX) is not None:
        return Role.MEMBER
    if job.state is JobState.PENDING and job.held:
        return Role.USER_HELD if request.user_hold or job.set_aside else Role.CANDIDATE
    return Role.RELEASED


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot with its jobs sorted by role.

    Attributes:
        snapshot: Where it comes from.
        jobs: Every job by id.
        roles: Every job's role by id.
    """

    snapshot: Snapshot
    jobs: dict[int, Job]
    roles: dict[int, Role]

    def having(self, role: Role) -> tuple[Job, ...]:
        """Return the jobs of one role that still wait or run, by job id."""
        return tuple(job for job in self.snapshot.jobs if self.roles[job.job_id] is role and job.state.is_active)

    def active(self, job_id: int) -> Job | None:
        """Return a job that still waits or runs, None when it ended or is unknown."""
        job = self.jobs.get(job_id)
        return job if job is not None and job.state.is_active else None


def view_of(snapshot: Snapshot, partitions: tuple[str, ...] = ()) -> View:
    """Sort a snapshot's jobs by role.

    Args:
        snapshot: The queue and the nodes.
        partitions: Partitions that Muri serves, empty for all. Members and hosts that are elsewhere already
            are still looked after.
    """
    roles = {job.job_id: role_of(job) for job in snapshot.jobs}
    for job in snapshot.jobs:
        served = not partitions or job.partition in partitions
        if roles[job.job_id] is Role.CANDIDATE and (not served or job.gpu_count < 1):
            roles[job.job_id] = Role.NOT_OURS
    return View(snapshot, {job.job_id: job for job in snapshot.jobs}, roles)


def gpu_type_of(job: Job, nodes: tuple[Node, ...]) -> str:
    """Return the GPU type that a job will run on: the one it asks for, else that of its partition's nodes."""
    parts = job.gpu_request.replace("gres/", "").replace("=", ":").split(":")
    if len(parts) >= 2 and not parts[1].isdigit():
        return parts[1]
    types = sorted({node.gpu_type for node in nodes if node.gpu_count and job.partition in node.partitions})
    return types[0] if types else "gpu"


def profile_key(job: Job, nodes: tuple[Node, ...]) -> ProfileKey:
    """Return the key under which a job's model is profiled.

    Without `model=` two jobs count as the same model when the same user submitted them with the same line, arguments
    included, from the same directory, and their batch scripts have the same text.
    """
    request = parse_request(job.admin_comment) or SubmitRequest()
    script = tags.token(job.admin_comment, tags.SCRIPT_PREFIX)
    line = f"{job.user}:{job.work_dir}:{job.submit_line or job.command or job.name}"
    model = request.model or (f"{line}#{script}" if script else line)
    return ProfileKey(model, request.batch_size, job.gpu_count, gpu_type_of(job, nodes))


def run_told(job: Job, prefix: str) -> int | None:
    """Return the run that a token in a job's own comment names, None when it names none."""
    text = tags.token(job.comment, prefix)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
