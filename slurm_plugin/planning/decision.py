"""A cycle's decision: from the snapshot and what is known to everything that the cycle will do. Pure.

A cycle has six phases: `gathered.py` looks up what is known and who may be planned, `repairs.py` repairs unfinished
work, `request.py` and `running.py` prepare the request, `asking.py` asks the policy, `plan_actions.py` turns its answer
into actions, and `execute/executor.py` carries them out.

Deciding changes nothing, so a fault costs one job: where a decision raises, it is made again without the jobs, intents
or profiles at fault, which are found by bisection, whatever raised and wherever. A job of Muri's that is left out keeps
its record, so that a pilot whose comment is at fault still counts as running; only its comments go unread.
"""

import logging
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final

from muri.inherited import garbage_collector_paused
from muri.policies.types import Plan, PlanRequest, Policy, Waiting, sentences
from muri.profiler.records import ProfileKey
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import (
    Abandon,
    Action,
    Preempt,
    ReleaseSolo,
    ResumeGroup,
    StandBack,
    members_in,
    started,
)
from muri.slurm_plugin.planning.asking import ask
from muri.slurm_plugin.planning.cycle_input import CycleInput, with_known_members
from muri.slurm_plugin.planning.gathered import Gathered, gather, is_let_go
from muri.slurm_plugin.planning.plan_actions import idle_gpus_first, starts_of
from muri.slurm_plugin.planning.repairs import overtaken_dry_runs, reconcile
from muri.slurm_plugin.planning.request import Preparation, prepare
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.comment_tags import Place
from muri.slurm_plugin.records.journal import Intent
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, unread

log = logging.getLogger("muri.controller")

_FAULTS_OF_A_USER: Final = 3
"""After so many faulty jobs of one user, the rest of that user's jobs are left out at once."""

_MOST_SEARCHES: Final = 30
"""Each costs about as many decisions as the logarithm of the queue's length."""

_Subject = int | str | ProfileKey
"""A job, an intent's token, a profile."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The jobs, intents and profiles that a decision left out, and why."""

    blamed: Mapping[_Subject, str] = field(default_factory=dict)

    @property
    def jobs(self) -> dict[int, str]:
        """Why jobs were left out, by job id."""
        return {subject: why for subject, why in self.blamed.items() if isinstance(subject, int)}

    @property
    def intents(self) -> dict[str, str]:
        """Why intents were left out, by token."""
        return {subject: why for subject, why in self.blamed.items() if isinstance(subject, str)}

    def faults(self, view: View) -> tuple[str, ...]:
        """Everything that was left out, for people."""
        others = ((subject, why) for subject, why in self.blamed.items() if not isinstance(subject, int))
        return (*by_user(self.jobs, view), *(f"{_shown(subject)}: {why}" for subject, why in others))


@dataclass(frozen=True, slots=True)
class Decision:
    """The actions of a cycle, before it carries them out."""

    view: View
    repairs: tuple[Action, ...]  # Of unfinished work of earlier cycles
    preparation: Preparation  # What the policy was asked
    plan: Plan  # What the policy answered
    actions: tuple[Action, ...]  # What follows from the plan
    quarantine: Quarantine = field(default_factory=Quarantine)  # What was left out, because deciding failed on it
    # Why what jobs say of their models cannot be true, by job id
    untrue: Mapping[int, str] = field(default_factory=dict)


@garbage_collector_paused()
def decide(cycle: CycleInput, policy: Policy) -> Decision:
    """Make a cycle's decision. Pure: the snapshot's own time is the clock.

    What makes it fail is left out: such jobs get their own request and Slurm decides about them.

    Raises:
        Exception: Deciding fails with no job in the queue, too.
    """
    cycle = with_known_members(cycle)
    decision, quarantine = decide_without_culprits(cycle, lambda tried: _decide(gather(tried), policy))
    releases = tuple(
        ReleaseSolo(job_id, (why,))
        for job_id, why in quarantine.jobs.items()
        if cycle.view.jobs[job_id].role in {Role.CANDIDATE, Role.NOT_OURS}
    )
    abandoned = tuple(Abandon(token, why) for token, why in quarantine.intents.items())
    actions = decision.actions + releases
    repairs = decision.repairs + abandoned
    repairs += tuple(stand_backs(cycle.view, cycle.intents, (*repairs, *actions)))
    return replace(decision, repairs=repairs, actions=actions, quarantine=quarantine)


def _decide(cycle: Gathered, policy: Policy) -> Decision:
    """Repair, prepare the request, ask the policy, and turn its answer into actions, in the order of carrying out."""
    repairs = reconcile(cycle)
    preparation = prepare(cycle, policy.profile_use, allocates_cpus=policy.allocates_cpus)
    settled, preparation = ask(policy, preparation)
    starts, refused = starts_of(settled, policy, preparation)
    refused_releases = cycle.knowledge.refused_releases
    releases, stuck = releases_of(cycle.to_slurm, refused_releases, cycle.view, cycle.config)
    preparation = replace(preparation, waiting={**preparation.waiting, **refused, **stuck})
    gone = started(starts) | started(releases)
    # Another job of the model can be measured later; a script that runs twice at once takes twice the GPUs, and could
    # overwrite its own files.
    runs = [run for run in preparation.dry_runs if run.job_id not in started(starts)]
    # A cycle may run out of time, so order matters. The few new dry runs stand ahead, or starts would leave them no
    # GPU; those that measure a model again come behind the jobs, which need not wait for them. However many jobs Slurm
    # is to decide about, and refuses to let go, they come last.
    actions = (
        *stop_actions(settled.stops, preparation.request, cycle.view),
        *(run for run in runs if not run.again),
        *overtaken_dry_runs(cycle.dry_runs, cycle.view, gone),
        *idle_gpus_first(starts),
        *(run for run in runs if run.again),
        *releases,
    )
    return Decision(cycle.view, repairs + cycle.splits, preparation, settled.plan, actions, untrue=cycle.untrue)


def by_user(faulty: Mapping[int, str], view: View) -> tuple[str, ...]:
    """Return a line for each user with faulty jobs, however many there are."""
    by_name: dict[str, list[int]] = {}
    for job_id in faulty:
        known = view.jobs.get(job_id)  # of those left out only Muri's own jobs stay in the queue
        by_name.setdefault("others" if known is None else known.user, []).append(job_id)
    lines = []
    for user, (job_id, *more) in by_name.items():
        rest = f" (one of {len(more) + 1} faulty jobs of {user})" if more else ""
        lines.append(f"job {job_id}: {faulty[job_id]}{rest}")
    return tuple(lines)


def decide_without_culprits(cycle: CycleInput, decide: Callable[[CycleInput], Decision]) -> tuple[Decision, Quarantine]:
    """Return a decision made without what makes it raise, and what was left out.

    Raises:
        Exception: It raises without any job, intent and profile, too.
    """
    blamed: dict[_Subject, str] = {}
    for _ in range(_MOST_SEARCHES):
        tried = _without(cycle, blamed)
        try:
            return decide(tried), Quarantine(blamed)
        except Exception as error:
            culprit = _find_culprit(tried, decide)
            if culprit is None:
                raise
            log.exception("deciding failed because of %s; it is left out", _shown(culprit))
            blamed[culprit] = f"Muri failed on it: {type(error).__name__}: {error}"
            if isinstance(culprit, int):
                blamed |= _rest_of_its_user(culprit, cycle.view, blamed)
    return decide(_without(cycle, blamed)), Quarantine(blamed)


def _find_culprit(cycle: CycleInput, decide: Callable[[CycleInput], object]) -> _Subject | None:
    """Return the first subject with which deciding on all before it, and on it, raises; None when none is at fault."""
    tokens = (intent.token for intent in cycle.intents)
    subjects: list[_Subject] = [*cycle.view.jobs, *tokens, *cycle.knowledge.profiles]

    def raises(count: int) -> bool:
        try:
            decide(_without(cycle, subjects[count:]))
        except Exception:
            return True
        return False

    if not subjects or raises(0):
        return None
    return subjects[bisect_left(range(1, len(subjects)), True, key=raises)]


def _rest_of_its_user(culprit: int, view: View, blamed: Mapping[_Subject, str]) -> dict[_Subject, str]:
    """Return all other jobs of a faulty job's user when these keep failing: no user's jobs use up a cycle."""
    uid = view.jobs[culprit].uid
    faults = sum(isinstance(subject, int) and view.jobs[subject].uid == uid for subject in blamed)
    if faults < _FAULTS_OF_A_USER:
        return {}
    why = f"Muri failed on {faults} jobs of its user; the others are left out, too"
    others = (job for job in view.jobs.values() if job.uid == uid and job.role is not Role.OTHER)
    return {job.job_id: why for job in others if job.job_id not in blamed}


def _without(cycle: CycleInput, subjects: Sequence[_Subject] | Mapping[_Subject, str]) -> CycleInput:
    if not subjects:
        return cycle
    out = frozenset(subjects)
    view, known = cycle.view, cycle.knowledge
    jobs = {
        job_id: unread(job) if job_id in out else job
        for job_id, job in view.jobs.items()
        if job_id not in out or job.role is not Role.OTHER
    }
    records = tuple(job for job in view.snapshot.jobs if job.job_id in jobs)
    profiles = {key: profile for key, profile in known.profiles.items() if key not in out}
    return replace(
        cycle,
        view=View(replace(view.snapshot, jobs=records), jobs),
        knowledge=replace(known, profiles=profiles),
        intents=tuple(intent for intent in cycle.intents if intent.token not in out),
    )


def _shown(subject: _Subject) -> str:
    kind = "job" if isinstance(subject, int) else "intent" if isinstance(subject, str) else "profile"
    return f"{kind} {subject}"


def stop_actions(stops: tuple[Waiting, ...], request: PlanRequest, view: View) -> Iterator[Preempt]:
    """Yield the actions that stop running jobs, each with the service that the job has had in this run."""
    gpus = {job.job_id: job.gpu_count for unit in request.running for job in unit.members}
    for item in stops:
        job = view.jobs[item.job_id]
        served_gpu_s = max(0.0, request.now_s - job.start_s) * gpus[item.job_id]
        yield Preempt(item.job_id, job.restart_count, sentences(item.reasons), served_gpu_s=served_gpu_s)


LATER = "more than enough jobs of its partition wait for Slurm already (slurm_backlog); it is let go as they start"


def to_let_go(jobs: Sequence[ManagedJob], view: View, config: Config) -> tuple[ManagedJob, ...]:
    """Return the jobs that Slurm gets now: of each partition those of the highest priority, of these the oldest.

    A partition gets one for each idle CPU and `slurm_backlog` more, less those that compete there already. So a job is
    held back only behind more jobs of a higher priority than Slurm's schedulers look at. Jobs that have been let go and
    wait for something else than resources, such as a limit, do not count.
    """
    by_priority = sorted(jobs, key=lambda job: (-job.own_priority, job.submit_s, job.job_id))
    competing = Counter(job.partition for job in view.having(Role.RELEASED) if job.starts_by_itself)
    room: dict[str, int] = {}
    chosen: list[ManagedJob] = []
    for job in by_priority:
        if job.partition not in room:  # one partition, or several
            names = set(job.partition.split(","))
            usable = (node for node in view.snapshot.nodes if node.usable and not names.isdisjoint(node.partitions))
            idle = sum(max(0, node.cpu_count - node.cpus_allocated) for node in usable)
            room[job.partition] = idle + config.slurm_backlog - competing[job.partition]
        if room[job.partition] > 0:
            room[job.partition] -= 1
            chosen.append(job)
    return tuple(chosen)


def releases_of(
    to_slurm: Mapping[int, str], refused: Mapping[int, str], view: View, config: Config
) -> tuple[tuple[ReleaseSolo, ...], dict[int, str]]:
    """Leave to Slurm the jobs that Muri cannot plan.

    Returns:
        The releases, and why the other such jobs wait, by job id: Slurm lately refused to let them go, as it does with
        a job that no nodes could ever hold, or has enough others to choose from.
    """
    why = "Muri does not serve its partition, or cannot read how many GPUs it asks for"
    reasons = {job.job_id: why for job in view.having(Role.NOT_OURS)}
    reasons |= {job_id: f"Slurm decides when it starts: {why}" for job_id, why in to_slurm.items()}
    stuck = {job_id: f"{why}; {refused[job_id]}" for job_id, why in reasons.items() if job_id in refused}
    jobs = to_let_go([view.jobs[job_id] for job_id in reasons if job_id not in stuck], view, config)
    releases = {job.job_id: ReleaseSolo(job.job_id, (reasons[job.job_id],)) for job in jobs}
    later = {job_id: f"{why}; {LATER}" for job_id, why in reasons.items() if job_id not in releases}
    return tuple(releases.values()), {**later, **stuck}


_MOST_NICE: Final = 2_000_000_000
"""Slurm takes nice values up to 2,147,483,645."""


def stand_backs(view: View, intents: tuple[Intent, ...], actions: Sequence[Action]) -> Iterator[StandBack]:
    """Let tasks that are kept back stand behind siblings that may start, and others where Slurm has them.

    A nice value stays until its task is let go: until then Muri alone decides when it starts.
    """
    resumed = {action.token for action in actions if isinstance(action, ResumeGroup)}
    groups = [members_in(intent.payload) for intent in intents if intent.token in resumed]
    starts = started(actions) | {member.job_id for members in groups for member in members}
    arrays: defaultdict[int, list[ManagedJob]] = defaultdict(list)
    for job in view.jobs.values():
        if job.array_job_id and job.state is JobState.PENDING:
            arrays[job.array_job_id].append(job)
    for records in arrays.values():
        ahead = [
            job
            for job in records
            if not job.held and (job.job_id in starts or (job.role in {Role.MEMBER, Role.RELEASED} and is_let_go(job)))
        ]
        # What goes away goes first: two tasks that wait for each other's start Slurm would refuse.
        yield from (StandBack(job.job_id, None) for job in records if _stands_back_for_nobody(job, ahead, starts))
        for job in records:
            may_wait = job.role is Role.CANDIDATE and job.given is None and job.job_id not in starts
            # Slurm's schedulers do not look at others.
            is_looked_at = not (job.held or job.dependency or job.begin_s > view.snapshot.taken_s)
            if may_wait and is_looked_at and (place := _place_behind(job, ahead)) is not None:
                yield StandBack(job.job_id, place)


def _stands_back_for_nobody(job: ManagedJob, ahead: Sequence[ManagedJob], starts: AbstractSet[int]) -> bool:
    if job.place is None or job.held:
        return False
    if job.role is not Role.CANDIDATE:
        return True
    waits_for = set() if job.dependency == job.own_dependency else set(job.dependency.split(","))
    return bool(waits_for) and (job.job_id in starts or waits_for.isdisjoint(map(_start_of, ahead)))


def _place_behind(job: ManagedJob, ahead: Sequence[ManagedJob]) -> Place | None:
    """Return the change that puts a task behind siblings, None where it stands there already."""
    passed = [
        each
        for each in ahead
        if each.partition == job.partition and _order(job, job.priority) < _order(each, each.own_priority)
    ]
    if not passed:
        return None
    lowest, own_nice = min(each.own_priority for each in passed), job.own_nice
    nice = job.nice + job.priority - lowest + 1
    was_in_vain = job.place is not None and job.place.nice not in {job.nice, job.place.own_nice}
    if lowest > 1 and nice <= _MOST_NICE and not was_in_vain:
        return Place(own_nice, nice, "")
    return Place(own_nice, own_nice, ",".join(sorted(map(_start_of, passed))))


def _start_of(job: Job) -> str:
    """The dependency on a task's start."""
    return f"after:{job.name_in_slurm}"


def _order(job: Job, priority: int) -> tuple[float, float, float]:
    """Slurm's order among an array's records; the record of several tasks comes last."""
    return -priority, job.submit_s, float("inf") if job.several_tasks else int(job.array_tasks or 0)
