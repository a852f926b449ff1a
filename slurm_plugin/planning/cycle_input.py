"""All that a cycle's decision rests on: the queue, what is known beyond it, and the configuration. Pure.

Slurm sets a job's submit time anew each time the job goes back to the queue. Orders by submit time, and Themis's
finish-time fairness ρ, count from the first time: otherwise whoever was stopped would go last, and ρ fall below 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import members_in
from muri.slurm_plugin.planning.model_traits import KnownTraits
from muri.slurm_plugin.planning.pythons import KnownPythons
from muri.slurm_plugin.planning.stated_durations import Claims, Expected, expected
from muri.slurm_plugin.records.cluster import JobState, Node, NodeIndex
from muri.slurm_plugin.records.comment_tags import MemberState
from muri.slurm_plugin.records.journal import GROUP, JOIN, Intent
from muri.slurm_plugin.records.roles import REQUEUED_HELD, ManagedJob, Role, View, profile_key

ATTEMPTS: Final = 2
"""Measurements of a model that may fail before its jobs run alone: one may have met a bad node."""

START_DELAY_S: Final = 5.0
"""Muri's own changes move a job's start by two seconds; only a later start is a delay that its user asked for."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a cycle knows beyond the snapshot.

    Attributes:
        profiles: Stored profiles of all users, and estimates of models without one. `profile_of` finds a job's.
        profiling: Keys that a dry run is measuring now.
        dry_run_jobs: Jobs whose script a dry run executes, or is about to; they wait for it.
        stale: Keys whose profile is in use but is to be measured again.
        marked_at: Since when those of them are so that have a mark, UTC, ISO-8601.
        failures: Attempts to measure that failed and have not expired, by key text: how many, and the last cause.
        failed_s: When the last of them did, seconds since the epoch, by key text.
        exclusions: Why a job must not be grouped again, by job id.
        largest_group: How large a group Slurm lately had room for, and why no larger, by job id.
        served_gpu_s: GPU-seconds that a job had in earlier runs, by job id.
        saved_gpu_s: Those of them that a checkpoint has kept, by job id.
        claims: How far users' last jobs kept to their stated durations.
        first_submit_s: When jobs that have run were submitted at first, seconds since the epoch, by job id.
        traits: What is stored of models beyond their stage profiles.
        gpu_mem_gib: GPU memory that jobs ask for since they ran out of it, by job id.
        refused_releases: Why Slurm lately refused to let jobs go, by job id.
        pythons: Which Pythons scripts run under.
    """

    profiles: Mapping[ProfileKey, StageProfile]
    profiling: frozenset[ProfileKey] = frozenset()
    dry_run_jobs: frozenset[int] = frozenset()
    stale: frozenset[ProfileKey] = frozenset()
    marked_at: Mapping[ProfileKey, str] = field(default_factory=dict)
    failures: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    failed_s: Mapping[str, float] = field(default_factory=dict)
    exclusions: Mapping[int, str] = field(default_factory=dict)
    largest_group: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    served_gpu_s: Mapping[int, float] = field(default_factory=dict)
    saved_gpu_s: Mapping[int, float] = field(default_factory=dict)
    claims: Claims = field(default_factory=dict)
    first_submit_s: Mapping[int, float] = field(default_factory=dict)
    traits: KnownTraits = field(default_factory=KnownTraits)
    gpu_mem_gib: Mapping[int, float] = field(default_factory=dict)
    refused_releases: Mapping[int, str] = field(default_factory=dict)
    pythons: KnownPythons = field(default_factory=KnownPythons)

    def profile_of(self, key: ProfileKey) -> StageProfile | None:
        """Return what is known under a job's key: its user's own profile, else a published one."""
        own = self.profiles.get(key)
        return own if own is not None or not key.user else self.profiles.get(key.published)

    def known_profile(self, key: ProfileKey) -> StageProfile:
        """Return the same of a job that was planned with it.

        Raises:
            KeyError: Nothing is known.
        """
        found = self.profile_of(key)
        if found is None:
            raise KeyError(key)
        return found

    def is_stale(self, key: ProfileKey) -> bool:
        """Whether what is known under a job's key is to be measured again.

        A mark on the published profile counts only for users who have none of their own.
        """
        return key in self.stale or (key not in self.profiles and key.published in self.stale)

    def stale_since(self, key: ProfileKey) -> str:
        """Return since when that is so, UTC, ISO-8601; "" where nothing says so."""
        return next((self.marked_at[each] for each in key.lookup_order if each in self.marked_at), "")

    def needed_gib(self, job_id: int, profile: StageProfile) -> float:
        """Return the GPU memory that a job asks for: what it asked for anew, else what its profile says."""
        return self.gpu_mem_gib.get(job_id, profile.gpu_mem_gib)

    def expected(self, job: ManagedJob, key: ProfileKey) -> Expected | None:
        """Return how long a job is expected to run alone, None where its user did not say."""
        return expected(job, key.model, self.claims.get(job.user, ()))

    def failed(self, key: ProfileKey) -> str:
        """Return why a model is not profiled any more, "" when it still may be."""
        if not self.failures:
            return ""
        # Earlier versions counted the failures of all users together, under the published key's text.
        found = (self.failures.get(str(each), (0, "")) for each in key.lookup_order)
        return next((why for count, why in found if count >= ATTEMPTS), "")


@dataclass(frozen=True, slots=True)
class CycleInput:
    """What one cycle decides on.

    Attributes:
        view: The queue and the nodes.
        knowledge: What is known beyond them.
        config: The configuration.
        intents: The journal's entries, closed ones included.
    """

    view: View
    knowledge: Knowledge
    config: Config
    intents: tuple[Intent, ...] = ()

    @property
    def now_s(self) -> float:
        """The cycle's time, seconds since the epoch: the snapshot's own."""
        return self.view.snapshot.taken_s

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The cluster's nodes."""
        return self.view.snapshot.nodes

    @property
    def node_index(self) -> NodeIndex:
        """The same, to look things up."""
        return self.view.node_index

    def key_of(self, job: ManagedJob) -> ProfileKey:
        """Return the key under which a job's model is profiled."""
        return profile_key(job, self.node_index)

    def doubts(self) -> dict[int, Expected]:
        """Return how long jobs are expected to run whose stated durations are not believed, by job id."""
        stated = (job for job in self.view.jobs.values() if job.state.is_active and job.request.duration_s is not None)
        found = {job.job_id: self.knowledge.expected(job, self.key_of(job)) for job in stated}
        return {job_id: each for job_id, each in found.items() if each is not None and each.times > 1}


def dry_run_key(intent: Intent, view: View) -> ProfileKey:
    """Return what a dry run measures; journals of earlier versions do not say for which user."""
    key = intent.payload["key"]
    jobs = (view.jobs.get(int(intent.payload["job_id"])), view.jobs.get(intent.submitted_job or 0))
    owner = next((job.user for job in jobs if job is not None), "")
    return ProfileKey(**{"user": owner, **key})


_MAY_BE_MEMBERS: Final = frozenset({Role.MEMBER, Role.CANDIDATE, Role.NOT_OURS, Role.RELEASED, Role.OTHER})


def with_known_members(cycle: CycleInput) -> CycleInput:
    """Read of members whose tag is damaged or gone what the journal says of their start.

    Only jobs without GPUs are meant: one that has its own again is not a member, whatever the journal says.
    """
    damaged = [
        job for job in cycle.view.jobs.values()
        if job.membership is None and not job.gpu_count and job.state.is_active and _may_be_member(job)
    ]  # fmt: skip
    if not damaged:
        return cycle
    known = _known_members(cycle.intents)
    found: dict[int, ManagedJob] = {
        job.job_id: replace(job, role=Role.MEMBER, membership=known[job.job_id])
        for job in damaged
        if job.job_id in known
    }
    return replace(cycle, view=View(cycle.view.snapshot, {**cycle.view.jobs, **found})) if found else cycle


def _may_be_member(job: ManagedJob) -> bool:
    # A member puts itself back into the queue, held, where it cannot tell that the license is its gate.
    return job.role in _MAY_BE_MEMBERS or (job.role is Role.USER_HELD and job.reason == REQUEUED_HELD)


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
