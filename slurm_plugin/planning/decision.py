"""A cycle's decision: from the snapshot and what is known to everything that the cycle will do. Pure.

Deciding changes nothing, so a fault costs one job: where a decision raises, it is made again without the jobs, intents
or profiles at fault, which are found by bisection, whatever raised and wherever. A job of Muri's that is left out keeps
its record, so that a pilot whose comment is at fault still counts as running; only its comments go unread.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeGuard, TypeVar

from muri.inherited import garbage_collector_paused
from muri.policies.cycle.laws import broken_laws
from muri.policies.cycle.validation import RequestError
from muri.policies.types import Plan, Policy
from muri.profiler.records import ProfileKey
from muri.slurm_plugin.planning.actions import (
    Abandon,
    Action,
    Join,
    MemberPlan,
    ReleaseSolo,
    StartDryRun,
    StartGroup,
    started,
)
from muri.slurm_plugin.planning.arrays import stand_backs
from muri.slurm_plugin.planning.cycle_input import CycleInput, with_known_members
from muri.slurm_plugin.planning.joins import jobs_with_pilots, started_plain, with_closed_units
from muri.slurm_plugin.planning.measurements import untrue_reports
from muri.slurm_plugin.planning.model_traits import with_measured_pairs
from muri.slurm_plugin.planning.node_room import NodeRoom, node_room
from muri.slurm_plugin.planning.packing import ask_to_share
from muri.slurm_plugin.planning.plan_actions import LATER, actions_of, idle_gpus_first, to_let_go
from muri.slurm_plugin.planning.repairs import overtaken_dry_runs, reconcile
from muri.slurm_plugin.planning.request import Preparation, prepare
from muri.slurm_plugin.planning.running import Settled, may_join, settle, stop_actions, with_running
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.roles import Role, View, unread

_ROUNDING: Final = 1e-6

log = logging.getLogger("muri.controller")

_FAULTS_OF_A_USER: Final = 3
"""After so many faulty jobs of one user, the rest of that user's jobs are left out at once."""

_MOST_SEARCHES: Final = 30
"""Each costs about as many decisions as the logarithm of the queue's length."""

_Subject = int | str | ProfileKey
"""A job, an intent's token, a profile."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Quarantine:
    """What a decision was made without.

    Attributes:
        jobs: Why jobs were left out, by job id.
        intents: Why intents were left out, by token.
        profiles: Why profiles were left out.
    """

    jobs: Mapping[int, str] = field(default_factory=dict)
    intents: Mapping[str, str] = field(default_factory=dict)
    profiles: Mapping[ProfileKey, str] = field(default_factory=dict)

    def faults(self, view: View) -> tuple[str, ...]:
        """Everything that was left out, for people."""
        named = {f"intent {token}": why for token, why in self.intents.items()}
        named |= {f"profile {key}": why for key, why in self.profiles.items()}
        return (*by_user(self.jobs, view), *(f"{name}: {why}" for name, why in named.items()))


@dataclass(frozen=True, slots=True)
class Decision:
    """What a cycle would do, before it does anything.

    Attributes:
        view: What it looked at.
        repairs: Actions that repair what an earlier cycle left unfinished.
        preparation: What the policy was asked.
        plan: What the policy answered.
        actions: What follows from the plan.
        quarantine: What was left out, because deciding failed on it.
        untrue: Why what jobs say of their models cannot be true, by job id.
    """

    view: View
    repairs: tuple[Action, ...]
    preparation: Preparation
    plan: Plan
    actions: tuple[Action, ...]
    quarantine: Quarantine = field(default_factory=Quarantine)
    untrue: Mapping[int, str] = field(default_factory=dict)


@garbage_collector_paused()
def decide(cycle: CycleInput, policy: Policy) -> Decision:
    """Make a cycle's decision. Pure: the snapshot's own time is the clock.

    What makes it fail is left out: such jobs get their own request and Slurm decides about them.

    Raises:
        Exception: Deciding fails with no job in the queue, too.
    """
    cycle = with_known_members(cycle)
    decision, quarantine = decide_without_culprits(cycle, lambda tried: _decide(tried, policy))
    stuck = [(job_id, why) for job_id, why in quarantine.jobs.items() if _waits(cycle.view, job_id)]
    releases = tuple(ReleaseSolo(job_id, (why,)) for job_id, why in stuck)
    abandoned = tuple(Abandon(token, why) for token, why in quarantine.intents.items())
    actions = decision.actions + releases
    repairs = decision.repairs + abandoned
    repairs += tuple(stand_backs(cycle, (*repairs, *actions)))
    return replace(decision, repairs=repairs, actions=actions, quarantine=quarantine)


def _waits(view: View, job_id: int) -> bool:
    return view.jobs[job_id].role in {Role.CANDIDATE, Role.NOT_OURS}


def _decide(cycle: CycleInput, policy: Policy) -> Decision:
    view, repairs = cycle.view, reconcile(cycle)
    preparation = prepare(cycle, policy.profile_use, allocates_cpus=policy.allocates_cpus)
    repairs += preparation.splits
    cycle = preparation.cycle
    if policy.supports_packing:
        shared, preparation = ask_to_share(policy, preparation)
        plan, starts, crowded = shared.plan, shared.actions, shared.crowded
        stops = stop_actions(shared.stops, preparation.request, view)
    else:
        settled, preparation = ask(policy, preparation)
        plan, stops = settled.plan, stop_actions(settled.stops, preparation.request, view)
        with_pilots = jobs_with_pilots(preparation.request.jobs, policy, cycle)
        nodes = node_room(preparation.request.nodes, cycle)
        starts, crowded = actions_of(plan, cycle, preparation.room, nodes, with_pilots)
    # A site's own policy may not know whom Slurm counts apart.
    unlawful = {job_id: law.why for law in broken_laws(preparation.request, plan) for job_id in law.job_ids}
    starts, refused = within_limits(starts, preparation.room, view, {**crowded, **unlawful})
    if not policy.supports_packing and may_join(cycle.config):
        starts = tuple(_with_room(action, plan, preparation.room, nodes) for action in starts)
    preparation = replace(preparation, waiting={**preparation.waiting, **refused})
    releases, stuck = _releases(preparation)
    preparation = replace(preparation, waiting={**preparation.waiting, **stuck})
    runs = without_started(preparation, starts)
    # Jobs need not wait for what measures a model again: it comes behind them in Slurm's queue.
    new, again = tuple(run for run in runs if not run.again), tuple(run for run in runs if run.again)
    overtaken = overtaken_dry_runs(cycle, started(starts) | started(releases))
    # What a cycle has no time for, the next one does. The few new dry runs stand ahead, or starts would leave them no
    # GPU; and however many jobs Slurm is to decide about, and refuses to let go, they come last.
    actions = stops + new + overtaken + idle_gpus_first(starts) + again + releases
    return Decision(view, repairs, preparation, plan, actions, untrue=untrue_reports(cycle))


def _releases(preparation: Preparation) -> tuple[tuple[ReleaseSolo, ...], dict[int, str]]:
    """Leave to Slurm the jobs that Muri cannot plan.

    Returns:
        The releases, and why the other such jobs wait, by job id: Slurm lately refused to let them go, as it does with
        a job that no nodes could ever hold, or has enough others to choose from.
    """
    cycle = preparation.cycle
    why = "Muri does not serve its partition, or cannot read how many GPUs it asks for"
    reasons = {job.job_id: why for job in cycle.view.having(Role.NOT_OURS)}
    reasons |= {job_id: f"Slurm decides when it starts: {why}" for job_id, why in preparation.to_slurm.items()}
    refused = cycle.knowledge.refused_releases
    stuck = {job_id: f"{why}; {refused[job_id]}" for job_id, why in reasons.items() if job_id in refused}
    jobs = to_let_go([cycle.view.jobs[job_id] for job_id in reasons if job_id not in stuck], cycle)
    releases = {job.job_id: ReleaseSolo(job.job_id, (reasons[job.job_id],)) for job in jobs}
    later = {job_id: f"{why}; {LATER}" for job_id, why in reasons.items() if job_id not in releases}
    return tuple(releases.values()), {**later, **stuck}


def ask(policy: Policy, preparation: Preparation) -> tuple[Settled, Preparation]:
    """Ask the policy; its request includes what runs."""
    cycle, room = preparation.cycle, preparation.room
    request = with_closed_units(with_running(preparation), cycle, room)
    request = with_measured_pairs(request, policy, cycle.knowledge.traits.pairs)
    preparation = replace(preparation, request=request)
    try:
        return settle(policy.plan(request), request), preparation
    except RequestError as error:
        if not request.running:
            raise
        log.warning("running jobs are left alone in this cycle: %s", error)
    request = replace(request, running=())
    return settle(policy.plan(request), request), replace(preparation, request=request)


def within_limits(
    starts: Sequence[Action], room: SiteRoom, view: View, unlawful: Mapping[int, str]
) -> tuple[tuple[Action, ...], dict[int, str]]:
    """Take what the site's limits leave room for.

    Args:
        starts: What the plan starts, in its order.
        room: What the site's limits allow; it is used up.
        view: The queue.
        unlawful: Why jobs must not share GPUs as planned, by job id.

    Returns:
        The starts for which there is room, and why the other jobs wait, by job id. Of a group without room the oldest
        job starts alone. A job that is to have a pilot job only so that others may join it starts without where the
        limits would rather have it so: all that starts comes first.
    """
    kept: list[Action] = []
    refused: dict[int, str] = {}
    for action in starts:
        taken, why = _taken(action, room, view, unlawful)
        kept += taken
        refused |= dict.fromkeys(started((action,)) - started(taken), why)
    return tuple(_with_pilot(action, room) if _is_single(action) else action for action in kept), refused


def _is_single(action: Action) -> TypeGuard[StartGroup]:
    return isinstance(action, StartGroup) and len(action.members) == 1


def _with_pilot(start: StartGroup, room: SiteRoom) -> StartGroup | ReleaseSolo:
    group, why = room.take_pilot(start)
    return started_plain(start, why) if why else group


def _with_room(action: Action, plan: Plan, room: SiteRoom, nodes: NodeRoom) -> Action:
    """Give a group that takes turns, and whose memory the plan leaves to Muri, memory for those that join it later."""
    match action:
        case StartGroup(members=(_, _, *_) as members, mode="interleave") if not any(
            plan.cpu_mem_shares.get(member.job_id) for member in members
        ):
            wider = nodes.widen(action)
            return room.widen(action, wider) if wider != action else action
    return action


def _taken(action: Action, room: SiteRoom, view: View, unlawful: Mapping[int, str]) -> tuple[tuple[Action, ...], str]:
    """What can be done of a start, and why not all of it; a pilot of one job is not counted yet."""
    why = ""
    match action:
        case StartGroup(members=(member,)):
            why = room.take_alone(view.jobs[member.job_id])
        case StartGroup(members=members):
            group = room.capped(action)
            why = unlawful.get(members[0].job_id, "") or why_too_slow(members) or room.take_group(group)
            return (_oldest_alone(group, room, view, why), why) if why else ((group,), "")
        case ReleaseSolo(job_id=job_id):
            why = room.take_alone(view.jobs[job_id])
        case Join():
            why = unlawful.get(action.member.job_id, "") or why_too_slow((action.member,)) or room.take_join(action)
    return () if why else (action,), why


def why_too_slow(members: Sequence[MemberPlan]) -> str:
    """Say whom a plan puts beside others at less than the speed that it is promised, "" for nobody.

    The planner promises the same; a site's own policy may not know of promises.
    """
    slow = next((member for member in members if member.speed < member.min_speed - _ROUNDING), None)
    if slow is None:
        return ""
    return (
        f"job {slow.job_id} would get {slow.speed:.2f} of its speed alone there, and is promised {slow.min_speed:.2f}"
    )


def _oldest_alone(group: StartGroup, room: SiteRoom, view: View, why: str) -> tuple[ReleaseSolo, ...]:
    """Start the oldest job of a group that cannot start.

    Planned again in the next cycle, the same group would be refused again, and its GPUs would stay idle for ever.
    """
    oldest = view.oldest(member.job_id for member in group.members)
    return () if room.take_alone(oldest) else (ReleaseSolo(oldest.job_id, (f"it starts alone: {why}",)),)


def without_started(preparation: Preparation, starts: Sequence[Action]) -> tuple[StartDryRun, ...]:
    """Return the dry runs, except those with the script of a job that starts.

    Another job of the model can be measured later; a script that runs twice at once takes twice the GPUs, and could
    overwrite its own files.
    """
    gone = started(starts)
    return tuple(run for run in preparation.dry_runs if run.job_id not in gone)


def by_user(faulty: Mapping[int, str], view: View) -> tuple[str, ...]:
    """Return a line for each user with faulty jobs, however many there are.

    Args:
        faulty: What is wrong with jobs, by job id.
        view: The queue.
    """
    found: dict[str, list[int]] = {}
    for job_id in faulty:
        known = view.jobs.get(job_id)  # of those left out only Muri's own jobs stay in the queue
        found.setdefault("others" if known is None else known.user, []).append(job_id)
    lines = []
    for user, (job_id, *more) in found.items():
        rest = f" (one of {len(more) + 1} faulty jobs of {user})" if more else ""
        lines.append(f"job {job_id}: {faulty[job_id]}{rest}")
    return tuple(lines)


def decide_without_culprits(cycle: CycleInput, decide: Callable[[CycleInput], _Answer]) -> tuple[_Answer, Quarantine]:
    """Make a decision; where it raises, make it without those who are at fault.

    Args:
        cycle: What to decide on.
        decide: Makes the decision and changes nothing.

    Returns:
        The decision, and who was left out.

    Raises:
        Exception: It raises without any job, intent and profile, too.
    """
    blamed: dict[_Subject, str] = {}
    for _ in range(_MOST_SEARCHES):
        tried = _without(cycle, blamed)
        try:
            return decide(tried), _quarantine(blamed)
        except Exception as error:
            culprit = _find_culprit(tried, decide)
            if culprit is None:
                raise
            log.exception("deciding failed because of %s; it is left out", _shown(culprit))
            blamed |= _with_its_user(culprit, f"Muri failed on it: {type(error).__name__}: {error}", cycle, blamed)
    return decide(_without(cycle, blamed)), _quarantine(blamed)


def _find_culprit(cycle: CycleInput, decide: Callable[[CycleInput], object]) -> _Subject | None:
    """Return the first subject with which deciding on all before it, and on it, raises; None when none is at fault."""
    subjects = _subjects(cycle)

    def raises(count: int) -> bool:
        try:
            decide(_without(cycle, subjects[count:]))
        except Exception:
            return True
        return False

    if raises(0):
        return None
    works, fails = 0, len(subjects)
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (works, middle) if raises(middle) else (middle, fails)
    return subjects[fails - 1] if subjects else None


def _subjects(cycle: CycleInput) -> Sequence[_Subject]:
    jobs = cycle.view.jobs
    intents = [intent.token for intent in cycle.intents]
    return [*jobs, *intents, *cycle.knowledge.profiles]


def _with_its_user(
    culprit: _Subject, why: str, cycle: CycleInput, blamed: Mapping[_Subject, str]
) -> dict[_Subject, str]:
    """The culprit, or all jobs of its user when these keep failing: nobody's jobs use up a cycle."""
    if not isinstance(culprit, int):
        return {culprit: why}
    jobs = cycle.view.jobs
    faults = Counter(jobs[job_id].uid for job_id in (*blamed, culprit) if isinstance(job_id, int))
    uid = jobs[culprit].uid
    if faults[uid] < _FAULTS_OF_A_USER:
        return {culprit: why}
    rest = f"Muri failed on {faults[uid]} jobs of its user; the others are left out, too"
    others = [job.job_id for job in jobs.values() if job.uid == uid and job.role is not Role.OTHER]
    found: dict[_Subject, str] = {job_id: rest for job_id in others if job_id not in blamed}
    return found | {culprit: why}


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
    return f"job {subject}" if isinstance(subject, int) else f"the intent or profile {subject}"


def _quarantine(blamed: Mapping[_Subject, str]) -> Quarantine:
    return Quarantine(
        {each: why for each, why in blamed.items() if isinstance(each, int)},
        {each: why for each, why in blamed.items() if isinstance(each, str)},
        {each: why for each, why in blamed.items() if isinstance(each, ProfileKey)},
    )
