"""When jobs were submitted at first. Pure.

Slurm sets a job's submit time anew each time the job goes back to the queue. Orders by submit time, and Themis's
finish-time fairness ρ, count from the first time: otherwise whoever was stopped would go last, and ρ fall below 1.
"""

from collections.abc import Iterator, Mapping

from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import ManagedJob, Role, View

_MURIS = (Role.CANDIDATE, Role.USER_HELD, Role.NOT_OURS, Role.MEMBER, Role.RELEASED)


def first_submits(known: Mapping[int, float], view: View) -> dict[int, float]:
    """Return the first submit times of Muri's jobs that run or ran before, seconds since the epoch, by job id.

    Args:
        known: As the last cycle left them.
        view: What Slurm shows.
    """
    return {job.job_id: known.get(job.job_id, job.submit_s) for job in _present(view) if _is_worth_it(job, known)}


def _present(view: View) -> Iterator[ManagedJob]:
    for role in _MURIS:
        yield from view.having(role)


def _is_worth_it(job: ManagedJob, known: Mapping[int, float]) -> bool:
    """A job that waits for its first run has its own submit time, and one that ran unseen has lost it."""
    return job.job_id in known or (job.state is JobState.RUNNING and not job.restart_count)
