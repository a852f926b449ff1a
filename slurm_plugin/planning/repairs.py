"""Compares what the controller meant to do with what Slurm shows, and repairs the difference by actions. Pure."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from muri.policies.siblings.horus_cost import MAX_RAISES, raised_gib
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import (
    Abandon,
    Action,
    AskForMore,
    Cancel,
    DryRunFailed,
    ExtendPilot,
    KeepGate,
    MoveToLicense,
    Preempt,
    Regroup,
    ResetRequest,
    Restore,
    ResumeGroup,
    ReturnToQueue,
    join_in,
)
from muri.slurm_plugin.planning.cycle_input import START_DELAY_S
from muri.slurm_plugin.planning.gathered import DryRun, Gathered
from muri.slurm_plugin.planning.placement import ends_at_s
from muri.slurm_plugin.planning.site_limits import PILOT_EXTRA_S
from muri.slurm_plugin.planning.slurm_requests import was_changed
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.comment_tags import MemberState, MemoryRetry
from muri.slurm_plugin.records.journal import GROUP, JOIN, PREEMPT, Intent
from muri.slurm_plugin.records.limits import is_limit_reason
from muri.slurm_plugin.records.roles import (
    ManagedJob,
    Role,
    View,
    gate_word,
    is_behind_license,
    is_lifted,
    lease_end_s,
)

log = logging.getLogger("muri.controller")

# A pilot tells what was measured of its last member and ends itself some seconds later; one that did not is cancelled.
_PILOT_GRACE_S = 60.0

_BEFORE_ITS_TURN = {"", "None", "Priority", "Dependency", "BeginTime", "Licenses"}

_PASSED_OVER = "InvalidAccount"
"""So Slurm 23.11 and 24.05 without slurmdbd say for a moment of any job that starts by backfill alone."""

_EMPTY_S = 30.0
"""So long a pilot job may run while Slurm finds no room for any of its members."""


def reconcile(cycle: Gathered) -> tuple[Action, ...]:
    """Return the repairs that a cycle makes before it plans."""
    view, intents, config, now_s = cycle.view, cycle.intents, cycle.config, cycle.now_s
    groups = {intent.token: intent for intent in intents if intent.kind == GROUP}
    begun = [intent for intent in groups.values() if intent.state == "begun"]
    stops, joined = stops_under_way(intents), begun_joins(intents)
    actions = [_open_group(view, intent) for intent in begun]
    moves = (*_resume_stops(view, stops), *_resume_joins(view, joined))
    actions += moves
    settled = {move.job_id for move in moves if isinstance(move, Preempt | ReturnToQueue)} | stops.keys()
    settled |= {job_id for job_id, intent in joined.items() if intent.state == "begun"}
    short_of_memory = [after_out_of_memory(job, view, config, intents) for job in view.having(Role.MEMBER)]
    returns = [action for action in short_of_memory if action is not None and action.job_id not in settled]
    actions += returns
    settled |= {action.job_id for action in returns}
    since_s = {job_id: intent.begun_s for job_id, intent in joined.items()}
    actions += _members(view, config, {intent.submitted_job for intent in begun}, settled, since_s)
    actions += resets(view, config, settled)
    actions += gates(view, config, settled)
    actions += _pilots(groups, view, config, since_s)
    actions += _short_pilots(view)
    for dry_run in cycle.dry_runs:
        actions += _dry_run(dry_run, view, config)
    known = {dry_run.token for dry_run in cycle.dry_runs}
    actions += (
        Cancel(job.job_id, "the dry run is no longer needed")
        for job in view.having(Role.DRY_RUN)
        if job.dry_run not in known
    )
    actions += cycle.measured
    actions += _half_submitted(view, intents, now_s)  # last: a comment that its user wrote decides
    return tuple(actions)


def _half_submitted(view: View, intents: tuple[Intent, ...], now_s: float) -> Iterator[Action]:
    """Cancel jobs that a killed controller had submitted but not tagged.

    Jobs are submitted held, with the tag in their own comment; it moves to AdminComment before the job is released.
    A comment may say anything, so it must name a start or a dry run that the journal knows; and such a job never ran.
    """
    known = {intent.token for intent in intents}
    for job in view.having(Role.OTHER):
        waits = job.held and job.state is JobState.PENDING and not job.restart_count
        if job.reports.unfinished in known and waits and now_s - job.submit_s > _PILOT_GRACE_S:
            yield Cancel(job.job_id, "its submission was cut off")


def find_pilot(view: View, token: str) -> ManagedJob | None:
    """Return the pilot job that carries a start's token, whether it is active or not."""
    pilots = (job for job in view.jobs.values() if job.pilot_tag is not None and job.pilot_tag.token == token)
    return next(pilots, None)


def _open_group(view: View, intent: Intent) -> Action:
    pilot = find_pilot(view, intent.token)
    if pilot is None:
        return Abandon(intent.token, "its pilot job was never accepted, or is forgotten")
    if not pilot.state.is_active:
        return Abandon(intent.token, f"its pilot job {pilot.job_id} has ended ({pilot.state})")
    return ResumeGroup(intent.token)


def _members(
    view: View,
    config: Config,
    open_pilots: set[int | None],
    settled: AbstractSet[int],
    since_s: Mapping[int, float],
) -> Iterator[Action]:
    """Give back to Slurm the members that cannot run in their group.

    `open_pilots` are those of groups whose start is not finished, `settled` the jobs that other actions look after;
    `since_s` says when jobs joined a group that ran already, by job id.
    """
    now_s = view.snapshot.taken_s
    for job, membership in _waiting_members(view, settled):
        pilot = view.active.get(membership.pilot)
        if job.set_aside:
            yield ReturnToQueue(job.job_id, "", "Slurm set it aside after it failed; it stays held")
        elif pilot is None:
            yield after_pilot_end(view, job)
        elif pilot.job_id in open_pilots:
            continue
        elif job.held_by_others:
            yield ReturnToQueue(job.job_id, "", "it was held; it waits until it is released")
        elif job.gated:
            yield Restore(job.job_id, "it was taken out of its group")
        elif not job.is_granted:
            yield ReturnToQueue(job.job_id, "", "nothing would open its group's GPUs for it (muri-grant)")
        elif why := _why_not_started(pilot, config, now_s):
            # Slurm had something else for its GPUs, or a limit is in the way: that says nothing against sharing.
            competes = pilot.waits_for_resources or is_limit_reason(pilot.reason)
            size = len(pilot.pilot_tag.members) if competes and pilot.pilot_tag is not None else 0
            yield Regroup(job.job_id, max(1, size - 1), why)
        elif why := _why_not_beside(job, pilot, since_s, view, config):
            yield Restore(job.job_id, why)


def _waiting_members(view: View, settled: AbstractSet[int]) -> Iterator[tuple[ManagedJob, MemberState]]:
    """Yield the members that wait and no other action looks after. A request that is not known cannot be put back."""
    for job in view.having(Role.MEMBER):
        if job.state is JobState.PENDING and job.job_id not in settled:
            if job.membership is not None:
                yield job, job.membership
            else:
                log.warning("job %d: its AdminComment is damaged, the journal does not know it: cancel it", job.job_id)


def _why_not_started(pilot: Job, config: Config, now_s: float) -> str:
    """Why a waiting pilot is given up, "" while it may start."""
    if pilot.state is not JobState.PENDING:
        return ""
    if not pilot.waits_for_resources and pilot.reason != _PASSED_OVER:
        return f"Slurm does not start pilot job {pilot.job_id} ({pilot.reason})"
    late = now_s - pilot.submit_s > config.tuning.pilot_start_timeout_s
    return f"pilot job {pilot.job_id} could not start in time" if late else ""


def _why_not_beside(member: ManagedJob, pilot: Job, since_s: Mapping[int, float], view: View, config: Config) -> str:
    """Return why a member waits no longer to start beside its running pilot, "" while it may start.

    Where no member of its group runs, the GPUs idle meanwhile: Slurm's word that it found no place for it is enough.
    """
    waited_s = view.snapshot.taken_s - max(pilot.start_s, since_s.get(member.job_id, 0.0))
    group = view.group_of.get(member.job_id)
    if pilot.state is not JobState.RUNNING or group is None:
        return ""
    none_runs = all(job.state is JobState.PENDING and not job.gated for job in group.members)
    if none_runs and waited_s > _EMPTY_S and member.reason not in _BEFORE_ITS_TURN:
        return f"Slurm did not start it beside its pilot job ({member.reason})"
    return "it could not start beside its group" if waited_s > config.tuning.attach_timeout_s else ""


def _pilots(groups: Mapping[str, Intent], view: View, config: Config, since_s: Mapping[int, float]) -> Iterator[Action]:
    """End the pilots without members; `since_s` as `_members` takes it."""
    now_s = view.snapshot.taken_s
    served = {job.membership.pilot for job in view.having(Role.MEMBER) if job.membership is not None}
    ended_s: dict[int, float] = {}
    for job in view.jobs.values():
        if job.membership is not None and not job.state.is_active:
            ended_s[job.membership.pilot] = max(job.end_s, ended_s.get(job.membership.pilot, 0.0))
    empty = {  # all members have waited in vain to start beside their pilot
        group.pilot.job_id
        for group in view.running_groups
        if all(
            job.state is JobState.PENDING and _why_not_beside(job, group.pilot, since_s, view, config)
            for job in group.members
        )
    }
    for pilot in view.having(Role.PILOT):
        intent = groups.get(pilot.pilot_tag.token if pilot.pilot_tag is not None else "")
        if intent is not None and intent.state == "begun":
            continue
        # With the journal lost, the members' own tags still say which pilot they belong to.
        is_lost = intent is None or intent.state == "abandoned" or pilot.job_id in empty
        idle_s = now_s - max(pilot.start_s, pilot.submit_s, ended_s.get(pilot.job_id, 0.0))
        if why := _why_not_started(pilot, config, now_s):
            yield Cancel(pilot.job_id, why)
        elif pilot.job_id not in served - empty and (is_lost or idle_s > _PILOT_GRACE_S):
            yield Cancel(pilot.job_id, "no member of its group is left")


def _short_pilots(view: View) -> Iterator[ExtendPilot]:
    """Give pilots the time that an administrator has given one of their members."""
    for group in view.running_groups:
        pilot, changed = group.pilot, [job for job in group.members if job.has_changed_limit and job.start_s]
        last_s = max((ends_at_s(job.start_s, job.time_limit_s) for job in changed), default=0.0)
        if last_s + PILOT_EXTRA_S > ends_at_s(pilot.start_s, pilot.time_limit_s):
            limit_s = 0 if last_s == float("inf") else int(last_s - pilot.start_s) + PILOT_EXTRA_S
            ids = ", ".join(str(job.job_id) for job in changed)
            yield ExtendPilot(pilot.job_id, limit_s, f"members' time limits were changed: {ids}")


def _dry_run(dry_run: DryRun, view: View, config: Config) -> Iterator[Action]:
    """Go on with a dry run: keep its result, or give it up."""
    intent, key, target, run, result = dry_run
    if result is not None:
        yield result
        return
    if target is not None and target.role in {Role.RELEASED, Role.MEMBER} and target.state.is_active:
        yield from _overtaken(intent.token, target.job_id, view)
        return
    if run is not None and (why := _why_expired(run, intent, config, view.snapshot.taken_s)):
        yield Abandon(intent.token, why)
        yield Cancel(run.job_id, why)
        return
    # A job whose model has a profile does not wait for the new one and may end before it.
    still_wanted = intent.payload.get("again", False) and run is not None and run.state.is_active
    if not still_wanted and (target is None or not target.state.is_active):
        yield Abandon(intent.token, "the job that it measured for is gone")
        return
    if run is None and intent.submitted_job is None:
        yield Abandon(intent.token, "the dry run was never submitted")
    elif run is None or not run.state.is_active:
        state = run.state if run is not None else "forgotten by Slurm"
        yield DryRunFailed(intent.token, str(key), f"the dry run ended without a result ({state})")


def overtaken_dry_runs(dry_runs: Sequence[DryRun], view: View, job_ids: AbstractSet[int]) -> Iterator[Action]:
    """End the dry runs with the scripts of jobs that start now: no script runs twice at once."""
    for dry_run in dry_runs:
        job_id = int(dry_run.intent.payload["job_id"])
        if job_id in job_ids:
            yield from _overtaken(dry_run.token, job_id, view)


def _overtaken(token: str, job_id: int, view: View) -> Iterator[Action]:
    why = f"job {job_id}, whose script it runs, starts itself"
    yield Abandon(token, why)
    for run in view.having(Role.DRY_RUN):
        if run.dry_run == token:
            yield Cancel(run.job_id, why)


def _why_expired(run: ManagedJob, intent: Intent, config: Config, now_s: float) -> str:
    """Return why a dry run that has not started makes way for others, "" when it need not.

    That says nothing against the model: it is measured later, behind other users' models.
    """
    timeout_s = config.tuning.dry_run_start_timeout_s
    if run.state is not JobState.PENDING:
        return ""
    if run.held:
        return "the dry run is held"
    return f"the dry run has not started within {timeout_s:g} s" if now_s - intent.begun_s > timeout_s else ""


def resets(view: View, config: Config, settled: AbstractSet[int]) -> Iterator[ResetRequest]:
    """Give back their own request to jobs that were given another and do not start with it.

    A held one was left behind by a controller that died before it released the job, or was stopped or held again.
    A released one waits for a share that is not free after all: Slurm's queue decides with its own request.
    """
    for role in (Role.CANDIDATE, Role.NOT_OURS, Role.USER_HELD, Role.RELEASED):
        for job in view.having(role):
            if job.given is None or job.state is not JobState.PENDING or job.job_id in settled:
                continue
            if role is not Role.RELEASED:
                yield ResetRequest(job.job_id, "it was not started with the CPUs and memory that it was given")
            elif view.snapshot.taken_s - job.given.given_s > config.tuning.pilot_start_timeout_s:
                yield ResetRequest(job.job_id, "the CPUs and memory that it was given are not free")


def gates(view: View, config: Config, settled: AbstractSet[int]) -> Iterator[KeepGate | MoveToLicense]:
    """Say how the gates of running jobs stand, and move jobs from Muri's hold to the license where Slurm has it."""
    for job in view.having(Role.RELEASED):
        # Muri's hold is lifted, by its user or an older Muri: a later requeue or hold is not Muri's.
        running, word = job.state is JobState.RUNNING, gate_word(job)
        if (is_lifted(job) or (running and word in {None, "hold"})) and job.job_id not in settled:
            yield KeepGate(job.job_id)
    for job in view.having(Role.MEMBER):
        if is_lifted(job) and job.job_id not in settled:
            yield KeepGate(job.job_id)
    # A lease of an earlier configuration runs on for a while, but is not extended.
    if config.gate != "license" or not lease_end_s(view.snapshot):
        return
    for job in view.having(Role.MEMBER):
        if job.state is JobState.RUNNING and not is_behind_license(job) and job.gate == "license":
            yield KeepGate(job.job_id)
    for job in view.having(Role.CANDIDATE):
        if job.gate == "hold" and job.job_id not in settled:
            yield MoveToLicense(job.job_id)


def after_out_of_memory(
    job: ManagedJob, view: View, config: Config, intents: tuple[Intent, ...]
) -> AskForMore | Restore | None:
    """Return what to do with a returned member whose last run ran out of GPU memory; None if it did not.

    Where its policy plans by memory it asks for more, else it runs alone. Its last try is alone, whether
    the GPUs' memory is known or not.
    """
    run, times = job.reports.out_of_memory
    if not _is_back(job, view.snapshot.taken_s) or times < 1 or run != job.restart_count - 1:
        return None
    if job.memory_retry is not MemoryRetry.WITH_MORE:
        return Restore(job.job_id, "it ran out of GPU memory beside others")
    nodes = (node for node in view.snapshot.nodes if node.usable and job.partition in node.partitions)
    capacity_gib = max((config.gpu_mem_gib.get(node.gpu_type, 0.0) for node in nodes), default=0.0)
    asked_gib = _planned_gib(job.job_id, intents)
    gib = raised_gib(asked_gib, times - 1, capacity_gib)
    if gib is None or (times >= MAX_RAISES and not capacity_gib):
        return Restore(job.job_id, f"it ran out of GPU memory beside others {times} times")
    return AskForMore(job.job_id, gib, f"it ran out of GPU memory beside others; it asks for {gib:.1f} GiB now")


def _is_back(job: ManagedJob, now_s: float) -> bool:
    """Whether a job is in the queue as its last run left it: behind its gate, or in Slurm's delay after a requeue.

    A job that has been given to another group since is a member that waits, too, but is neither.
    """
    return job.state is JobState.PENDING and not job.held_by_others and (job.gated or _is_delayed(job, now_s))


def _is_delayed(job: ManagedJob, now_s: float) -> bool:
    """Whether Slurm makes a job wait that was requeued.

    Muri's own changes let a job start two seconds later: that is not a delay, and no change is to begin it anew.
    """
    return job.begin_s > now_s + START_DELAY_S


def _planned_gib(job_id: int, intents: tuple[Intent, ...]) -> float:
    """The memory that the newest start or join of a job counted on."""
    members = [
        (intent.begun_s, member)
        for intent in intents
        if intent.kind == GROUP
        for member in intent.payload["members"]
        if int(member["job_id"]) == job_id
    ]
    join = begun_joins(intents).get(job_id)
    if join is not None:
        members.append((join.begun_s, join.payload["member"]))
    newest = max(members, key=lambda item: item[0], default=None)
    return float(newest[1].get("gpu_mem_gib", 0.0)) if newest else 0.0


def after_pilot_end(view: View, job: ManagedJob) -> Action:
    """Return what to do with a waiting member whose pilot has ended."""
    pilot = view.jobs.get(job.membership.pilot) if job.membership is not None else None
    fault = None if pilot is None else pilot.reports.fault
    if fault is None:
        return Restore(job.job_id, "its group's pilot job has ended")
    if not fault.culprits:
        return Restore(job.job_id, f"its group could not run: {fault.cause}")
    if job.job_id in fault.culprits:
        return Restore(job.job_id, f"its group ended with an error that it may have caused: {fault.cause}")
    return ReturnToQueue(job.job_id, "", f"its group ended with an error that another member caused: {fault.cause}")


def stops_under_way(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the stops that were begun, by job id."""
    begun = (intent for intent in intents if intent.kind == PREEMPT and intent.state == "begun")
    return {int(intent.payload["job_id"]): intent for intent in begun}


def _resume_stops(view: View, begun: Mapping[int, Intent]) -> Iterator[Action]:
    """Resume stops that were begun, and return stopped jobs to the queue."""
    for job_id, intent in begun.items():
        action = _next_step(view.active.get(job_id), job_id, intent)
        if action is not None:
            yield action
    for job in (*view.having(Role.MEMBER), *view.having(Role.CANDIDATE)):
        if job.job_id not in begun and (why := _why_back(job, view.snapshot.taken_s)):
            yield ReturnToQueue(job.job_id, "", why)


def _next_step(job: ManagedJob | None, job_id: int, intent: Intent) -> Action | None:
    run = int(intent.payload["run"])
    if job is None:
        return Abandon(intent.token, f"job {job_id} ended before it was stopped")
    if job.gated or (job.state is JobState.PENDING and job.held_by_others):
        return ReturnToQueue(job_id, intent.token, str(intent.payload["why"]))
    if job.state is JobState.PENDING or job.restart_count > run:
        return Abandon(intent.token, f"job {job_id} was released, but not by Muri")
    if job.state is JobState.RUNNING:
        return Preempt(job_id, run, (str(intent.payload["why"]),), intent.token)
    return None  # it is being saved


def _why_back(job: ManagedJob, now_s: float) -> str:
    """Return why a returned job that ran before has to be made a candidate again, "" when it need not be."""
    if not _is_back(job, now_s) or not job.restart_count:
        return ""
    stopped = job.reports.stopped_run == job.restart_count - 1
    if job.role is Role.MEMBER:
        return "it was saved and stopped" if stopped else ""
    # A candidate has its own request already; it only has to be freed from Slurm's delay after a requeue.
    if _is_delayed(job, now_s):
        return "it was saved and stopped" if stopped else "it was requeued"
    return ""


def begun_joins(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the newest join of each job, closed ones included, by job id."""
    return {int(intent.payload["member"]["job_id"]): intent for intent in intents if intent.kind == JOIN}


def groups_by_pilot(intents: tuple[Intent, ...]) -> dict[int, Intent]:
    """Return the group starts by pilot job, their members and those that joined later together."""
    groups = {intent.submitted_job: intent for intent in intents if intent.kind == GROUP and intent.submitted_job}
    for intent in begun_joins(intents).values():
        group = groups.get(int(intent.payload["pilot"]))
        if group is not None and group.submitted_job is not None and intent.state == "done":
            members = [*group.payload["members"], intent.payload["member"]]
            groups[group.submitted_job] = replace(group, payload={**group.payload, "members": members})
    return groups


def _resume_joins(view: View, joined: Mapping[int, Intent]) -> Iterator[Action]:
    """Resume joins that a killed controller left unfinished."""
    for job_id, intent in joined.items():
        if intent.state != "begun":
            continue
        job, pilot = view.active.get(job_id), view.active.get(int(intent.payload["pilot"]))
        if job is None or not job.gated:
            yield Abandon(intent.token, f"job {job_id} is not waiting to join any more")
        elif was_changed(job, join_in(intent.payload, intent.token).member):
            yield Abandon(intent.token, f"the request of job {job_id} was changed meanwhile")
        elif pilot is None or pilot.state is not JobState.RUNNING:
            yield Abandon(intent.token, f"the group that job {job_id} was to join has ended")
        else:
            yield join_in(intent.payload, intent.token)
