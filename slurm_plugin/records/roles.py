"""What each job is to Muri, what keeps it waiting, and what its comments say: parsed here and nowhere else.

A job waits behind a license that a reservation withholds, or behind a hold. The reservation is a lease: the controller
extends it in every cycle, and when it ends, Slurm starts every waiting job by itself. Jobs keep their priority
meanwhile, and their holds belong to users and administrators alone. Sites whose Slurm has no such license use Muri's
own hold instead.
"""

import logging
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Final, Literal

from muri.profiler.records import GPU_COUNT, ProfileKey
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, NodeIndex, Snapshot
from muri.slurm_plugin.records.comment_reports import JobReports, read_reports

GATE_LICENSE: Final = "muri_gate"
"""Name of the license, and of the reservation that withholds it."""

Gate = Literal["license", "hold"]
"""The kind of gate that a job was submitted with."""

OPEN: Final = "open"
"""Replaces a gate's kind once Muri has lifted its own hold: a later hold is not Muri's."""

REQUEUED: Final = "requeued"
"""Written before Muri requeues a job held; marks the hold as Muri's."""

REQUEUED_HELD: Final = "job_requeued_in_held_state"
"""Slurm's reason of a hold by `scontrol requeuehold`: by a member, the controller, or another process that may."""

_HELD_BY_USER: Final = "JobHeldUser"
"""Slurm's reason of the hold that job_submit or a user made. Administrators' holds and failed launches have others."""


def without_gate(licenses: str) -> str:
    """Return the licenses that the user asked for."""
    if licenses == f"{GATE_LICENSE}:1":  # as most jobs have it
        return ""
    return ",".join(each for each in _each(licenses) if _name(each) != GATE_LICENSE)


def with_gate(licenses: str, count: int = 1) -> str:
    """Return the user's licenses and Muri's."""
    return ",".join(filter(None, (without_gate(licenses), f"{GATE_LICENSE}:{count}")))


def is_behind_license(job: Job) -> bool:
    """Whether a job asks for Muri's license."""
    return GATE_LICENSE in job.licenses and any(_name(each) == GATE_LICENSE for each in _each(job.licenses))


def is_behind_own_hold(job: Job) -> bool:
    """Whether a job's hold is Muri's own, as far as Slurm tells.

    A job without the gate's word was held by a Muri that knew no other gate. Once Muri has lifted its hold, later ones
    are others'; but a member puts itself back into the queue, held, and its user cannot write the word that says so.
    """
    if job.state is not JobState.PENDING or not job.held or tags.USER_HOLD in job.admin_comment.split():
        return False
    word = gate_word(job)
    if word is None and is_behind_license(job):
        return False  # its comment was damaged: the license is its gate, and the hold is not Muri's
    if word == OPEN or (word == "hold" and job.reason == REQUEUED_HELD):
        return job.reason == REQUEUED_HELD and tags.is_member(job.admin_comment)
    return word in {None, "hold", REQUEUED} and job.reason in {REQUEUED_HELD, _HELD_BY_USER}


def gate_word(job: Job) -> str | None:
    """Return the word that says how a job's gate stands, None where an older Muri wrote none."""
    return tags.token(job.admin_comment, tags.GATE_PREFIX)


def is_lifted(job: Job) -> bool:
    """Whether Muri's own hold on a waiting job is lifted without its gate's word saying so."""
    return job.state is JobState.PENDING and not job.held and gate_word(job) in {"hold", REQUEUED}


def lease_end_s(snapshot: Snapshot) -> float:
    """Return when the reservation ends that withholds the license, seconds since the epoch; 0 when there is none."""
    return next((each.end_s for each in snapshot.reservations if each.name == GATE_LICENSE), 0.0)


def with_word(admin_comment: str, word: str) -> str:
    """Return an AdminComment that says how its job's gate stands."""
    return tags.with_token(admin_comment, tags.GATE_PREFIX, word)


def _each(licenses: str) -> list[str]:
    # Slurm 26.05 joins the licenses of a requeued job with semicolons.
    return [each for each in re.split("[,;]", licenses) if each]


def _name(license_text: str) -> str:
    return license_text.partition("@")[0].partition(":")[0].strip()


log = logging.getLogger("muri.controller")


class Role(StrEnum):
    """The part of a job in Muri's work; a job has exactly one role.

    CANDIDATE: submitted with `--muri`, behind the gate, and Muri decides when it starts. Leaves when Muri opens the
        gate, or by becoming a member.
    MEMBER: was given to a group; carries its original request. Leaves by ending or by being restored.
    RELEASED: submitted with `--muri` and no longer behind the gate: Slurm alone decides.
    PILOT: holds a group's GPUs.
    DRY_RUN: measures a model.
    NOT_OURS: behind the gate, but Muri cannot plan it (a partition it does not serve, no GPU count or no AdminComment
        that it can read). Muri opens its gate at once.
    USER_HELD: held by its user, an administrator or Slurm; Muri leaves it alone until they release it.
    OTHER: not Muri's business.
    """

    CANDIDATE = "candidate"
    MEMBER = "member"
    RELEASED = "released"
    PILOT = "pilot"
    DRY_RUN = "dry-run"
    NOT_OURS = "not-ours"
    USER_HELD = "user-held"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ManagedJob(Job):
    """A job with the contents of its comments, read once."""

    role: Role = Role.OTHER
    request: tags.SubmitRequest = field(default_factory=tags.SubmitRequest)  # The keys of `--muri`
    membership: tags.MemberState | None = None  # None when it is not a member or its tag is damaged
    given: tags.Given | None = None  # Its original request, None when it has its own CPUs and memory
    place: tags.Place | None = None  # What keeps it behind siblings of its array
    planned: tags.Planned | None = None  # The controller's decision when it started it
    pilot_tag: tags.PilotTag | None = None  # Of a pilot job
    mode: tags.Mode = "interleave"  # Of a pilot job: how its members share, as in `Group.mode`
    dry_run: str | None = None  # Of a dry run: its token
    script: str = ""  # Hash of its batch script, "" when unknown
    calls_muri: bool = True  # Its batch script may call `muri run`, without which a member takes no turns
    facts: tags.SubmitFacts | None = None  # None where the SPANK plugin is older or was not loaded at submission
    memory_retry: tags.MemoryRetry = tags.MemoryRetry.ALONE
    reports: JobReports = field(default_factory=JobReports)  # Of its own comment
    gate: Gate = "hold"
    gated: bool = False  # Muri keeps it from starting, by its license or its own hold
    held_by_others: bool = False  # Its user, an administrator or Slurm holds it; Muri never lifts that

    @property
    def has_changed_limit(self) -> bool:
        """Whether a member's time limit was changed since Muri gave it one: the new limit holds."""
        given_s = 0 if self.membership is None else self.membership.limit_s
        return given_s > 0 and self.time_limit_s != given_s

    @property
    def is_granted(self) -> bool:
        """Whether a member's group opens its GPUs for its own job. For members of 0.2 it does not."""
        return tags.token(self.admin_comment, tags.GRANT_PREFIX) is not None

    @property
    def starts_by_itself(self) -> bool:
        """Whether it waits for nothing but resources; others hold none back, so that jobs behind them start."""
        if self.state is not JobState.PENDING or self.held or self.gated:
            return False
        # Slurm shows the reason of its last look at the job, which may be older than what Muri has changed.
        outdated = (
            ("JobHeld", True),
            ("Licenses", not self.licenses),
            ("Dependency", not self.dependency),
            ("BeginTime", not self.begin_s),
        )
        return self.waits_for_resources or any(self.reason.startswith(word) and gone for word, gone in outdated)

    @property
    def own_nice(self) -> int:
        """Its user's nice value; one that has changed since Muri gave it another is the user's, too."""
        return self.place.own_nice if self.place is not None and self.nice == self.place.nice else self.nice

    @property
    def own_priority(self) -> int:
        """The priority that Slurm gives it without Muri's nice value."""
        return self.priority if self.held else self.priority + self.nice - self.own_nice

    @property
    def own_dependency(self) -> str:
        """Its dependency without Muri's on siblings."""
        given = set() if self.place is None else set(self.place.dependency.split(","))
        return "" if given.issuperset(self.dependency.split(",")) else self.dependency


_REMEMBERED: Final = 16_384
_LONGEST_REMEMBERED: Final = 2_048
"""So many jobs, each with so many characters of text at most, are not read again while their records stay the same, as
from cycle to cycle: 80 MiB at most, whatever users write."""

_NAMES: Final = tuple(each.name for each in fields(Job))
_values: Final = attrgetter(*_NAMES)


def read_job(job: Job, partitions: tuple[str, ...] = ()) -> ManagedJob:
    """Read a job's comments.

    Args:
        job: Slurm's record.
        partitions: Partitions that Muri serves, empty for all. Members and pilots elsewhere are still looked after.
    """
    texts = (job.admin_comment, job.comment, job.submit_line, job.command, job.work_dir, job.name)
    return (_read_once if sum(map(len, texts)) <= _LONGEST_REMEMBERED else _read)(job, partitions)


def _read(job: Job, partitions: tuple[str, ...]) -> ManagedJob:
    comment = job.admin_comment
    request = tags.parse_request(comment)
    pilot_tag, dry_run = tags.parse_pilot(comment), tags.token(comment, tags.DRY_RUN_PREFIX)
    gate = _gate_fields(job)
    role = Role.PILOT if pilot_tag else Role.DRY_RUN if dry_run is not None else Role.OTHER
    if role is Role.OTHER and (request is not None or tags.is_member(comment)):  # a comment may have been cut off
        role = _role_of(job, gated=gate["gated"], held_by_others=gate["held_by_others"])
    elif role is Role.OTHER and gate["gated"] and job.gpu_count and is_behind_license(job) and not job.held:
        role = Role.NOT_OURS  # its AdminComment was changed: only Muri would open its gate
    served = not partitions or job.partition in partitions
    if role is Role.CANDIDATE and (not served or GPU_COUNT.fault(job.gpu_count)):
        role = Role.NOT_OURS
    return ManagedJob(
        **_record_of(job),
        **gate,
        role=role,
        request=request or tags.SubmitRequest(),
        membership=tags.parse_state(comment),
        given=tags.parse_given(comment),
        place=tags.parse_place(comment),
        planned=tags.parse_plan(comment),
        pilot_tag=pilot_tag,
        mode=tags.mode_of(comment),
        dry_run=dry_run,
        script=tags.token(comment, tags.SCRIPT_PREFIX) or "",
        calls_muri=tags.token(comment, tags.CALLS_PREFIX) != "no",
        facts=tags.read_facts(comment),
        memory_retry=tags.memory_retry(comment),
        reports=read_reports(job.comment),
    )


_read_once: Final = lru_cache(maxsize=_REMEMBERED)(_read)


def _record_of(job: Job) -> dict[str, Any]:
    """Return a job's own record, by field."""
    return dict(zip(_NAMES, _values(job), strict=True))


def _gate_fields(job: Job) -> dict[str, Any]:
    """Return the fields of `ManagedJob` about its gate."""
    own_hold = is_behind_own_hold(job)
    gated = job.state is JobState.PENDING and (own_hold or is_behind_license(job))
    gate: Gate = "license" if gate_word(job) == tags.LICENSE_GATE else "hold"
    return {"gate": gate, "gated": gated, "held_by_others": job.held and not own_hold}


def _role_of(job: Job, *, gated: bool, held_by_others: bool) -> Role:
    """Return the role of a job that was submitted with `--muri`."""
    if tags.is_member(job.admin_comment):
        return Role.MEMBER
    if job.state is JobState.PENDING and held_by_others:
        return Role.USER_HELD
    return Role.CANDIDATE if gated else Role.RELEASED


def unread(job: ManagedJob) -> ManagedJob:
    """Return the same job without the contents of its comments: only its gate counts."""
    return ManagedJob(**_record_of(job), gate=job.gate, gated=job.gated, held_by_others=job.held_by_others)


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A running pilot job, and its members that still wait or run, by job id."""

    pilot: ManagedJob
    members: tuple[ManagedJob, ...]

    @property
    def mode(self) -> tags.Mode:
        """How they share, as in `Group.mode`."""
        return self.pilot.mode


@dataclass(frozen=True)
class View:
    """A snapshot whose jobs' comments have been read; frequent lookups are computed once.

    Attributes:
        snapshot: Its source.
        jobs: Every job by id, in the snapshot's order.
    """

    snapshot: Snapshot
    jobs: Mapping[int, ManagedJob]

    def having(self, role: Role) -> tuple[ManagedJob, ...]:
        """Return the jobs of one role that still wait or run, by job id."""
        return self._by_role.get(role, ())

    @cached_property
    def _by_role(self) -> Mapping[Role, tuple[ManagedJob, ...]]:
        found: dict[Role, list[ManagedJob]] = {}
        for job in self.jobs.values():
            if job.state.is_active:
                found.setdefault(job.role, []).append(job)
        return {role: tuple(jobs) for role, jobs in found.items()}

    @cached_property
    def running_groups(self) -> tuple[RunningGroup, ...]:
        """The groups whose pilot job runs, in the order of their pilots."""
        members: dict[int, list[ManagedJob]] = {}
        for job in self.having(Role.MEMBER):
            if job.membership is not None:
                members.setdefault(job.membership.pilot, []).append(job)
        return tuple(
            RunningGroup(pilot, tuple(members[pilot.job_id]))
            for pilot in self.having(Role.PILOT)
            if pilot.state is JobState.RUNNING and pilot.job_id in members
        )

    @cached_property
    def group_of(self) -> Mapping[int, RunningGroup]:
        """The running group of each member, by the member's job id."""
        return {member.job_id: group for group in self.running_groups for member in group.members}

    @cached_property
    def node_index(self) -> NodeIndex:
        """The snapshot's nodes, to look things up."""
        return NodeIndex(self.snapshot.nodes)

    @cached_property
    def active(self) -> Mapping[int, ManagedJob]:
        """The jobs that still wait or run, by id."""
        return {job_id: job for job_id, job in self.jobs.items() if job.state.is_active}

    def oldest(self, job_ids: Iterable[int]) -> ManagedJob:
        """Return the one of some jobs that was submitted first."""
        return min((self.jobs[job_id] for job_id in job_ids), key=lambda job: (job.submit_s, job.job_id))


def view_of(snapshot: Snapshot, partitions: tuple[str, ...] = ()) -> View:
    """Read the comments of a snapshot's jobs; `partitions` as `read_job` takes them."""
    return View(snapshot, {job.job_id: _read_or_leave(job, partitions) for job in snapshot.jobs})


def _read_or_leave(job: Job, partitions: tuple[str, ...]) -> ManagedJob:
    """Read a job's comments; an unreadable comment only excludes the job from planning.

    AdminComment holds what Muri did with it. Without the user's comment, which is the likelier fault, all that can be
    undone. Otherwise only its gate is known, which must not stay closed while the lease goes on.
    """
    for comment in (job.comment, ""):
        try:
            return read_job(job if comment == job.comment else replace(job, comment=comment), partitions)
        except Exception:
            log.exception("job %d: a comment cannot be read", job.job_id)
    log.warning("job %d: Muri leaves it to Slurm", job.job_id)
    gate = _gate_fields(job)
    submitted = tags.token(job.admin_comment, tags.REQUEST_PREFIX) is not None
    return ManagedJob(**_record_of(job), **gate, role=Role.NOT_OURS if gate["gated"] and submitted else Role.OTHER)


def gpu_type_of(job: Job, nodes: NodeIndex) -> str:
    """Return the GPU type that a job will run on: the one it asks for, else that of its partition's nodes."""
    return _type_in(job.gpu_request) or nodes.gpu_types.get(job.partition, "gpu")


@lru_cache(maxsize=256)
def _type_in(gpu_request: str) -> str:
    """Return the GPU type that a request names, "" where it names none."""
    parts = gpu_request.replace("gres/", "").replace("=", ":").split(":")
    return parts[1] if len(parts) >= 2 and not parts[1].isdigit() else ""


def profile_key(job: ManagedJob, nodes: NodeIndex) -> ProfileKey:
    """Return the key under which a job's model is profiled: its user's own.

    Without `model=` two jobs count as the same model when the same user submitted them with the same line, arguments
    included, from the same directory, and their batch scripts have the same text.
    """
    model = job.request.model
    if not model:
        # As SQLite takes it: bytes that could not be decoded stand as escapes.
        line = f"{job.user}:{job.work_dir}:{_line_of(job)}".encode("utf-8", "backslashreplace").decode("utf-8")
        model = f"{line}#{job.script}" if job.script else line
    return ProfileKey(model, job.request.batch_size, job.gpu_count, gpu_type_of(job, nodes), job.user)


def _line_of(job: ManagedJob) -> str:
    """Return a text that differs when the submit line does: Slurm's own, or the script's words with a digest."""
    if job.facts is None:
        return job.submit_line or job.command or job.name
    return f"{shlex.join((job.command or job.name, *(job.facts.arguments or ())))}@{job.facts.line}"


def why_arguments_are_unknown(job: ManagedJob) -> str:
    """Return why the arguments of a job's batch script are unknown, "" when they are known."""
    if job.facts is not None:
        return "its script's arguments are too long to travel with it" if job.facts.arguments is None else ""
    if job.command and not job.submit_line:
        return (
            "nothing tells its script's arguments: this Slurm does not keep them, and the SPANK plugin where it was "
            "submitted, or muri.lua, is older than Muri here"
        )
    return ""
