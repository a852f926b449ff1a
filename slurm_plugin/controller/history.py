"""Earlier runs of jobs and the GPU time that they had, whatever ended them; and groups' runs until they are reported.

Orders by attained service (2D-LAS, Tiresias) count all runs. Slurm keeps the start of the present run only, so the
controller remembers runs, and looks those up in the accounts that it has missed. slurmctld forgets an ended job after
MinJobAge, which may be shorter than the time between two cycles. Pure.
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
    """The remembered runs of a job."""

    runs: tuple[PastRun, ...] = ()  # By number; the last one may go on
    asked: int = 0  # Restart count of the job when the accounts were asked about it; 0: never
    accounts_s: float = 0.0  # Seconds that all its ended runs had by the accounts then

    @classmethod
    def of(cls, fact: Mapping[str, Any]) -> "Service":
        """Read the journal's fact; a KeyError, TypeError or ValueError if it is damaged."""
        runs = (PastRun(int(run), float(start), int(gpus), float(end)) for run, start, gpus, end in fact["runs"])
        return cls(tuple(runs), int(fact["asked"]), float(fact["accounts_s"]))

    @property
    def fact(self) -> dict[str, Any]:
        """Its form in the journal."""
        runs = [[run.number, run.start_s, run.gpu_count, run.end_s] for run in self.runs]
        return {"runs": runs, "asked": self.asked, "accounts_s": self.accounts_s}


def noted(known: Mapping[int, Service], view: View) -> dict[int, Service]:
    """Update the remembered runs with Slurm's records; jobs that have ended are forgotten."""
    services: dict[int, Service] = {}
    for job, gpu_count in _users_jobs(view):
        service = known.get(job.job_id, Service())
        runs = [_ended(run, job) for run in service.runs if run.number <= job.restart_count]
        at_work = job.state in {JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING}
        if at_work and job.start_s and all(run.number != job.restart_count for run in runs):
            runs.append(PastRun(job.restart_count, job.start_s, gpu_count))
        if runs or service.asked:
            services[job.job_id] = replace(service, runs=tuple(runs))
    return services


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
    """Return the jobs with a run that is neither remembered nor in the accounts' last answer."""
    stops = _stopped_runs(intents)
    incomplete = set()
    for job, _ in _users_jobs(view):
        service = known.get(job.job_id, Service())
        numbers = {run.number for run in service.runs} | stops.get(job.job_id, {}).keys()
        # After the accounts' last answer every run was seen, or they are asked again. (Counted, not listed: a damaged
        # record may speak of billions of runs.)
        seen = sum(service.asked <= number < job.restart_count for number in numbers)
        if seen < job.restart_count - service.asked:
            incomplete.add(job.job_id)
    return frozenset(incomplete)


def with_accounts(
    known: Mapping[int, Service], jobs: Iterable[int], runs: Iterable[Run], view: View
) -> dict[int, Service]:
    """Add the accounts' records of some jobs; jobs without a record are not looked up again either."""
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
    """Return the GPU-seconds that jobs had in earlier runs, without the present one, by job id."""
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
    """Describe the service of a job's earlier runs for people."""
    minutes = gpu_s / 60
    amount = f"{minutes:.1f} GPU minutes" if minutes < 60 else f"{minutes / 60:.1f} GPU hours"
    return f"earlier runs have had {amount}"


def saved_gpu_s(view: View, intents: tuple[Intent, ...]) -> dict[int, float]:
    """Return the GPU-seconds of runs that ended with a checkpoint because Muri stopped them, by job id.

    A run that Slurm ended may have to be repeated, so it does not shorten the rest of a job.
    """
    return {
        job_id: sum(gpu_s for number, gpu_s in by_run.items() if number < job.restart_count)
        for job_id, by_run in _stopped_runs(intents).items()
        if (job := view.jobs.get(job_id)) is not None
    }


def _stopped_runs(intents: tuple[Intent, ...]) -> dict[int, dict[int, float]]:
    """GPU-seconds of the runs that the controller stopped, by job id and number of the run."""
    stops: dict[int, dict[int, float]] = {}
    for intent in intents:
        if intent.kind == PREEMPT and intent.state != "abandoned":
            stop = intent.payload
            stops.setdefault(int(stop["job_id"]), {})[int(stop["run"])] = float(stop["served_gpu_s"])
    return stops


class Standing(StrEnum):
    """How far the accounts of a member's run are.

    OPEN: it has not ended, or not for long enough.
    COUNTED: it is part of the metrics; its report has yet to be written.
    CLOSED: its report is written, or there is none, such as of a member that left its group.
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
    measured: MemberReport | None = None  # The runtime's last report of it
    admin_comment: str = ""  # Its AdminComment, once it has ended
    standing: Standing = Standing.OPEN  # How far its accounts are
    name: str = ""  # Its name in Slurm's commands, "" for its job id

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
        """Whether all reports are written."""
        return bool(self.end) and all(member.standing is Standing.CLOSED for member in self.members)

    def due(self, now_s: float, telemetry_s: float) -> list[MemberRun]:
        """Return the members whose run has ended, with all its figures."""
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
        return {member.job_id: (member.start_s, member.end_s or now_s) for member in self.members if member.start_s}

    def with_member(self, changed: MemberRun) -> "GroupRun":
        """Return the group with one member's run replaced."""
        members = (changed if member.job_id == changed.job_id else member for member in self.members)
        return replace(self, members=tuple(members))


Ledger = Mapping[int, GroupRun]
"""Groups whose accounts are open, by pilot job."""


def updated(ledger: Ledger, view: View, intents: tuple[Intent, ...], since_s: float) -> dict[int, GroupRun]:
    """Update the ledger with Slurm's records."""
    starts = groups_by_pilot(intents)
    pilots = {job.job_id for job in view.having(Role.PILOT)}
    begun = {pilot for pilot, intent in starts.items() if intent.state != "abandoned" and intent.begun_s >= since_s}
    runs = {pilot: ledger.get(pilot, GroupRun(pilot)) for pilot in sorted({*ledger, *pilots, *begun})}
    return {pilot: _group(run, view, starts.get(pilot)) for pilot, run in runs.items()}


def _group(run: GroupRun, view: View, start: Intent | None) -> GroupRun:
    pilot = view.jobs.get(run.pilot)
    known = {member.job_id: member for member in run.members}
    for planned in start.payload["members"] if start is not None else ():
        job_id, speed = int(planned["job_id"]), float(planned.get("speed") or 0.0)
        solo_s = 0.0 if planned.get("estimated") else float(planned.get("solo_iteration_s") or 0.0)
        known.setdefault(job_id, MemberRun(job_id, solo_s, speed))
    for job_id in pilot.pilot_tag.members if pilot is not None and pilot.pilot_tag is not None else ():
        known.setdefault(job_id, MemberRun(job_id))  # the journal was lost
    speeds = None if pilot is None else pilot.reports.speeds
    measured = {job_id: member_report(speeds, job_id) for job_id in known}
    members = (
        _member(replace(member, measured=measured[member.job_id] or member.measured), run, view)
        for member in known.values()
    )
    return replace(run if pilot is None else _with_pilot(run, pilot), members=tuple(members))


def _with_pilot(run: GroupRun, pilot: ManagedJob) -> GroupRun:
    run = replace(run, gpu_count=pilot.gpu_count or run.gpu_count, start_s=pilot.start_s or run.start_s)
    if pilot.state is JobState.PENDING:
        return replace(run, start_s=0.0)  # Slurm shows when it expects to start it
    if pilot.state.is_active or run.end:
        return run
    fault = pilot.reports.fault
    return replace(run, end_s=pilot.end_s, end="gpu-error" if fault and fault.culprits else pilot.state.lower())


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
    """Close a run without a report: the member goes on elsewhere, and how much it has to repeat is unknown."""
    end_s = now_s if member.start_s else 0.0
    return replace(member, end_s=end_s, standing=Standing.CLOSED)


def _member_ended(member: MemberRun, job: Job) -> MemberRun:
    if not job.start_s or job.end_s <= job.start_s:
        return replace(member, standing=Standing.CLOSED)  # canceled before it ran
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
    """Return jobs that slurmctld has forgotten without a known end; the accounts may have it."""
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
    """Complete the ledger by the accounts' records of forgotten jobs; a job without a record is given up."""
    last = {run.job_id: run for run in runs if run.has_ended}
    wanted = set(lost)

    def completed(member: MemberRun, pilot: int) -> MemberRun:
        if member.job_id not in wanted:
            return member
        run = last.get(member.job_id)
        if run is None or run.pilot != pilot or run.end_s <= run.start_s:
            return _left(member, now_s)
        return replace(member, start_s=float(run.start_s), end_s=float(run.end_s), admin_comment=run.admin_comment)

    groups: dict[int, GroupRun] = {}
    for pilot, group in ledger.items():
        members = tuple(completed(member, pilot) for member in group.members)
        groups[pilot] = replace(group, members=members)
        if pilot in wanted and (run := last.get(pilot)) is not None:
            start_s, end_s = run.span
            groups[pilot] = replace(
                groups[pilot], gpu_count=run.gpu_count, start_s=start_s, end_s=end_s, end=run.state.lower()
            )
        elif pilot in wanted:
            groups[pilot] = replace(groups[pilot], end_s=now_s, end="unknown")
    return groups
