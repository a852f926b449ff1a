"""Who used the GPUs and what sharing saved, from Slurm's accounting records. Pure.

A member's own record holds no GPU: the pilot job of its group holds it. So the pilot jobs' GPU time is split among
their members.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.job_report import SharingReport, Span, parse_report, partners_of, split_gpu_time
from muri.slurm_plugin.records.submission import parse_request

_NOT_ENDED: Final = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING"}

_REQUEUED: Final = "REQUEUED"
"""How a run ended that was not the job's last one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job, as `sacct` tells it; a requeued job has a record for each of its runs.

    Attributes:
        job_id: Job id.
        user: Owner.
        account: Account that it is billed to.
        qos: Its QOS.
        state: Slurm's word for how it ended, or how it is.
        submit_s: When it was submitted, or went back to the queue; seconds since the epoch.
        start_s: When it started; 0 before.
        end_s: When it ended; 0 before.
        elapsed_s: How long it ran, without suspensions.
        gpu_count: GPUs that it held.
        admin_comment: Its AdminComment at its end.
        task: Of a job array's task how Slurm shows it, "12_3"; "" for other jobs.
    """

    job_id: int
    user: str
    account: str
    qos: str
    state: str
    submit_s: int
    start_s: int
    end_s: int
    elapsed_s: int
    gpu_count: int
    admin_comment: str = ""
    task: str = ""

    @property
    def shown_id(self) -> str:
        """Its id as Slurm's commands show and take it."""
        return self.task or str(self.job_id)

    @property
    def calls_muri(self) -> bool:
        """Whether its batch script may call `muri run` itself."""
        return tags.token(self.admin_comment, tags.CALLS_PREFIX) != "no"

    @property
    def gpu_s(self) -> float:
        """GPU-seconds that its record is billed for."""
        return float(self.gpu_count * self.elapsed_s)

    @property
    def has_ended(self) -> bool:
        """Whether it ended, after it had started."""
        return self.state not in _NOT_ENDED and bool(self.start_s and self.end_s)

    @property
    def span(self) -> Span:
        """From when to when it ran; without an end while it runs."""
        return float(self.start_s), float(self.end_s) if self.has_ended else math.inf

    @property
    def pilot(self) -> int | None:
        """The pilot job of the group in which it ran, None where it ran alone."""
        state = tags.parse_state(self.admin_comment)
        if state is not None:
            return state.pilot
        report = parse_report(self.admin_comment)
        return None if report is None else report.pilot

    @property
    def held_for(self) -> tuple[int, ...] | None:
        """Of a pilot job: its members; None of others."""
        pilot_tag = tags.parse_pilot(self.admin_comment)
        return None if pilot_tag is None else pilot_tag.members

    @property
    def is_own(self) -> bool:
        """Whether it is a job of Muri's own: a pilot job or a dry run."""
        own = (tags.PILOT_PREFIX, tags.DRY_RUN_PREFIX)
        return any(tags.token(self.admin_comment, prefix) is not None for prefix in own)

    @property
    def model(self) -> str:
        """The model that its user named, "" for none."""
        request = parse_request(self.admin_comment)
        return "" if request is None else request.model


@dataclass(frozen=True, slots=True)
class JobUse:
    """What one run of a user's job got and did.

    Attributes:
        run: Slurm's record.
        gpu_s: GPU-seconds that it had: its own, or its share of its group's.
        shared: What is known of its run in a group; None where it ran alone.
        group_gpu_count: GPUs of its group, or its own.
        partners: Those that ran on its GPUs at some time of its run, by job id: how Slurm shows them.
        awaits_report: Whether its group runs on and has not told of it yet: its GPU time is not known.
    """

    run: Run
    gpu_s: float
    shared: SharingReport | None = None
    group_gpu_count: int = 0
    partners: Mapping[int, str] = field(default_factory=dict)
    awaits_report: bool = False

    @property
    def grouped(self) -> bool:
        """Whether it shared its GPUs, and was not alone behind its pilot job all the time."""
        return bool(self.partners)

    @property
    def saved_gpu_s(self) -> float | None:
        """GPU-seconds that sharing saved, negative where it cost some; None where it did not, or none was counted."""
        if not self.grouped or self.shared is None or not self.shared.is_counted:
            return None
        return self.shared.alone_gpu_s - self.gpu_s


def missing_runs(runs: Iterable[Run]) -> set[int]:
    """Return jobs whose records are needed to split GPU time and are not among these: members and pilot jobs."""
    known: set[int] = set()
    needed: set[int] = set()
    for run in runs:
        known.add(run.job_id)
        needed |= {run.pilot or run.job_id} if run.held_for is None else set(run.held_for)
    return needed - known


def uses_of(runs: Iterable[Run]) -> list[JobUse]:
    """Return what the runs of users' jobs got, in the order of the records; Muri's own jobs only pass GPU time on."""
    records = list(runs)
    groups = _groups(records)
    names = {run.job_id: run.shown_id for run in records}
    return [_use(run, groups, names) for run in records if run.has_ended and not run.is_own]


@dataclass(frozen=True, slots=True)
class _Group:
    """A pilot job that has started, its members' runs, and their shares of its GPU time once it has ended."""

    pilot: Run
    spans: Mapping[int, Span]
    gpu_s: Mapping[int, float]


def _groups(records: Iterable[Run]) -> dict[int, _Group]:
    """The groups among some records, by pilot job."""
    members: dict[int, dict[int, Span]] = {}
    pilots: dict[int, Run] = {}
    for run in records:
        if run.held_for is not None and run.start_s:
            pilots[run.job_id] = run
        elif run.pilot is not None and run.start_s:
            members.setdefault(run.pilot, {})[run.job_id] = run.span
    return {pilot: _group(run, members.get(pilot, {})) for pilot, run in pilots.items()}


def _group(pilot: Run, spans: Mapping[int, Span]) -> _Group:
    return _Group(pilot, spans, split_gpu_time(pilot.gpu_count, pilot.span, spans) if pilot.has_ended else {})


def _use(run: Run, groups: Mapping[int, _Group], names: Mapping[int, str]) -> JobUse:
    if run.pilot is None:
        return JobUse(run, run.gpu_s, group_gpu_count=run.gpu_count)
    report = parse_report(run.admin_comment)
    if report is not None and report.pilot != run.pilot:
        report = None
    told = report or SharingReport(run.pilot, 0, 0.0)
    group = groups.get(run.pilot)
    if group is None:
        return JobUse(run, told.gpu_s, report, told.gpu_count, _named(told.partners, names))
    gpu_s = group.gpu_s.get(run.job_id, told.gpu_s)
    # One that has left the group since is known to the report alone.
    left = tuple(each for each in told.partners if each not in group.spans)
    beside = partners_of(run.job_id, run.span, group.spans) + left
    awaits = report is None and not group.pilot.has_ended
    return JobUse(run, gpu_s, report, group.pilot.gpu_count, _named(beside, names), awaits)


def _named(job_ids: Iterable[int], names: Mapping[int, str]) -> dict[int, str]:
    return {each: names.get(each, str(each)) for each in job_ids}


@dataclass(frozen=True, slots=True)
class Payer:
    """Whose jobs a line of the table sums."""

    user: str
    account: str
    qos: str


@dataclass(slots=True)
class Sums:
    """What one payer's jobs used.

    Attributes:
        jobs: Jobs with GPUs that ended.
        grouped: Of these, jobs that shared their GPUs.
        billed_gpu_s: GPU-seconds of their records, pilot jobs and dry runs included.
        credited_gpu_s: GPU-seconds that the jobs had: their own, or their shares of pilot jobs.
        left_out: Of the grouped jobs, those whose time alone is an estimate or not known; the next two leave them out.
        alone_gpu_s: Predicted GPU-seconds alone of the other grouped jobs.
        saved_gpu_s: What sharing saved these, negative where it cost.
    """

    jobs: int = 0
    grouped: int = 0
    left_out: int = 0
    billed_gpu_s: float = 0.0
    credited_gpu_s: float = 0.0
    alone_gpu_s: float = 0.0
    saved_gpu_s: float = 0.0


def table_of(runs: Iterable[Run], period: Span) -> dict[Payer, Sums]:
    """Sum the runs that ended in a period by user, account and QOS, in alphabetical order.

    Args:
        runs: Slurm's records, those outside the period included.
        period: From when to before when, seconds since the epoch.
    """
    records = list(runs)
    sums: dict[Payer, Sums] = {}

    def of(run: Run) -> Sums:
        return sums.setdefault(Payer(run.user, run.account, run.qos), Sums())

    for run in (run for run in records if _within(run, period) and run.gpu_count):
        of(run).billed_gpu_s += run.gpu_s
    jobs: dict[int, JobUse] = {}
    for use in uses_of(records):
        if ended_within(use, period):
            _add(of(use.run), use)
            if use.run.state != _REQUEUED:
                jobs[use.run.job_id] = use
    for use in jobs.values():  # a job that was started again after its node failed counts once, too
        of(use.run).jobs += 1
        of(use.run).grouped += use.grouped
        of(use.run).left_out += use.grouped and use.saved_gpu_s is None
    return dict(sorted(sums.items(), key=lambda item: (item[0].user, item[0].account, item[0].qos)))


def ended_within(use: JobUse, period: Span) -> bool:
    """Whether a run that had GPU time, or was to share some, ended in a period."""
    return _within(use.run, period) and bool(use.gpu_s or use.run.pilot is not None)


def _within(run: Run, period: Span) -> bool:
    return run.has_ended and period[0] <= run.end_s < period[1]


def _add(sums: Sums, use: JobUse) -> None:
    sums.credited_gpu_s += use.gpu_s
    saved_gpu_s = use.saved_gpu_s
    if use.shared is not None and saved_gpu_s is not None:
        sums.alone_gpu_s += use.shared.alone_gpu_s
        sums.saved_gpu_s += saved_gpu_s
