"""Carry out actions on Slurm. Every step can be repeated; the journal knows what was begun."""

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Protocol

from muri.profiler.records import StageProfile
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.execute.allocate import give_share, reset_or_release, reset_request
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.planning.actions import (
    Abandon,
    Action,
    AskForMore,
    Cancel,
    CarryOnGroup,
    DryRunFailed,
    Join,
    KeepProfile,
    MemberPlan,
    Preempt,
    ReleaseSolo,
    ResetRequest,
    Restore,
    ReturnToQueue,
    StartDryRun,
    StartGroup,
)
from muri.slurm_plugin.planning.joins import payload_of
from muri.slurm_plugin.planning.repairs import find_host
from muri.slurm_plugin.planning.slurm_requests import (
    dry_run_environment,
    dry_run_job,
    host_job,
    member_mem_mib,
    original_request,
    with_retries,
)
from muri.slurm_plugin.profile_use import DocumentSink, note_accumulates
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState
from muri.slurm_plugin.records.journal import DRY_RUN, GPU_MEM, GROUP, JOIN, PREEMPT, Intent, Journal
from muri.slurm_plugin.records.roles import Role, View, profile_key

log = logging.getLogger("muri.controller")


class ProfileSink(DocumentSink, Protocol):
    """Where measured profiles go: the profile store."""

    def put(self, profile: StageProfile) -> object:
        """Store one profile."""
        ...


class Executor:
    """Carries out one cycle's actions.

    Attributes:
        errors: What Slurm refused in this cycle; the cycle went on with the next action.
    """

    def __init__(
        self, gateway: Gateway, journal: Journal, store: ProfileSink, config: Config, view: View, now_s: float
    ) -> None:
        """Bind the executor to one cycle's view."""
        self._gateway = gateway
        self._journal = journal
        self._store = store
        self._config = config
        self._view = view
        self._now_s = now_s
        self.errors: list[str] = []

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order; a refusal costs only its own action.

        Raises:
            SlurmUnreachableError: slurmctld went away; the next cycle carries on from the journal.
        """
        for action in actions:
            try:
                self._one(action)
            except SlurmUnreachableError:
                raise
            except GatewayError as error:
                self.errors.append(f"{type(action).__name__}: {error}")
                log.warning("%s failed: %s", type(action).__name__, error)

    def _one(self, action: Action) -> None:
        match action:
            case StartGroup():
                self._start_group(action)
            case CarryOnGroup(token):
                self._carry_on(next(intent for intent in self._journal.intents("begun") if intent.token == token))
            case ReleaseSolo():
                self._unless_gone(lambda _: self._release_solo(action), action.job_id)
            case StartDryRun(job_id, _, again):
                self._start_dry_run(self._view.jobs[job_id], again)
            case Preempt() | ReturnToQueue() | AskForMore() | Join() | ResetRequest():
                self._move(action)
            case Abandon(token, why):
                log.info("start %s: taken back: %s", token, why)
                self._journal.finish(token, "abandoned")
            case Restore(job_id, why):
                self._restore(self._view.jobs[job_id], why)
            case Cancel(job_id, why):
                log.info("job %d: cancelled: %s", job_id, why)
                self._gateway.cancel(job_id)
            case KeepProfile() | DryRunFailed():
                self._end_dry_run(action)

    def _move(self, action: Preempt | ReturnToQueue | AskForMore | Join | ResetRequest) -> None:
        match action:
            case Preempt():
                preempt(self._gateway, self._journal, action, self._now_s)
            case ReturnToQueue(job_id):
                return_to_queue(self._gateway, self._journal, action, self._view.jobs[job_id])
            case AskForMore(job_id, gpu_mem_gib, why):
                self._journal.set_fact(GPU_MEM, str(job_id), gpu_mem_gib)
                return_to_queue(self._gateway, self._journal, ReturnToQueue(job_id, "", why), self._view.jobs[job_id])
            case Join():
                self._join(action)
            case ResetRequest(job_id, why):
                log.info("job %d: its own CPUs and memory again: %s", job_id, why)
                self._reset(self._view.jobs[job_id])

    def _reset(self, job: Job) -> None:
        """Undo a share. What Slurm goes on to refuse holds no job for ever."""
        given = tags.parse_given(job.admin_comment)
        tried = given is not None and self._now_s - given.given_s > self._config.host.start_timeout_s
        waits_for_us = self._view.roles[job.job_id] is Role.CANDIDATE
        (reset_or_release if tried and waits_for_us else reset_request)(self._gateway, job)

    def _end_dry_run(self, action: KeepProfile | DryRunFailed) -> None:
        match action:
            case KeepProfile(token, profile, accumulates):
                log.info("profile of %s: stored, %.1f ms per iteration", profile.key, 1000 * profile.iteration_s)
                self._store.put(profile)
                note_accumulates(self._store, profile, accumulates=accumulates)
                self._journal.forget_fact("dry-run-failed", str(profile.key))
                self._journal.finish(token, "done")
            case DryRunFailed(token, key, why):
                self._dry_run_failed(token, key, why)

    def _unless_gone(self, call: Callable[[int], None], job_id: int) -> None:
        try:
            call(job_id)
        except NoSuchJobError:
            log.info("job %d: gone already", job_id)

    def _release_solo(self, action: ReleaseSolo) -> None:
        reasons = list(action.reasons)
        if action.share is not None:
            why = give_share(self._gateway, self._view.jobs[action.job_id], action.share, self._now_s)
            reasons += [f"it starts with its own request after all: {why}"] if why else []
        log.info("job %d: released alone: %s", action.job_id, "; ".join(reasons))
        self._journal.set_fact("solo", str(action.job_id), reasons)
        self._gateway.release(action.job_id)

    def _start_group(self, action: StartGroup) -> None:
        token = secrets.token_hex(6)
        ids = [member.job_id for member in action.members]
        log.info("group %s on %s: jobs %s, γ = %.2f", token, action.node, ids, action.efficiency)
        self._journal.begin(token, GROUP, asdict(action), self._now_s)
        try:
            host = self._gateway.submit(host_job(action, token, self._config))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self._journal.finish(token, "abandoned")
            for job_id in ids:
                self._journal.set_fact("bar", str(job_id), f"Slurm refused its group's host job: {error}")
            raise
        self._journal.set_host(token, host)
        for member in action.members:
            self._make_member(member, host, action.node, self._view.jobs[member.job_id])
        self._journal.finish(token, "done")

    def _carry_on(self, intent: Intent) -> None:
        host = find_host(self._view, intent.token)
        if host is None:
            return
        log.info("group %s: carrying on with its start, host job %d", intent.token, host.job_id)
        self._journal.set_host(intent.token, host.job_id)
        for fields in intent.payload["members"]:
            member = MemberPlan(**{**fields, "original": tags.Original(**fields["original"])})
            job = self._view.active(member.job_id)
            if job is not None and job.state is JobState.PENDING and job.held:
                self._make_member(member, host.job_id, intent.payload["node"], job)
        self._journal.finish(intent.token, "done")

    def _make_member(self, member: MemberPlan, host: int, node: str, job: Job) -> None:
        """Change and release one member; Slurm starts it as soon as the host has started."""
        state = tags.MemberState(host, member.original, member.accumulate_steps)
        change = JobChange(
            gpu_request="gres/gpu:0",
            required_nodes=node,
            cpu_count=member.cpu_count,
            cpus_per_task=1,
            dependency=f"after:{host}",
            mem_per_node_mib=member_mem_mib(member.original),
            time_limit_s=member.time_limit_s or None,
            admin_comment=with_retries(
                tags.with_token(job.admin_comment, tags.STATE_PREFIX, tags.format_state(state)), self._config.policy
            ),
        )
        try:
            self._gateway.modify(member.job_id, change)
            self._gateway.release(member.job_id)
        except NoSuchJobError:
            log.info("job %d: gone before its group started", member.job_id)
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self.errors.append(f"job {member.job_id}: Slurm refused to change it: {error}")
            self._journal.set_fact("bar", str(member.job_id), f"Slurm refused to change its request: {error}")
            log.warning("job %d: not made a member: %s", member.job_id, error)

    def _join(self, action: Join) -> None:
        log.info("job %d joins group of host job %d: %s", action.member.job_id, action.host, "; ".join(action.reasons))
        token = action.token or secrets.token_hex(6)
        if not action.token:
            self._journal.begin(token, JOIN, payload_of(action), self._now_s)
        self._journal.set_host(token, action.host)
        prepare_group(self._gateway, self._view, action)
        self._make_member(action.member, action.host, action.node, self._view.jobs[action.member.job_id])
        self._journal.finish(token, "done")

    def _restore(self, job: Job, why: str) -> None:
        """Undo `_make_member` and let the job run alone."""
        log.info("job %d: runs alone from now on: %s", job.job_id, why)
        self._journal.set_fact("bar", str(job.job_id), why)
        restore_request(self._gateway, job)

    def _start_dry_run(self, job: Job, again: bool) -> None:
        key = profile_key(job, self._view.snapshot.nodes)
        try:
            script = self._gateway.batch_script(job.job_id)
        except NoSuchJobError:
            return
        environment = dry_run_environment(self._gateway.job_environment(job.job_id), job.user)
        token = secrets.token_hex(6)
        log.info("dry run %s: measuring %s with the script of job %d", token, key, job.job_id)
        self._journal.begin(token, DRY_RUN, {"job_id": job.job_id, "key": asdict(key), "again": again}, self._now_s)
        try:
            run = self._gateway.submit(dry_run_job(job, key, token, script, environment, self._config))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self._dry_run_failed(token, str(key), f"Slurm refused it: {error}")
            return
        self._journal.set_host(token, run)

    def _dry_run_failed(self, token: str, key: str, why: str) -> None:
        log.warning("dry run of %s failed: %s", key, why)
        count, _ = self._journal.facts("dry-run-failed").get(key, (0, ""))
        self._journal.set_fact("dry-run-failed", key, [count + 1, why])
        self._journal.finish(token, "done")


def restore_request(gateway: Gateway, job: Job) -> None:
    """Give a pending member its original request back and release it, unless Slurm set it aside.

    Raises:
        GatewayError: Slurm refused a step.
    """
    state = tags.parse_state(job.admin_comment)
    try:
        gateway.hold(job.job_id)
        if state is not None:
            gateway.modify(job.job_id, original_request(job))
        if not job.set_aside:
            gateway.release(job.job_id)
    except NoSuchJobError:
        log.info("job %d: gone already", job.job_id)


def prepare_group(gateway: Gateway, view: View, action: Join) -> None:
    """Tell the host whom it serves from now on, and give it and its members the time that sharing takes.

    Raises:
        GatewayError: Slurm refused to tell the host: it might end before its new member.
    """
    host = view.jobs[action.host]
    token, members = tags.parse_host(host.admin_comment) or ("", ())
    known = tuple(dict.fromkeys((*members, action.member.job_id)))
    comment = tags.with_token(host.admin_comment, tags.HOST_PREFIX, tags.format_host(token, known))
    gateway.modify(action.host, JobChange(admin_comment=comment, time_limit_s=action.host_limit_s or None))
    for job_id, limit_s in action.others:
        job = view.active(job_id)
        if job is None or not limit_s or limit_s <= job.time_limit_s:
            continue
        try:
            gateway.modify(job_id, JobChange(time_limit_s=limit_s))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("job %d: its time limit stays %d s: %s", job_id, job.time_limit_s, error)


def preempt(gateway: Gateway, journal: Journal, action: Preempt, now_s: float) -> None:
    """Stop a running job: Slurm sends SIGTERM, waits for it to be saved (KillWait), and keeps it held.

    Raises:
        GatewayError: Slurm refused; the job runs on.
    """
    why = "; ".join(action.reasons)
    log.info("job %d: stopped, to go on later: %s", action.job_id, why)
    token = action.token or secrets.token_hex(6)
    if not action.token:
        intent = {"job_id": action.job_id, "run": action.run, "why": why, "served_gpu_s": action.served_gpu_s}
        journal.begin(token, PREEMPT, intent, now_s)
    try:
        gateway.requeue_hold(action.job_id)
    except NoSuchJobError:
        journal.finish(token, "abandoned")


def return_to_queue(gateway: Gateway, journal: Journal, action: ReturnToQueue, job: Job) -> None:
    """Make a stopped job a candidate again: held, with the request that its user wrote.

    Raises:
        GatewayError: Slurm refused; the next cycle tries again.
    """
    log.info("job %d: back in the queue: %s", action.job_id, action.why)
    try:
        gateway.hold(action.job_id)
        gateway.modify(action.job_id, original_request(job))
    except NoSuchJobError:
        log.info("job %d: gone already", action.job_id)
    if action.token:
        journal.finish(action.token, "done")
