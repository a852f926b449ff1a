"""GPU use by job and savings by sharing: the reports of members, and Slurm's accounting records. Pure.

A member's own record holds no GPU: the pilot job of its group holds it. So the pilot jobs' GPU time is split among
their members. The word `muri-report:…` in a member's AdminComment holds what Slurm's own records do not have.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from muri.profiler.records import STAGES, TIME_S
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import MemberReport

REPORT_PREFIX: Final = "muri-report:"
"""In an ended member's AdminComment, so that it lands in `sacct`."""

PILOT_REPORTS_AWAITED: Final = 2
"""So many of the pilot job's reports are awaited after a member's end: the last one tells all of its iterations."""

_VERSION: Final = "1"
_MOST_PARTNERS: Final = 8
_MOST_GPU_S: Final = 1e12

_MOST_OF_RUN: Final = 1.2
"""No member trains faster than alone. A profile may be off by that much; iterations that would have taken longer were
not all of this run: `muri run` outlived the batch script, or its user made them up."""

Basis = Literal["iterations", "plan", ""]
"""Source of the time alone: iterations done × the measured profile's iteration time, or an estimate, run time × the
planned speed, or unknown."""


@dataclass(frozen=True, slots=True)
class SharingReport:
    """Facts about one member's run in a group that Slurm's records do not have; 0, "" and () where not known."""

    pilot: int
    gpu_count: int  # GPUs that the group shared
    gpu_s: float  # Its share of the pilot job's GPU time
    alone_s: float = 0.0  # Predicted seconds of the same training alone
    basis: Basis = ""  # Source of `alone_s`
    iterations: int = 0  # Iterations done
    partners: tuple[int, ...] = ()  # Job ids of the members that ran at some time of its run, the first few
    stage_s: tuple[float, ...] = ()  # Seconds of an iteration in each stage, in the order of `STAGES`
    wait_s: tuple[float, ...] = ()  # Seconds of an iteration waiting for each stage's resource

    @property
    def alone_gpu_s(self) -> float:
        """Predicted GPU-seconds of the same training alone; 0 when not known."""
        return self.gpu_count * self.alone_s

    @property
    def is_counted(self) -> bool:
        """Whether its time alone was counted: an estimate enters no sum."""
        return self.basis == "iterations" and bool(self.iterations)


def with_report(admin_comment: str, report: SharingReport) -> str:
    """Return an ended job's AdminComment with a report in place of its member's tags.

    None of Muri's words in it holds a quote: sacctmgr makes backquotes of them.
    """
    for prefix in (tags.STATE_PREFIX, tags.GRANT_PREFIX, tags.GIVEN_PREFIX):
        admin_comment = tags.with_token(admin_comment, prefix, None)
    words = {
        "pilot": report.pilot,
        "gpus": report.gpu_count,
        "gpu_s": f"{report.gpu_s:.1f}",
        "alone_s": f"{report.alone_s:.1f}" if report.basis else "",
        "by": report.basis,
        "n": report.iterations or "",
        "with": "+".join(map(str, report.partners[:_MOST_PARTNERS])),
        "held": "/".join(f"{value:.4g}" for value in report.stage_s),
        "wait": "/".join(f"{value:.4g}" for value in report.wait_s),
    }
    text = ",".join((_VERSION, *(f"{name}={value}" for name, value in words.items() if value != "")))
    return tags.with_token(admin_comment, REPORT_PREFIX, text)


def parse_report(admin_comment: str) -> SharingReport | None:
    """Read the report in an AdminComment; None when there is none, or it cannot be read."""
    version, _, text = (tags.token(admin_comment, REPORT_PREFIX) or "").partition(",")
    if version != _VERSION:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    known: dict[str, Basis] = {"iterations": "iterations", "plan": "plan"}
    basis = known.get(words.get("by", ""), "")
    try:
        report = SharingReport(
            pilot=int(words["pilot"]),
            gpu_count=int(words["gpus"]),
            gpu_s=float(words["gpu_s"]),
            alone_s=float(words["alone_s"]) if basis else 0.0,
            basis=basis,
            iterations=int(words.get("n", 0)),
            partners=tuple(int(each) for each in words.get("with", "").split("+") if each),
            stage_s=tuple(float(each) for each in words.get("held", "").split("/") if each),
            wait_s=tuple(float(each) for each in words.get("wait", "").split("/") if each),
        )
    except (KeyError, ValueError):
        return None
    whole = {len(report.stage_s), len(report.wait_s)} <= {0, len(STAGES)}
    bounded = 0 <= report.gpu_s <= _MOST_GPU_S and 0 <= report.alone_s <= _MOST_GPU_S
    faults = any(TIME_S.fault(value) for value in (*report.stage_s, *report.wait_s))
    return report if whole and bounded and not faults else None


def alone_s(ran_s: float, speed: float, solo_iteration_s: float, measured: MemberReport | None) -> tuple[float, Basis]:
    """Return how long a member's run would have taken alone, 0 when that is not known, and the source.

    Args:
        ran_s: How long it ran.
        speed: Planned speed, 1 = as fast as alone; 0 when not known.
        solo_iteration_s: Iteration time alone, from its profile; 0 when that was not measured.
        measured: The runtime's last report of it.
    """
    if measured is not None and measured.iterations and solo_iteration_s:
        counted_s = measured.iterations * solo_iteration_s
        if counted_s <= _MOST_OF_RUN * ran_s:
            return counted_s, "iterations"
    return (ran_s * speed, "plan") if speed else (0.0, "")


Span = tuple[float, float]
"""A begin and an end, in seconds since the epoch."""


def split_gpu_time(gpu_count: int, pilot: Span, members: Mapping[int, Span]) -> dict[int, float]:
    """Split a pilot job's GPU time among its members, all by job id.

    At each moment it goes in equal parts to the members that run. While none runs it goes to those that start next,
    and after the last one's end to those that ran last.

    Returns:
        GPU-seconds; their sum is all that the pilot job had, unless no member ran.
    """
    begin_s, end_s = pilot
    runs = {job_id: (max(start, begin_s), min(end, end_s)) for job_id, (start, end) in members.items()}
    runs = {job_id: span for job_id, span in runs.items() if span[0] < span[1]}
    gpu_s = dict.fromkeys(members, 0.0)
    moments = sorted({begin_s, end_s, *(moment for span in runs.values() for moment in span)})
    for start, end in pairwise(moments):
        served = _running(runs, start) or _next(runs, start) or _last(runs)
        for job_id in served:
            gpu_s[job_id] += gpu_count * (end - start) / len(served)
    return gpu_s


def partners_of(job_id: int, span: Span, members: Mapping[int, Span]) -> tuple[int, ...]:
    """Return the other members that ran at some time of one's run."""
    return tuple(each for each, (start, end) in members.items() if each != job_id and start < span[1] and span[0] < end)


def _running(runs: Mapping[int, Span], moment_s: float) -> list[int]:
    return [job_id for job_id, (start, end) in runs.items() if start <= moment_s < end]


def _next(runs: Mapping[int, Span], moment_s: float) -> list[int]:
    first = min((start for start, _ in runs.values() if start > moment_s), default=None)
    return [job_id for job_id, (start, _) in runs.items() if start == first]


def _last(runs: Mapping[int, Span]) -> list[int]:
    last = max((end for _, end in runs.values()), default=None)
    return [job_id for job_id, (_, end) in runs.items() if end == last]


_NOT_ENDED: Final = {"PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "RESIZING"}

_REQUEUED: Final = "REQUEUED"
"""State of a run that was not the job's last one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job in `sacct`; a requeued job has a record for each. Times are seconds since the epoch."""

    job_id: int
    user: str
    account: str
    qos: str
    state: str  # Slurm's word
    submit_s: int  # When it was submitted, or went back to the queue
    start_s: int  # 0 before
    end_s: int  # 0 before
    elapsed_s: int  # Run time without suspensions
    gpu_count: int
    admin_comment: str = ""  # At its end
    task: str = ""  # Name of a job array's task, "12_3"; "" for other jobs

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
        """Its start and end; infinity while it runs."""
        return float(self.start_s), float(self.end_s) if self.has_ended else math.inf

    @property
    def pilot(self) -> int | None:
        """The pilot job of the group in which it ran, None where it ran alone."""
        member = tags.parse_state(self.admin_comment) or parse_report(self.admin_comment)
        return None if member is None else member.pilot

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
        request = tags.parse_request(self.admin_comment)
        return "" if request is None else request.model


@dataclass(frozen=True, slots=True)
class JobUse:
    """The GPU time of one run of a user's job."""

    run: Run
    gpu_s: float  # Its own GPU-seconds, or its share of its group's
    shared: SharingReport | None = None  # None where it ran alone
    group_gpu_count: int = 0  # GPUs of its group, or its own
    partners: Mapping[int, str] = field(default_factory=dict)
    """Those that ran on its GPUs at some time of its run: job id and Slurm's name."""
    awaits_report: bool = False  # Its group still runs and has not reported it yet, so its GPU time is not known

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
    """Return jobs whose records are needed to split GPU time and are missing: members and pilot jobs."""
    known: set[int] = set()
    needed: set[int] = set()
    for run in runs:
        known.add(run.job_id)
        needed |= {run.pilot or run.job_id} if run.held_for is None else set(run.held_for)
    return needed - known


def uses_of(runs: Iterable[Run]) -> list[JobUse]:
    """Return the use of users' jobs, in the order of the records; Muri's own jobs only pass GPU time on."""
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
    """Return the groups among some records, by pilot job."""
    members: dict[int, dict[int, Span]] = {}
    pilots: dict[int, Run] = {}
    for run in records:
        if run.held_for is not None and run.start_s:
            pilots[run.job_id] = run
        elif run.pilot is not None and run.start_s:
            members.setdefault(run.pilot, {})[run.job_id] = run.span
    found = ((run, members.get(job_id, {})) for job_id, run in pilots.items())
    return {
        run.job_id: _Group(run, spans, split_gpu_time(run.gpu_count, run.span, spans) if run.has_ended else {})
        for run, spans in found
    }


def _use(run: Run, groups: Mapping[int, _Group], names: Mapping[int, str]) -> JobUse:
    if run.pilot is None:
        return JobUse(run, run.gpu_s, group_gpu_count=run.gpu_count)
    report = parse_report(run.admin_comment)
    if report is not None and report.pilot != run.pilot:
        report = None
    known = report or SharingReport(run.pilot, 0, 0.0)
    gpu_s, gpu_count, beside, awaits = known.gpu_s, known.gpu_count, known.partners, False
    if (group := groups.get(run.pilot)) is not None:
        gpu_s, gpu_count = group.gpu_s.get(run.job_id, gpu_s), group.pilot.gpu_count
        # Only the report knows members that have left the group since.
        left = tuple(each for each in known.partners if each not in group.spans)
        beside = partners_of(run.job_id, run.span, group.spans) + left
        awaits = report is None and not group.pilot.has_ended
    return JobUse(run, gpu_s, report, gpu_count, {each: names.get(each, str(each)) for each in beside}, awaits)


@dataclass(frozen=True, order=True, slots=True)
class Payer:
    """The owner of the jobs that a line of the table sums."""

    user: str
    account: str
    qos: str


@dataclass(slots=True)
class Sums:
    """The use of one payer's jobs."""

    jobs: int = 0  # Jobs with GPUs that ended
    grouped: int = 0  # Of these, jobs that shared their GPUs
    left_out: int = 0
    """Of the grouped jobs, those whose time alone is an estimate or not known; `alone_gpu_s` and `saved_gpu_s` leave
    them out."""
    billed_gpu_s: float = 0.0  # GPU-seconds of their records, pilot jobs and dry runs included
    credited_gpu_s: float = 0.0  # GPU-seconds of the jobs' own, or their shares of pilot jobs
    alone_gpu_s: float = 0.0  # Predicted GPU-seconds alone
    saved_gpu_s: float = 0.0  # GPU-seconds saved by sharing, negative where it cost some


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
            of(use.run).credited_gpu_s += use.gpu_s
            if use.shared is not None and use.saved_gpu_s is not None:
                of(use.run).alone_gpu_s += use.shared.alone_gpu_s
                of(use.run).saved_gpu_s += use.saved_gpu_s
            if use.run.state != _REQUEUED:
                jobs[use.run.job_id] = use
    for use in jobs.values():  # a job that was started again after its node failed counts once, too
        of(use.run).jobs += 1
        of(use.run).grouped += use.grouped
        of(use.run).left_out += use.grouped and use.saved_gpu_s is None
    return dict(sorted(sums.items(), key=lambda item: item[0]))


def ended_within(use: JobUse, period: Span) -> bool:
    """Whether a run that had GPU time, or was to share some, ended in a period."""
    return _within(use.run, period) and bool(use.gpu_s or use.run.pilot is not None)


def _within(run: Run, period: Span) -> bool:
    return run.has_ended and period[0] <= run.end_s < period[1]
