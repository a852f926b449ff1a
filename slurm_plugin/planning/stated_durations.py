"""How far users' stated durations are believed: as far as those of their earlier jobs held. Pure.

Orders by remaining time would let a job of `duration=1s` overtake everybody's, however long it runs. So it
counts what a user's last jobs that stated a duration have taken, those that run included: how many times as long as
stated, weighed by GPU time, so that short jobs with true durations cover no long ones. Jobs of the same model weigh
more, but a fresh name has the record of its user.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import Any, Final

from muri.policies.options import MAX_GROUP_SIZE
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import member_report
from muri.slurm_plugin.records.comment_tags import Planned
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, profile_key
from muri.slurm_plugin.records.usage import alone_s

_TOLERANCE: Final = 1.1
_START_UP_S: Final = 60.0
"""A job that took a tenth longer than stated, and a minute to start up, was as long as stated; jobs of up to a minute
say nothing."""

_KEPT: Final = 16
_KEPT_S: Final = 90 * 86400.0
"""So many jobs of a user are remembered, and so long."""

_SAME_MODEL: Final = 4.0
"""So many times does a job of the same model weigh what another of its user's weighs."""

_SHARE: Final = 0.25
"""Of the GPU time: as long as less of it overran, that was an accident."""

_DIGEST_BYTES: Final = 6


@dataclass(frozen=True, slots=True)
class Claim:
    """What one job has shown of the duration that it stated.

    Attributes:
        job_id: The job.
        model: Digest of its model's name.
        times: How many times as long as stated it took; 1 where it kept to it.
        gpu_s: GPU-seconds that it took; 0 where nothing can be said, because Slurm has suspended it.
        start_s: When the run began, seconds since the epoch.
    """

    job_id: int
    model: str
    times: float
    gpu_s: float
    start_s: float

    @classmethod
    def of(cls, fact: Sequence[Any]) -> "Claim":
        """Read a part of the journal's fact.

        Raises:
            TypeError, ValueError: It is damaged.
        """
        job_id, model, times, gpu_s, start_s = fact
        return cls(int(job_id), str(model), float(times), float(gpu_s), float(start_s))


Claims = Mapping[str, tuple[Claim, ...]]
"""By user, the oldest job first."""


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a job is expected to run alone.

    Attributes:
        stated_s: What its user said.
        times: How many times as long it is taken to run, by its user's earlier jobs; 1 at least.
        most_s: Its own time limit.
    """

    stated_s: int
    times: float
    most_s: float

    @property
    def seconds(self) -> float:
        """The expectation."""
        return max(float(self.stated_s), min(self.stated_s * self.times, self.most_s))

    @property
    def why(self) -> str:
        """Say for people why a stated duration is taken as a longer one."""
        times = f"{self.times:,.0f}" if self.times >= 10 else f"{self.times:.1f}"
        return (
            f"its duration={self.stated_s}s is taken as {_in_words(self.seconds)}: its user's last jobs, those of "
            f"this model above all, ran {times} times as long as stated"
        )


def _in_words(seconds: float) -> str:
    units = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
    unit_s, unit = next((unit_s, unit) for least_s, unit_s, unit in units if seconds >= least_s)
    return f"{seconds / unit_s:,.0f} {unit}"


def expected(job: ManagedJob, model: str, claims: Sequence[Claim]) -> Expected | None:
    """Return how long a job is expected to run; None where its user did not say.

    Args:
        job: The job.
        model: Its model, as in its profile's key.
        claims: What is known of its user's jobs.
    """
    stated_s, changed = job.request.duration_s, job.membership or job.given
    if stated_s is None:
        return None
    limit_s = job.time_limit_s if changed is None else changed.original.time_limit_s
    return Expected(stated_s, times_of(claims, _digest(model)) if claims else 1.0, limit_s or float("inf"))


def times_of(claims: Sequence[Claim], model: str) -> float:
    """Return how many times as long as stated a job is taken to run: a quarter of the GPU time overran so far.

    Args:
        claims: What is known of its user's jobs.
        model: Its model's digest.
    """
    worst_first = sorted(claims, key=lambda claim: claim.times, reverse=True)
    weights = [claim.gpu_s * (_SAME_MODEL if claim.model == model else 1.0) for claim in worst_first]
    sums = zip(worst_first, accumulate(weights), strict=True)
    return next((claim.times for claim, so_far in sums if so_far >= _SHARE * sum(weights)), 1.0)


def _digest(model: str) -> str:
    return hashlib.blake2b(model.encode("utf-8", "backslashreplace"), digest_size=_DIGEST_BYTES).hexdigest()


def took_s(job: ManagedJob, view: View) -> float:
    """Return how long this run of a job would have taken alone so far; less rather than more where that is not known.

    A member tells its iterations in a comment that its user may write; no group is so slow that it could have done only
    a smaller part of its work.
    """
    end_s = view.snapshot.taken_s if job.state is JobState.RUNNING else min(view.snapshot.taken_s, job.end_s)
    ran_s = max(0.0, end_s - job.start_s)
    if job.membership is None and job.given is None:
        return ran_s
    planned = Planned() if job.planned is None or job.planned.estimated else job.planned
    pilot = None if job.membership is None else view.jobs.get(job.membership.pilot)
    report = None if pilot is None else member_report(pilot.reports.speeds, job.job_id)
    known_s, _ = alone_s(ran_s, planned.speed or 0.0, planned.solo_iteration_s or 0.0, report)
    return min(ran_s, max(known_s, ran_s / MAX_GROUP_SIZE))


def overran(job: ManagedJob, ran_alone_s: float) -> bool:
    """Whether a job that has run for so long alone has taken longer than its user said."""
    stated_s = job.request.duration_s
    return stated_s is not None and ran_alone_s > _TOLERANCE * stated_s + _START_UP_S


def noted(known: Claims, view: View) -> dict[str, tuple[Claim, ...]]:
    """Bring what is remembered up to what Slurm shows.

    A job that ended early without completing says nothing. One that goes on longer than stated says so at once, and
    again whenever that has grown by a tenth.

    Args:
        known: As the last cycle left it.
        view: What Slurm shows now.
    """
    since_s = view.snapshot.taken_s - _KEPT_S
    found = {user: {claim.job_id: claim for claim in claims} for user, claims in known.items()}
    for job in view.jobs.values():
        claim = _claim(job, view)
        if claim is not None:
            of_user = found.setdefault(job.user, {})
            before = of_user.get(job.job_id)
            if before is None or 0 < _TOLERANCE * before.gpu_s < claim.gpu_s:
                of_user[job.job_id] = claim
    kept = {
        user: sorted((claim for claim in claims.values() if claim.start_s > since_s), key=lambda each: each.start_s)
        for user, claims in found.items()
    }
    return {user: tuple(claims[-_KEPT:]) for user, claims in kept.items() if claims}


def _claim(job: ManagedJob, view: View) -> Claim | None:
    """What a job has shown, None for nothing yet."""
    stated_s, began = job.request.duration_s, job.start_s and job.state is not JobState.PENDING
    if stated_s is None or not began or job.role not in {Role.RELEASED, Role.MEMBER}:
        return None
    alone, times, gpu_s = took_s(job, view), 1.0, 0.0
    late, suspended = overran(job, alone), job.state is JobState.SUSPENDED
    if not suspended and not late and (job.state is not JobState.COMPLETED or alone <= _START_UP_S):
        return None
    if not suspended:
        pilot = None if job.membership is None else view.jobs.get(job.membership.pilot)
        gpu_s = alone * max(1, job.gpu_count, 0 if pilot is None else pilot.gpu_count)
        times = (alone - _START_UP_S) / stated_s if late else 1.0
    return Claim(job.job_id, _digest(profile_key(job, view.node_index).model), times, gpu_s, job.start_s)


def facts_of(claims: Claims) -> dict[str, list[tuple[Any, ...]]]:
    """Return what is remembered for the journal, by user."""
    return {user: [astuple(claim) for claim in of_user] for user, of_user in claims.items()}
