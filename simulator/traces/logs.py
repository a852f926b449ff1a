"""From a cluster's log to a trace: times from the first submission, profiles by a seeded assignment."""

from collections.abc import Sequence
from datetime import UTC, datetime

from muri.simulator.model import TraceJob
from muri.simulator.traces.assignment import Assignment
from muri.simulator.traces.formats import LoggedJob
from muri.simulator.traces.problems import RowError
from muri.simulator.traces.tables import MAX_COUNT, to_number

NOT_ENDED = "had not ended"
NEVER_RAN = "never ran"
NO_GPUS = "had no GPUs"
"""Why a row of a log is no job to simulate."""

UNKNOWN_TIMES = frozenset({"", "None", "Unknown", "N/A", "nan", "NaN", "null"})
"""How logs write that something has not happened."""


def to_trace_jobs(logged: Sequence[LoggedJob], assignment: Assignment) -> list[TraceJob]:
    """Give each job of a log a profile and a number.

    Ids that are numbers stay; otherwise jobs are numbered from 0 by submit time, ties in the log's order.
    Iterations are the time run over the profile's iteration time, at least one.

    Args:
        logged: The jobs, ids unique.
        assignment: Gives them profiles.

    Returns:
        The jobs by submit time, then id.
    """
    keep_ids = all(_is_number(job.job_id) for job in logged)
    ordered = sorted(logged, key=lambda job: (job.submit_s, int(job.job_id) if keep_ids else 0))
    first_s = ordered[0].submit_s if ordered else 0.0
    return [
        _trace_job(job, int(job.job_id) if keep_ids else number, first_s, assignment)
        for number, job in enumerate(ordered)
    ]


def _is_number(job_id: str) -> bool:
    digits = job_id.isascii() and job_id.isdigit() and len(job_id) <= len(str(MAX_COUNT))
    return digits and int(job_id) <= MAX_COUNT and str(int(job_id)) == job_id


def _trace_job(job: LoggedJob, number: int, first_s: float, assignment: Assignment) -> TraceJob:
    profile = assignment.profile(job.rerun_key, job.gpu_count, job.job_name)
    return TraceJob(
        job_id=number,
        submit_s=job.submit_s - first_s,
        gpu_count=job.gpu_count,
        iterations=max(1, round(job.run_s / profile.iteration_s)),
        profile=profile,
        user=job.user or "user",
        listed_duration_s=job.run_s,
        cpu_count=job.cpu_count,
        mem_gib=job.mem_gib,
    )


def to_time(column: str, text: str) -> float | None:
    """Seconds since the epoch of a time in a log; None where it says that there is none.

    Times without a zone are read as if they were UTC: only differences count.

    Args:
        column: The cell's column, for the message.
        text: "2017-10-07 01:11:39", the same with T, or seconds.

    Returns:
        Seconds.

    Raises:
        RowError: It is no time.
    """
    text = text.strip()
    if text in UNKNOWN_TIMES:
        return None
    if text.isascii() and text.isdigit():
        return to_number(column, text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RowError(column, f"{text!r} is no time such as 2026-01-31 12:00:00") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
