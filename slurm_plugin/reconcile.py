"""Compare what the controller meant to do with what Slurm shows, and say what mends the difference. Pure."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from muri.profiler.records import ProfileError, ProfileKey
from muri.slurm_plugin import tags
from muri.slurm_plugin.actions import (
    Abandon,
    Action,
    Cancel,
    CarryOnGroup,
    DryRunFailed,
    KeepProfile,
    Preempt,
    Restore,
    ReturnToQueue,
)
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.faults import after_the_host
from muri.slurm_plugin.host_shares import resets
from muri.slurm_plugin.joins import begun_joins, resume_joins
from muri.slurm_plugin.journal import Intent
from muri.slurm_plugin.model import Job, JobState
from muri.slurm_plugin.out_of_memory import after_out_of_memory
from muri.slurm_plugin.preemption import resume_stops, under_way
from muri.slurm_plugin.published_profile import profile_in
from muri.slurm_plugin.view import Role, View
from muri.utc import text_of

# A host ends itself a few seconds after its last member; only a host that did not is cancelled.
_HOST_GRACE_S = 60.0


def reconcile(view: View, intents: tuple[Intent, ...], config: Config, now_s: float) -> tuple[Action, ...]:
    """Return the repairs that a cycle makes before it plans.

    Args:
        view: The snapshot by roles.
        intents: The journal's intents, closed ones included.
        config: Time-outs.
        now_s: The cycle's time, seconds since the epoch.
    """
    actions: list[Action] = []
    groups = {intent.token: intent for intent in intents if intent.kind == "group"}
    begun = [intent for intent in groups.values() if intent.state == "begun"]
    actions += [_open_group(view, intent) for intent in begun]
    moves = (*resume_stops(view, intents), *resume_joins(view, intents))
    actions += moves
    settled = {move.job_id for move in moves if isinstance(move, Preempt | ReturnToQueue)} | under_way(intents).keys()
    joined = begun_joins(intents)
    settled |= {job_id for job_id, intent in joined.items() if intent.state == "begun"}
    short_of_memory = [after_out_of_memory(view, job, intents, config) for job in view.having(Role.MEMBER)]
    returns = [action for action in short_of_memory if action is not None and action.job_id not in settled]
    actions += returns
    settled |= {action.job_id for action in returns}
    since_s = {job_id: intent.begun_s for job_id, intent in joined.items()}
    actions += _members(view, config, now_s, {intent.host_job for intent in begun}, settled, since_s)
    actions += resets(view, config, now_s, settled)
    actions += _hosts(view, groups, config, now_s)
    for intent in intents:
        if intent.kind == "dry-run" and intent.state == "begun":
            actions += _dry_run(view, intent)
    known = {intent.token for intent in intents if intent.kind == "dry-run" and intent.state == "begun"}
    for job in view.having(Role.DRY_RUN):
        if tags.token(job.admin_comment, tags.DRY_RUN_PREFIX) not in known:
            actions.append(Cancel(job.job_id, "the dry run is no longer needed"))
    actions += _half_submitted(view, now_s)
    return tuple(actions)


def _half_submitted(view: View, now_s: float) -> Iterator[Action]:
    """Cancel what a killed controller left between submitting a job of its own and tagging it.

    The command gateway submits with the tag in the job's own comment and moves it to AdminComment before
    the job is released.
    """
    for job in view.having(Role.OTHER):
        mark = tags.token(job.comment, tags.HOST_PREFIX) or tags.token(job.comment, tags.DRY_RUN_PREFIX)
        if mark is not None and job.held and job.state is JobState.PENDING and now_s - job.submit_s > _HOST_GRACE_S:
            yield Cancel(job.job_id, "its submission was cut off")


def find_host(view: View, token: str) -> Job | None:
    """Return the host job that carries a start's token, whether it still runs or not."""
    for job in view.snapshot.jobs:
        parsed = tags.parse_host(job.admin_comment)
        if parsed is not None and parsed[0] == token:
            return job
    return None


def _open_group(view: View, intent: Intent) -> Action:
    host = find_host(view, intent.token)
    if host is None:
        return Abandon(intent.token, "its host job was never accepted, or is forgotten")
    if not host.state.is_active:
        return Abandon(intent.token, f"its host job {host.job_id} has ended ({host.state})")
    return CarryOnGroup(intent.token)


def _members(
    view: View,
    config: Config,
    now_s: float,
    open_hosts: set[int | None],
    settled: AbstractSet[int],
    since_s: Mapping[int, float],
) -> Iterator[Action]:
    """Give back to Slurm the members that cannot run in their group.

    Args:
        view: The snapshot by roles.
        config: Time-outs.
        now_s: The cycle's time.
        open_hosts: Hosts of groups whose start is not finished.
        settled: Jobs that other actions look after.
        since_s: When jobs joined a group that ran already, by job id.
    """
    for job in view.having(Role.MEMBER):
        if job.state is not JobState.PENDING or job.job_id in settled:
            continue
        state = tags.parse_state(job.admin_comment)
        host = view.active(state.host) if state else None
        if job.set_aside:
            yield ReturnToQueue(job.job_id, "", "Slurm set it aside after it failed; it stays held")
        elif host is None:
            yield after_the_host(view, job, state.host if state else 0)
        elif host.job_id in open_hosts:
            continue
        elif job.held:
            yield Restore(job.job_id, "it was taken out of its group")
        elif _overdue(host, config, now_s):
            yield Restore(job.job_id, f"host job {host.job_id} could not start in time")
        elif host.state is JobState.RUNNING and _waited_s(job, host, since_s, now_s) > config.host.attach_timeout_s:
            yield Restore(job.job_id, "it could not start beside its group")


def _waited_s(job: Job, host: Job, since_s: Mapping[int, float], now_s: float) -> float:
    return now_s - max(host.start_s, since_s.get(job.job_id, 0.0))


def _overdue(host: Job, config: Config, now_s: float) -> bool:
    return host.state is JobState.PENDING and now_s - host.submit_s > config.host.start_timeout_s


def _hosts(view: View, groups: dict[str, Intent], config: Config, now_s: float) -> Iterator[Action]:
    served = {
        state.host for job in view.having(Role.MEMBER) if (state := tags.parse_state(job.admin_comment)) is not None
    }
    for host in view.having(Role.HOST):
        token = (tags.parse_host(host.admin_comment) or ("", ()))[0]
        intent = groups.get(token)
        if intent is None or intent.state == "abandoned":
            # With the journal lost, the members' own tags still say whom they belong to.
            if host.job_id not in served:
                yield Cancel(host.job_id, "no member of its group is left")
        elif intent.state == "done" and _overdue(host, config, now_s):
            yield Cancel(host.job_id, "it could not start in time")
        elif (
            intent.state == "done"
            and host.job_id not in served
            and now_s - max(host.start_s, host.submit_s) > _HOST_GRACE_S
        ):
            yield Cancel(host.job_id, "no member of its group is left")


def _dry_run(view: View, intent: Intent) -> Iterator[Action]:
    target = view.jobs.get(int(intent.payload["job_id"]))
    key = ProfileKey(**intent.payload["key"])
    run = next((job for job in view.snapshot.jobs if _is_run(job, intent)), None)
    measured = _measured(target, intent) or _measured(run, intent)
    if measured is not None:
        yield _result(intent, key, measured)
        return
    if target is not None and view.roles[target.job_id] in {Role.RELEASED, Role.MEMBER} and target.state.is_active:
        yield Abandon(intent.token, f"job {target.job_id}, whose script it runs, starts itself")
        if run is not None and run.state.is_active:
            yield Cancel(run.job_id, f"job {target.job_id}, whose script it runs, starts itself")
        return
    # A job whose model has a profile does not wait for the new one and may end before it.
    still_wanted = intent.payload.get("again", False) and run is not None and run.state.is_active
    if not still_wanted and (target is None or not target.state.is_active):
        yield Abandon(intent.token, "the job that it measured for is gone")
        return
    if run is None and intent.host_job is None:
        yield Abandon(intent.token, "the dry run was never submitted")
    elif run is None or not run.state.is_active:
        state = run.state if run is not None else "forgotten by Slurm"
        yield DryRunFailed(intent.token, str(key), f"the dry run ended without a result ({state})")


def _measured(job: Job | None, intent: Intent) -> dict[str, Any] | None:
    """What a dry run left in a job's comment."""
    told = tags.parse_json(tags.token(job.comment, tags.PROFILE_PREFIX)) if job is not None else None
    return told if told is not None and told.get("token") == intent.token else None


def _is_run(job: Job, intent: Intent) -> bool:
    return tags.token(job.admin_comment, tags.DRY_RUN_PREFIX) == intent.token


def _result(intent: Intent, key: ProfileKey, measured: dict[str, Any]) -> Action:
    if "error" in measured:
        return DryRunFailed(intent.token, str(key), str(measured["error"]))
    measured_at = text_of(intent.begun_s)
    try:
        profile = profile_in(measured, key, measured_at)
    except (ProfileError, KeyError, TypeError, ValueError, OverflowError) as error:
        return DryRunFailed(intent.token, str(key), f"the dry run sent figures that cannot be true: {error}")
    return KeepProfile(intent.token, profile, bool(measured.get("accumulates")))
