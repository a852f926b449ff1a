"""What sharing a GPU did for one job: the word `muri-report:…` in its AdminComment, and how GPU time is split.

Pure. The word holds what Slurm's own records do not have; times and states are theirs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from muri.profiler import figures
from muri.profiler.records import STAGES
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
"""Where the time alone comes from: iterations done × the measured profile's iteration time, or an estimate, run time ×
the planned speed, or nothing is known."""


@dataclass(frozen=True, slots=True)
class SharingReport:
    """What is known of one member's run in a group that Slurm's records do not tell.

    Attributes:
        pilot: The group's pilot job.
        gpu_count: GPUs that the group shared.
        gpu_s: Its share of the pilot job's GPU time.
        alone_s: Predicted seconds of the same training alone; 0 when not known.
        basis: Where `alone_s` comes from.
        iterations: Iterations done, 0 when not known.
        partners: Job ids of the members that ran at some time of its run, the first few.
        stage_s: Seconds of an iteration in each stage, in the order of `STAGES`; () when not known.
        wait_s: Seconds of an iteration waiting for each stage's resource; () when not known.
    """

    pilot: int
    gpu_count: int
    gpu_s: float
    alone_s: float = 0.0
    basis: Basis = ""
    iterations: int = 0
    partners: tuple[int, ...] = ()
    stage_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()

    @property
    def alone_gpu_s(self) -> float:
        """Predicted GPU-seconds of the same training alone; 0 when not known."""
        return self.gpu_count * self.alone_s

    @property
    def is_counted(self) -> bool:
        """Whether its time alone was counted: an estimate enters no sum."""
        return self.basis == "iterations" and bool(self.iterations)


def with_report(admin_comment: str, report: SharingReport) -> str:
    """Return an ended job's AdminComment with a report in place of what is of no use any more.

    None of Muri's words in it holds a quote: sacctmgr makes backquotes of them.
    """
    for prefix in (tags.STATE_PREFIX, tags.GIVEN_PREFIX):
        admin_comment = tags.with_token(admin_comment, prefix, None)
    return tags.with_token(admin_comment, REPORT_PREFIX, _format(report))


def _format(report: SharingReport) -> str:
    words = {
        "pilot": report.pilot,
        "gpus": report.gpu_count,
        "gpu_s": f"{report.gpu_s:.1f}",
        "alone_s": f"{report.alone_s:.1f}" if report.basis else "",
        "by": report.basis,
        "n": report.iterations or "",
        "with": "+".join(map(str, report.partners[:_MOST_PARTNERS])),
        "held": _numbers(report.stage_s),
        "wait": _numbers(report.wait_s),
    }
    return ",".join((_VERSION, *(f"{name}={value}" for name, value in words.items() if value != "")))


def _numbers(values: tuple[float, ...]) -> str:
    return "/".join(f"{value:.4g}" for value in values)


def parse_report(admin_comment: str) -> SharingReport | None:
    """Read the report in an AdminComment; None when there is none, or it cannot be read."""
    version, _, text = (tags.token(admin_comment, REPORT_PREFIX) or "").partition(",")
    if version != _VERSION:
        return None
    words = dict(word.partition("=")[::2] for word in text.split(","))
    try:
        report = _read(words)
    except (KeyError, ValueError):
        return None
    return report if _can_be_true(report) else None


def _read(words: Mapping[str, str]) -> SharingReport:
    known: dict[str, Basis] = {"iterations": "iterations", "plan": "plan"}
    basis = known.get(words.get("by", ""), "")
    return SharingReport(
        pilot=int(words["pilot"]),
        gpu_count=int(words["gpus"]),
        gpu_s=float(words["gpu_s"]),
        alone_s=float(words["alone_s"]) if basis else 0.0,
        basis=basis,
        iterations=int(words.get("n", 0)),
        partners=tuple(int(each) for each in words.get("with", "").split("+") if each),
        stage_s=_floats(words.get("held", "")),
        wait_s=_floats(words.get("wait", "")),
    )


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split("/") if each)


def _can_be_true(report: SharingReport) -> bool:
    times = (*report.stage_s, *report.wait_s)
    whole = {len(report.stage_s), len(report.wait_s)} <= {0, len(STAGES)}
    bounded = 0 <= report.gpu_s <= _MOST_GPU_S and 0 <= report.alone_s <= _MOST_GPU_S
    return whole and bounded and not any(figures.TIME_S.fault(value) for value in times)


def alone_s(ran_s: float, speed: float, solo_iteration_s: float, measured: MemberReport | None) -> tuple[float, Basis]:
    """Return how long a member's run would have taken alone, 0 when that is not known, and where it comes from.

    Args:
        ran_s: How long it ran.
        speed: Planned speed, 1 = as fast as alone; 0 when not known.
        solo_iteration_s: Iteration time alone, from its profile; 0 when that was not measured.
        measured: What the runtime last reported of it.
    """
    if measured is not None and measured.iterations and solo_iteration_s:
        counted_s = measured.iterations * solo_iteration_s
        if counted_s <= _MOST_OF_RUN * ran_s:
            return counted_s, "iterations"
    return (ran_s * speed, "plan") if speed else (0.0, "")


Span = tuple[float, float]
"""From when to when, in seconds since the epoch."""


def split_gpu_time(gpu_count: int, pilot: Span, members: Mapping[int, Span]) -> dict[int, float]:
    """Split a pilot job's GPU time among its members.

    At each moment it goes in equal parts to the members that run. While none runs it goes to those that start next,
    and after the last one's end to those that ran last.

    Args:
        gpu_count: GPUs of the pilot job.
        pilot: When it ran.
        members: When each member ran, by job id.

    Returns:
        GPU-seconds by job id; their sum is all that the pilot job had, unless no member ran.
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
    """Return the members that ran at some time of one's run.

    Args:
        job_id: The one.
        span: When it ran.
        members: When each member ran, by job id.
    """
    return tuple(each for each, (start, end) in members.items() if each != job_id and start < span[1] and span[0] < end)


def _running(runs: Mapping[int, Span], moment_s: float) -> list[int]:
    return [job_id for job_id, (start, end) in runs.items() if start <= moment_s < end]


def _next(runs: Mapping[int, Span], moment_s: float) -> list[int]:
    first = min((start for start, _ in runs.values() if start > moment_s), default=None)
    return [job_id for job_id, (start, _) in runs.items() if start == first]


def _last(runs: Mapping[int, Span]) -> list[int]:
    last = max((end for _, end in runs.values()), default=None)
    return [job_id for job_id, (_, end) in runs.items() if end == last]
