"""All that a cycle's decision rests on: the queue, what is known beyond it, and the configuration. Pure.

Slurm sets a job's submit time anew each time the job goes back to the queue. Orders by submit time, and Themis's
finish-time fairness ρ, count from the first time: otherwise jobs that were stopped would go last, and ρ fall below 1.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, Final

from muri.policies.options import MAX_GROUP_SIZE
from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import members_in
from muri.slurm_plugin.planning.model_traits import KnownTraits
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import member_report
from muri.slurm_plugin.records.comment_tags import MemberState, Planned
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import REQUEUED_HELD, ManagedJob, Role, View, profile_key
from muri.slurm_plugin.records.usage import alone_s


@dataclass(frozen=True, slots=True)
class MeasuredPython:
    """The Python that a dry run reported."""

    key: str  # Text of the model's key
    user: str  # The job's owner
    environment: str  # Digest of the environment that the job was submitted in
    python: str  # Path of the Python, "" for that of the site (`node_python`)


@dataclass(frozen=True, slots=True)
class KnownPythons:
    """What dry runs told, by model and by environment."""

    # The directory of the site's Python (`node_python`): who submits with that one first in PATH uses it
    site: str = ""
    _of_model: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    _of_environment: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Iterable[MeasuredPython], node_python: str = "") -> "KnownPythons":
        """Put together what was told."""
        of_model: dict[str, dict[str, str]] = {}
        of_environment: dict[tuple[str, str], frozenset[str]] = {}
        for each in told:
            of_model.setdefault(each.key, {})[each.environment] = each.python
            place = (each.user, each.environment)
            of_environment[place] = of_environment.get(place, frozenset()) | {each.python}
        return cls(str(PurePosixPath(node_python).parent), of_model, of_environment)

    def of_job(self, job: ManagedJob, key: ProfileKey) -> str | None:
        """Return the Python of a job's script.

        Returns:
            Its path; "" for that of the site, also for jobs that tell nothing of their environment; None where only a
            dry run can tell.
        """
        if job.facts is None or not job.facts.environment:
            return ""
        environment, measured = job.facts.environment, self._of_model.get(str(key), {})
        if environment in measured:
            return measured[environment]
        alike = self._of_environment.get((job.user, environment), frozenset())
        if len(alike) == 1:
            return next(iter(alike))
        first = job.facts.python
        is_sites = not first or str(PurePosixPath(first).parent) == self.site
        return "" if is_sites and not measured and not alike else None


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
    """What one job has shown of the duration that it stated."""

    job_id: int  # The job
    model: str  # Digest of its model's name
    times: float  # How many times as long as stated it took; 1 where it kept to it
    gpu_s: float  # GPU-seconds that it took; 0 where nothing can be said, because Slurm has suspended it
    start_s: float  # When the run began, seconds since the epoch

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
    """How long a job is expected to run alone."""

    stated_s: int  # What its user said
    times: float  # How many times as long it is taken to run, by its user's earlier jobs; 1 at least
    most_s: float  # Its own time limit

    @property
    def seconds(self) -> float:
        """The expectation."""
        return max(float(self.stated_s), min(self.stated_s * self.times, self.most_s))

    @property
    def why(self) -> str:
        """Say for people why a stated duration is taken as a longer one."""
        times = f"{self.times:,.0f}" if self.times >= 10 else f"{self.times:.1f}"
        units = ((7200.0, 3600.0, "h"), (120.0, 60.0, "min"), (0.0, 1.0, "s"))
        unit_s, unit = next((unit_s, unit) for least_s, unit_s, unit in units if self.seconds >= least_s)
        taken = f"{self.seconds / unit_s:,.0f} {unit}"
        return (
            f"its duration={self.stated_s}s is taken as {taken}: its user's last jobs, those of this model above all, "
            f"ran {times} times as long as stated"
        )


def times_of(claims: Sequence[Claim], model: str) -> float:
    """Return how many times as long as stated a job is taken to run: a quarter of the GPU time overran so far."""
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


def noted_claims(known: Claims, view: View) -> dict[str, tuple[Claim, ...]]:
    """Bring what is remembered up to what Slurm shows.

    A job that ended early without completing says nothing. One that goes on longer than stated says so at once, and
    again whenever that has grown by a tenth.
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
    """Return the claim that a job has proven, None while it has proven none."""
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


def claim_facts(claims: Claims) -> dict[str, list[tuple[Any, ...]]]:
    """Return what is remembered for the journal, by user."""
    return {user: [astuple(claim) for claim in of_user] for user, of_user in claims.items()}


ATTEMPTS: Final = 2
"""Measurements of a model that may fail before its jobs run alone: one may have met a bad node."""

START_DELAY_S: Final = 5.0
"""Muri's own changes move a job's start by two seconds; only a later start is a delay that its user asked for."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """A cycle's knowledge beyond the snapshot."""

    # Stored profiles of all users, and estimates of models without one. `profile_of` finds a job's.
    profiles: Mapping[ProfileKey, StageProfile]
    profiling: frozenset[ProfileKey] = frozenset()  # Keys that a dry run is measuring now
    dry_run_jobs: frozenset[int] = frozenset()  # Jobs whose script a dry run executes, or is about to; they wait for it
    stale: frozenset[ProfileKey] = frozenset()  # Keys whose profile is in use but is to be measured again
    # Since when those of them are so that have a mark, UTC, ISO-8601
    marked_at: Mapping[ProfileKey, str] = field(default_factory=dict)
    # Attempts to measure that failed and have not expired, by key text: how many, and the last cause
    failures: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # When the last of them did, seconds since the epoch, by key text
    failed_s: Mapping[str, float] = field(default_factory=dict)
    exclusions: Mapping[int, str] = field(default_factory=dict)  # Why a job must not be grouped again, by job id
    # How large a group Slurm lately had room for, and why no larger, by job id
    largest_group: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    # GPU-seconds that a job had in earlier runs, by job id
    served_gpu_s: Mapping[int, float] = field(default_factory=dict)
    # Those of them that a checkpoint has kept, by job id
    saved_gpu_s: Mapping[int, float] = field(default_factory=dict)
    claims: Claims = field(default_factory=dict)  # How far users' last jobs kept to their stated durations
    # When jobs that have run were submitted at first, seconds since the epoch, by job id
    first_submit_s: Mapping[int, float] = field(default_factory=dict)
    traits: KnownTraits = field(default_factory=KnownTraits)  # What is stored of models beyond their stage profiles
    # GPU memory that jobs ask for since they ran out of it, by job id
    gpu_mem_gib: Mapping[int, float] = field(default_factory=dict)
    # Why Slurm lately refused to let jobs go, by job id
    refused_releases: Mapping[int, str] = field(default_factory=dict)
    pythons: KnownPythons = field(default_factory=KnownPythons)  # Which Pythons scripts run under

    def profile_of(self, key: ProfileKey) -> StageProfile | None:
        """Return what is known under a job's key: its user's own profile, else a published one."""
        own = self.profiles.get(key)
        return own if own is not None or not key.user else self.profiles.get(key.published)

    def is_stale(self, key: ProfileKey) -> bool:
        """Whether what is known under a job's key is to be measured again.

        A mark on the published profile counts only for users who have none of their own.
        """
        return key in self.stale or (key not in self.profiles and key.published in self.stale)

    def stale_since(self, key: ProfileKey) -> str:
        """Return since when that is so, UTC, ISO-8601; "" where nothing says so."""
        return next((self.marked_at[each] for each in key.lookup_order if each in self.marked_at), "")

    def expected(self, job: ManagedJob, key: ProfileKey) -> Expected | None:
        """Return how long a job is expected to run alone, None where its user did not say."""
        stated_s, changed = job.request.duration_s, job.membership or job.given
        if stated_s is None:
            return None
        limit_s = job.time_limit_s if changed is None else changed.original.time_limit_s
        claims = self.claims.get(job.user, ())
        return Expected(stated_s, times_of(claims, _digest(key.model)) if claims else 1.0, limit_s or float("inf"))

    def failed(self, key: ProfileKey) -> str:
        """Return why a model is not profiled any more, "" when it still may be."""
        if not self.failures:
            return ""
        # Earlier versions counted the failures of all users together, under the published key's text.
        found = (self.failures.get(str(each), (0, "")) for each in key.lookup_order)
        return next((why for count, why in found if count >= ATTEMPTS), "")


@dataclass(frozen=True, slots=True)
class CycleInput:
    """What one cycle decides on."""

    view: View  # The queue and the nodes
    knowledge: Knowledge  # What is known beyond them
    config: Config  # The configuration
    intents: tuple[Intent, ...] = ()  # The journal's entries, closed ones included

    @property
    def now_s(self) -> float:
        """The cycle's time, seconds since the epoch: the snapshot's own."""
        return self.view.snapshot.taken_s

    def key_of(self, job: ManagedJob) -> ProfileKey:
        """Return the key under which a job's model is profiled."""
        return profile_key(job, self.view.node_index)


def dry_run_key(intent: Intent, view: View) -> ProfileKey:
    """Return the key that a dry run measures; journals of earlier versions do not say for which user."""
    key = intent.payload["key"]
    jobs = (view.jobs.get(int(intent.payload["job_id"])), view.jobs.get(intent.submitted_job or 0))
    owner = next((job.user for job in jobs if job is not None), "")
    return ProfileKey(**{"user": owner, **key})


_MAY_BE_MEMBERS: Final = frozenset({Role.MEMBER, Role.CANDIDATE, Role.NOT_OURS, Role.RELEASED, Role.OTHER})


def with_known_members(cycle: CycleInput) -> CycleInput:
    """Read of members whose tag is damaged or gone what the journal says of their start.

    Only jobs without GPUs are meant: one that has its own again is not a member, whatever the journal says.
    """
    # A member puts itself back into the queue, held, where it cannot tell that the license is its gate.
    damaged = [
        job
        for job in cycle.view.jobs.values()
        if job.membership is None and not job.gpu_count and job.state.is_active
        if job.role in _MAY_BE_MEMBERS or (job.role is Role.USER_HELD and job.reason == REQUEUED_HELD)
    ]
    if not damaged:
        return cycle
    known = _known_members(cycle.intents)
    found: dict[int, ManagedJob] = {
        job.job_id: replace(job, role=Role.MEMBER, membership=known[job.job_id])
        for job in damaged
        if job.job_id in known
    }
    return replace(cycle, view=View(cycle.view.snapshot, {**cycle.view.jobs, **found})) if found else cycle


def _known_members(intents: tuple[Intent, ...]) -> Mapping[int, MemberState]:
    """What each job asked for when it was last made a member."""
    known: dict[int, MemberState] = {}
    for intent in intents:
        if intent.kind not in {GROUP, JOIN} or intent.submitted_job is None:
            continue
        payload = intent.payload if intent.kind == GROUP else {"members": [intent.payload["member"]]}
        for member in members_in(payload):
            known[member.job_id] = MemberState(intent.submitted_job, member.original, member.accumulate_steps)
    return known


_MURIS = (Role.CANDIDATE, Role.USER_HELD, Role.NOT_OURS, Role.MEMBER, Role.RELEASED)


def first_submits(known: Mapping[int, float], view: View) -> dict[int, float]:
    """Return the first submit times of Muri's jobs that run or ran before, seconds since the epoch, by job id."""
    # A job that waits for its first run has its own submit time, and one that ran unseen has lost it.
    return {
        job.job_id: known.get(job.job_id, job.submit_s)
        for role in _MURIS
        for job in view.having(role)
        if job.job_id in known or (job.state is JobState.RUNNING and not job.restart_count)
    }
