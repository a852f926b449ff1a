"""What jobs had in earlier runs: GPU time, whoever ended these: Muri, Slurm, an administrator, a failed node. Pure.

Orders by attained service (2D-LAS, Tiresias) count all of it. Slurm itself keeps the start of the present run only, so
the controller remembers runs: when they began, and their end once a job's restart count has grown. Runs that it never
saw, as when it was stopped for long, are looked up in the accounts.

It also remembers who ran beside whom, until the members' reports are written: slurmctld forgets an ended job after
MinJobAge, which may be shorter than the time between two cycles.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from muri.slurm_plugin.planning.cycle_input import Knowledge
from muri.slurm_plugin.planning.repairs import groups_by_pilot
from muri.slurm_plugin.planning.slurm_requests import as_asked, with_request
from muri.slurm_plugin.records.cluster import Job, JobState, NodeIndex
from muri.slurm_plugin.records.comment_reports import MemberReport, member_report
from muri.slurm_plugin.records.journal import PREEMPT, Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, profile_key
from muri.slurm_plugin.records.usage import (
    PILOT_REPORTS_AWAITED,
    Run,
    SharingReport,
    Span,
    alone_s,
    partners_of,
    split_gpu_time,
)


@dataclass(frozen=True, slots=True)
class PastRun:
    """One run of a job."""

    number: int  # Restart count of the job in this run
    start_s: float  # When it began, seconds since the epoch
    gpu_count: int  # GPUs that the job had, alone or together with others
    end_s: float = 0.0  # When it ended; 0 while it goes on

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of a run that has ended."""
        return max(0.0, self.end_s - self.start_s) * self.gpu_count


@dataclass(frozen=True, slots=True)
class Service:
    """What is remembered of a job's runs."""

    runs: tuple[PastRun, ...] = ()  # By number; the last one may go on
    asked: int = 0  # Restart count of the job when the accounts were asked about it; 0: never
    accounts_s: float = 0.0  # Seconds that all its ended runs had by the accounts then

    @classmethod
    def of(cls, fact: Mapping[str, Any]) -> "Service":
        """Read the journal's fact.

        Raises:
            KeyError, TypeError, ValueError: It is damaged.
        """
        runs = (PastRun(int(run), float(start), int(gpus), float(end)) for run, start, gpus, end in fact["runs"])
        return cls(tuple(runs), int(fact["asked"]), float(fact["accounts_s"]))

    @property
    def fact(self) -> dict[str, Any]:
        """For the journal."""
        runs = [[run.number, run.start_s, run.gpu_count, run.end_s] for run in self.runs]
        return {"runs": runs, "asked": self.asked, "accounts_s": self.accounts_s}


def noted(known: Mapping[int, Service], view: View) -> dict[int, Service]:
    """Bring what is remembered up to what Slurm shows; jobs that have ended are forgotten."""
    found: dict[int, Service] = {}
    for job, gpu_count in _users_jobs(view):
        service = known.get(job.job_id, Service())
        runs = [_ended(run, job) for run in service.runs if run.number <= job.restart_count]
        at_work = job.state in {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}
        if at_work and job.start_s and all(run.number != job.restart_count for run in runs):
            runs.append(PastRun(job.restart_count, job.start_s, gpu_count))
        if runs or service.asked:
            found[job.job_id] = replace(service, runs=tuple(runs))
    return found


def _users_jobs(view: View) -> Iterator[tuple[ManagedJob, int]]:
    """Jobs submitted with --muri that run or have run, with the GPUs that they asked for."""
    for role in (Role.CANDIDATE, Role.RELEASED, Role.MEMBER, Role.USER_HELD):
        for job in view.having(role):
            if job.state is JobState.PENDING and not job.restart_count:
                continue  # most of a long queue
            pilot = view.jobs.get(job.membership.pilot) if job.membership is not None else None
            gpu_count = pilot.gpu_count if pilot is not None else as_asked(job).gpu_count
            if gpu_count and not job.several_tasks:
                yield job, gpu_count


def _ended(run: PastRun, job: ManagedJob) -> PastRun:
    """A run with its end, where the job is past it: Slurm sets a job's submit time anew when it requeues it."""
    if run.end_s or run.number == job.restart_count:
        return run
    return replace(run, end_s=max(run.start_s, job.submit_s))


def gaps(known: Mapping[int, Service], view: View, intents: tuple[Intent, ...]) -> frozenset[int]:
    """Return the jobs of which a run is neither remembered nor in the accounts as they were last asked."""
    stops = _stopped_runs(intents)
    found = set()
    for job, _ in _users_jobs(view):
        service = known.get(job.job_id, Service())
        numbers = {run.number for run in service.runs} | stops.get(job.job_id, {}).keys()
        # After the accounts' last answer every run was seen, or they are asked again. (Counted, not listed: a damaged
        # record may speak of billions of runs.)
        seen = sum(service.asked <= number < job.restart_count for number in numbers)
        if seen < job.restart_count - service.asked:
            found.add(job.job_id)
    return frozenset(found)


def with_accounts(
    known: Mapping[int, Service], jobs: Iterable[int], runs: Iterable[Run], view: View
) -> dict[int, Service]:
    """Add what the accounts tell of some jobs; those that they do not know are not asked about again either."""
    elapsed_s: dict[int, float] = {}
    for run in runs:
        if run.has_ended:
            elapsed_s[run.job_id] = elapsed_s.get(run.job_id, 0.0) + run.elapsed_s
    asked = {
        job_id: replace(
            known.get(job_id, Service()), asked=view.jobs[job_id].restart_count, accounts_s=elapsed_s.get(job_id, 0.0)
        )
        for job_id in jobs
    }
    return {**known, **asked}


def served_gpu_s(known: Mapping[int, Service], view: View, intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds that jobs had in earlier runs, by job id; each run counts once.

    What the present run has had is not in it.
    """
    stops = _stopped_runs(intents)
    served: dict[int, float] = {}
    for job, gpu_count in _users_jobs(view):
        service = known.get(job.job_id, Service())
        by_run = {number: gpu_s for number, gpu_s in stops.get(job.job_id, {}).items() if number < job.restart_count}
        for run in service.runs:
            if run.end_s:
                by_run[run.number] = max(run.gpu_s, by_run.get(run.number, 0.0))
        since = sum(gpu_s for number, gpu_s in by_run.items() if number >= service.asked)
        # The accounts hold every run until they were asked, the remembered ones among them. Their record of the last
        # one may have come too late.
        before = max(service.accounts_s * gpu_count, sum(by_run.values()) - since)
        if before + since > 0:
            served[job.job_id] = before + since
    return served


def had_before(gpu_s: float) -> str:
    """Say for people how much service a job has had in earlier runs."""
    minutes = gpu_s / 60
    return (
        f"earlier runs have had {minutes:.1f} GPU minutes"
        if minutes < 60
        else (f"earlier runs have had {minutes / 60:.1f} GPU hours")
    )


def saved_gpu_s(view: View, intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds of runs that ended with a checkpoint because Muri stopped them, by job id.

    A run that Slurm ended may have to be repeated: of a job's duration it takes nothing off.
    """
    found: dict[int, float] = {}
    for job_id, by_run in _stopped_runs(intents).items():
        job = view.jobs.get(job_id)
        if job is not None:
            found[job_id] = sum(gpu_s for number, gpu_s in by_run.items() if number < job.restart_count)
    return found


def _stopped_runs(intents: tuple[Intent, ...]) -> dict[int, dict[int, float]]:
    """GPU-seconds of the runs that the controller stopped, by job id and number of the run."""
    found: dict[int, dict[int, float]] = {}
    for intent in intents:
        if intent.kind == PREEMPT and intent.state != "abandoned":
            told = intent.payload
            found.setdefault(int(told["job_id"]), {})[int(told["run"])] = float(told["served_gpu_s"])
    return found


class Standing(StrEnum):
    """How far the accounts of a member's run are.

    OPEN: it has not ended, or not for long enough.
    COUNTED: it is part of the metrics; its report has yet to be written.
    CLOSED: nothing is left to do, or there is nothing to report, such as of a member that left its group.
    """

    OPEN = "open"
    COUNTED = "counted"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class MemberRun:
    """A member's run in a group."""

    job_id: int  # The member
    solo_iteration_s: float = 0.0  # Iteration time alone, from a measured profile; 0 while there is none
    speed: float = 0.0  # Planned speed, 1 = as fast as alone; 0 when not known
    start_s: float = 0.0  # When it started, seconds since the epoch; 0 before
    end_s: float = 0.0  # When it ended or left; 0 before
    measured: MemberReport | None = None  # What the runtime last reported of it
    admin_comment: str = ""  # Its AdminComment, once it has ended
    standing: Standing = Standing.OPEN  # How far its accounts are
    name: str = ""  # What Slurm's commands call it, "" for its job id

    def report(self, group: "GroupRun", gpu_s: float) -> SharingReport:
        """Return the report of a run that has ended."""
        known_s, basis = alone_s(self.end_s - self.start_s, self.speed, self.solo_iteration_s, self.measured)
        others = partners_of(self.job_id, (self.start_s, self.end_s), group.spans(math.inf))
        seen = self.measured or MemberReport(1.0)
        return SharingReport(
            group.pilot, group.gpu_count, gpu_s, known_s, basis, seen.iterations or 0, others, seen.stage_s, seen.wait_s
        )


@dataclass(frozen=True, slots=True)
class GroupRun:
    """A group whose accounts are open."""

    pilot: int  # Its pilot job
    gpu_count: int = 0  # GPUs that it holds
    start_s: float = 0.0  # When it started, seconds since the epoch; 0 before
    end_s: float = 0.0  # When it ended; 0 before
    end: str = ""  # How it ended: "gpu-error", or Slurm's word in lower case; "" before
    # Its members, those that joined later and those that left included
    members: tuple[MemberRun, ...] = field(default=())

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return bool(self.end) and all(member.standing is Standing.CLOSED for member in self.members)

    def due(self, now_s: float, telemetry_s: float) -> list[MemberRun]:
        """Return the members whose run is over, and known in full."""
        running = any(member.start_s and not member.end_s for member in self.members)
        return [
            member
            for member in self.members
            if member.standing is Standing.OPEN
            and member.end_s
            and (self.end or (running and now_s - member.end_s > PILOT_REPORTS_AWAITED * telemetry_s))
        ]

    def gpu_s(self, now_s: float) -> dict[int, float]:
        """Return each member's share of the GPU time so far, by job id."""
        span = self.start_s, self.end_s or now_s
        return split_gpu_time(self.gpu_count, span, self.spans(now_s)) if self.start_s else {}

    def spans(self, now_s: float) -> dict[int, Span]:
        """Return when each member ran, by job id; those that run until now."""
        return {each.job_id: (each.start_s, each.end_s or now_s) for each in self.members if each.start_s}

    def with_member(self, changed: MemberRun) -> "GroupRun":
        """Return the group with one member's run replaced."""
        return replace(self, members=tuple(changed if each.job_id == changed.job_id else each for each in self.members))


Ledger = Mapping[int, GroupRun]
"""Groups whose accounts are open, by pilot job."""


def updated(ledger: Ledger, view: View, intents: tuple[Intent, ...], since_s: float) -> dict[int, GroupRun]:
    """Bring the ledger up to what Slurm shows."""
    starts = groups_by_pilot(intents)
    pilots = {job.job_id for job in view.having(Role.PILOT)}
    begun = {pilot for pilot, intent in starts.items() if intent.state != "abandoned" and intent.begun_s >= since_s}
    runs = {pilot: ledger.get(pilot, GroupRun(pilot)) for pilot in sorted({*ledger, *pilots, *begun})}
    return {pilot: _group(run, view, starts.get(pilot)) for pilot, run in runs.items()}


def _group(run: GroupRun, view: View, start: Intent | None) -> GroupRun:
    pilot = view.jobs.get(run.pilot)
    known = {member.job_id: member for member in run.members}
    for planned in start.payload["members"] if start is not None else ():
        job_id = int(planned["job_id"])
        known.setdefault(job_id, _planned(job_id, planned))
    for job_id in pilot.pilot_tag.members if pilot is not None and pilot.pilot_tag is not None else ():
        known.setdefault(job_id, MemberRun(job_id))  # the journal was lost
    speeds = None if pilot is None else pilot.reports.speeds
    measured = {job_id: member_report(speeds, job_id) for job_id in known}
    members = (
        _member(each if measured[each.job_id] is None else replace(each, measured=measured[each.job_id]), run, view)
        for each in known.values()
    )
    seen = run if pilot is None else _seen(run, pilot)
    return replace(seen, members=tuple(members))


def _planned(job_id: int, planned: Mapping[str, Any]) -> MemberRun:
    known = 0.0 if planned.get("estimated") else planned.get("solo_iteration_s")
    return MemberRun(job_id, float(known or 0.0), float(planned.get("speed") or 0.0))


def _seen(run: GroupRun, pilot: ManagedJob) -> GroupRun:
    run = replace(run, gpu_count=pilot.gpu_count or run.gpu_count, start_s=pilot.start_s or run.start_s)
    if pilot.state is JobState.PENDING:
        return replace(run, start_s=0.0)  # Slurm shows when it expects to start it
    if pilot.state.is_active or run.end:
        return run
    return replace(run, end_s=pilot.end_s, end="gpu-error" if pilot.reports.fault else pilot.state.lower())


def _member(member: MemberRun, run: GroupRun, view: View) -> MemberRun:
    job = view.jobs.get(member.job_id)
    if member.standing is not Standing.OPEN or job is None or member.end_s:
        return member
    member = replace(member, name=job.name_in_slurm if job.array_job_id else "")
    is_member = job.membership is not None and job.membership.pilot == run.pilot
    waits = job.state is JobState.PENDING
    if member.start_s and (waits or not is_member):
        return _left(member, view.snapshot.taken_s)
    if not is_member:
        # Until it is seen as a member, it may be about to become one: the view is older than this cycle's starts.
        return _left(member, view.snapshot.taken_s) if run.end else member
    if waits:
        return member
    return _member_ended(member, job) if not job.state.is_active else replace(member, start_s=job.start_s)


def _left(member: MemberRun, now_s: float) -> MemberRun:
    """It goes on elsewhere, and how much of this run that needs again is not known: nothing is reported."""
    end_s = now_s if member.start_s else 0.0
    return replace(member, end_s=end_s, standing=Standing.CLOSED)


def _member_ended(member: MemberRun, job: Job) -> MemberRun:
    if not job.start_s or job.end_s <= job.start_s:
        return replace(member, standing=Standing.CLOSED)  # cancelled before it ran
    return replace(member, start_s=job.start_s, end_s=job.end_s, admin_comment=job.admin_comment)


def with_profiles(ledger: Ledger, view: View, knowledge: Knowledge, index: NodeIndex) -> dict[int, GroupRun]:
    """Add the iteration times of models that were measured after their members' starts, such as by these members."""
    return {
        pilot: replace(run, members=tuple(_profiled(member, run, view, knowledge, index) for member in run.members))
        for pilot, run in ledger.items()
    }


def _profiled(member: MemberRun, run: GroupRun, view: View, knowledge: Knowledge, index: NodeIndex) -> MemberRun:
    job = view.jobs.get(member.job_id)
    if member.solo_iteration_s or member.standing is not Standing.OPEN or job is None or job.membership is None:
        return member
    # An ended pilot job may hold no GPU any more.
    key = profile_key(with_request(job, job.membership.original, run.gpu_count), index)
    profile = knowledge.profile_of(key)
    if profile is None or profile.is_estimate:
        return member
    return replace(member, solo_iteration_s=profile.iteration_s)


def forgotten(ledger: Ledger, view: View) -> set[int]:
    """Return jobs whose ends are not known and that slurmctld has forgotten: the accounts may know them."""
    return {
        job_id
        for run in ledger.values()
        for job_id, is_open in (
            (run.pilot, not run.end),
            *((member.job_id, member.standing is Standing.OPEN and not member.end_s) for member in run.members),
        )
        if is_open and job_id not in view.jobs
    }


def looked_up(ledger: Ledger, lost: Iterable[int], runs: Iterable[Run], now_s: float) -> dict[int, GroupRun]:
    """Complete the ledger by what the accounts say of forgotten jobs; one that they do not know either is given up."""
    last = {run.job_id: run for run in runs if run.has_ended}
    wanted = set(lost)

    def member(each: MemberRun, pilot: int) -> MemberRun:
        if each.job_id not in wanted:
            return each
        run = last.get(each.job_id)
        if run is None or run.pilot != pilot or run.end_s <= run.start_s:
            return _left(each, now_s)
        return replace(each, start_s=float(run.start_s), end_s=float(run.end_s), admin_comment=run.admin_comment)

    def group(each: GroupRun) -> GroupRun:
        if each.pilot in wanted:
            run = last.get(each.pilot)
            gpu_count = each.gpu_count if run is None else run.gpu_count
            start_s, end_s = (each.start_s, now_s) if run is None else run.span
            end = "unknown" if run is None else run.state.lower()
            each = replace(each, gpu_count=gpu_count, start_s=start_s, end_s=end_s, end=end)
        return replace(each, members=tuple(member(one, each.pilot) for one in each.members))

    return {pilot: group(run) for pilot, run in ledger.items()}
