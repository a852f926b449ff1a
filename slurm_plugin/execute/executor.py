"""Carry out actions on Slurm. Every step can be repeated; the journal knows what was begun."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from muri.policies.types import Policy
from muri.profiler.errors import CorruptStoreError
from muri.profiler.sensitivity import SENSITIVITIES
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.execute.apply import CycleCutShortError
from muri.slurm_plugin.execute.gate import (
    close_gate,
    give_share,
    is_refusal,
    move_to_license,
    note_open,
    open_gate,
    reset_or_release,
    reset_request,
    restore_request,
    stop,
    unless_gone,
)
from muri.slurm_plugin.gateway.base import (
    GatewayError,
    JobGateway,
    NoSuchJobError,
    SlurmUnreachableError,
    job_started,
    passing_over,
)
from muri.slurm_plugin.planning import actions
from muri.slurm_plugin.planning.actions import Action, join_payload, members_in, started
from muri.slurm_plugin.planning.plan_actions import started_plain
from muri.slurm_plugin.planning.repairs import find_pilot
from muri.slurm_plugin.planning.slurm_requests import (
    GroupPlace,
    array_environment,
    changed_pilot,
    dry_run_environment,
    dry_run_job,
    given_comment,
    in_own_place,
    join_change,
    longer_limit_change,
    member_change,
    original_request,
    pilot_job,
    placed,
    was_changed,
)
from muri.slurm_plugin.profile_use import ProfileSink, note_accumulates
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records import journal as facts
from muri.slurm_plugin.records.cluster import JobChange, JobState
from muri.slurm_plugin.records.comment_tags import MemoryRetry
from muri.slurm_plugin.records.limits import is_limit_refusal
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, is_lifted, profile_key

log = logging.getLogger("muri.controller")


class Executor:
    """Carries out one cycle's actions."""

    def __init__(
        self,
        gateway: JobGateway,
        journal: facts.Journal,
        store: ProfileSink,
        config: Config,
        policy: Policy,
        view: View,
        errors: list[str],
    ) -> None:
        """Bind the executor to one cycle's view; `errors` takes the refusals and failures."""
        self._gateway = gateway
        self._journal = journal
        self._store = store
        self._config = config
        self._policy = policy
        self._view = view
        self._now_s = view.snapshot.taken_s
        # Pilots that were told of a new member in this cycle: the next one must not replace it.
        self._pilots: dict[int, ManagedJob] = {}
        self._steps: Mapping[type[Action], Callable[[Any], None]] = {
            actions.StartGroup: self._start_group,
            actions.ResumeGroup: self._resume_group,
            actions.Abandon: self._abandon,
            actions.ReleaseSolo: self._release_solo,
            actions.ResetRequest: self._reset,
            actions.Restore: self._restore,
            actions.Cancel: self._cancel,
            actions.Preempt: self._preempt,
            actions.KeepGate: self._keep_gate,
            actions.ExtendPilot: self._extend_pilot,
            actions.MoveToLicense: self._move_to_license,
            actions.ReturnToQueue: self._return_to_queue,
            actions.AskForMore: self._ask_for_more,
            actions.Regroup: self._regroup,
            actions.Join: self._join,
            actions.StartDryRun: self._start_dry_run,
            actions.KeepProfile: self._keep_profile,
            actions.DryRunFailed: self._dry_run_failed,
            actions.NotMeasured: self._not_measured,
            actions.SplitTasks: self._split_tasks,
            actions.StandBack: self._stand_back,
        }
        self.errors = errors
        self.outcomes: Counter[tuple[str, ...]] = Counter()  # Of each kind: "done", "refused" by Slurm, or "failed"

    def carry_out(self, action: Action) -> None:
        """Carry out one action; a refusal costs only this one.

        Raises:
            SlurmUnreachableError: slurmctld went away; the next cycle resumes from the journal.
            CycleCutShortError: The controller was told to stop, or the cycle takes too long; the same.
            facts.JournalError: The journal cannot be written; without it nothing may be begun.
            CorruptStoreError: The profile store is damaged.
        """
        name, outcome = type(action).__name__, "failed"
        try:
            self._steps[type(action)](action)
            outcome = "done"
        except (SlurmUnreachableError, CycleCutShortError, facts.JournalError, CorruptStoreError):
            raise
        except GatewayError as error:
            outcome = "refused"
            self.errors.append(f"{name}: {error}")
            log.warning("%s failed: %s", name, error)
        except Exception as error:
            self._set_aside(action, error)
        finally:
            self.outcomes[name, outcome] += 1

    def _set_aside(self, action: Action, error: Exception) -> None:
        """Keep an action that failed for another reason than Slurm's from being tried in the same way for ever."""
        why = f"{type(action).__name__} failed: {type(error).__name__}: {error}"
        self.errors.append(why)
        log.exception("%s failed; the cycle goes on", type(action).__name__)
        for job_id in started((action,)):
            self._journal.set_fact(facts.EXCLUSION, str(job_id), why)
        if isinstance(action, actions.KeepProfile) and action.token:
            self._dry_run_failed(actions.DryRunFailed(action.token, str(action.profile.key), why))

    def _start_group(self, action: actions.StartGroup) -> None:
        token = self._journal.new_token()
        ids = [member.job_id for member in action.members]
        log.info("group %s on %s: jobs %s, γ = %.2f", token, action.node, ids, action.efficiency)
        self._journal.begin(token, facts.GROUP, asdict(action), self._now_s)
        try:
            thread = next((member.job_id for member in action.members if member.isolation == "thread"), None)
            submitted = self._gateway.job_environment(thread) if thread is not None and action.python else None
            pilot = self._gateway.submit(pilot_job(action, token, self._config, submitted))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self._journal.finish(token, "abandoned")
            if len(ids) == 1:
                log.warning("job %d starts without a pilot job: %s", ids[0], error)
                self.errors.append(f"the pilot job of job {ids[0]}: {error}")
                self._release_solo(started_plain(action, f"Slurm refused its pilot job: {error}"))
                return
            # For a while a smaller group is tried where a limit was in the way, else none.
            largest = len(ids) - 1 if is_limit_refusal(str(error)) else 1
            refusal = [largest, f"Slurm refused a pilot job: {error}", self._now_s]
            for job_id in map(str, ids):
                self._journal.set_fact(facts.LARGEST_GROUP, job_id, refusal)
            self._start_oldest(ids, error)
            raise
        self._journal.set_submitted_job(token, pilot)
        place = GroupPlace(pilot, action.node, action.reasons, action.oversubscribe)
        found = [(member, self._make_member(member, place)) for member in action.members]
        empty = all(why for _, why in found)
        for member, why in found:
            if why:
                self._undo(member, place, why, starts=empty)
        if empty:  # a pilot job without members would keep the GPUs idle
            self._cancel(actions.Cancel(pilot, "none of its jobs has become a member"))
        self._journal.finish(token, "done")

    def _start_oldest(self, ids: list[int], error: GatewayError) -> None:
        """Start a group's oldest job alone after Slurm has refused the pilot job, so that the GPUs do not stay idle."""
        oldest = self._view.oldest(ids)
        try:
            self._release_solo(
                actions.ReleaseSolo(oldest.job_id, (f"it starts alone: Slurm refused a pilot job: {error}",))
            )
        except SlurmUnreachableError:
            raise
        except GatewayError as refusal:
            self.errors.append(f"job {oldest.job_id}: {refusal}")

    def _undo(self, member: actions.MemberPlan, place: GroupPlace, why: str, *, starts: bool) -> None:
        """Give a job that Slurm refused to make a member all of its own request back.

        A call that failed may have changed the job all the same.
        """
        job = self._view.jobs[member.job_id]
        as_member = replace(job, membership=tags.MemberState(place.pilot, member.original))
        try:
            with unless_gone(member.job_id):
                (open_gate if starts else close_gate)(self._gateway, job, original_request(as_member, why))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self.errors.append(f"job {member.job_id}: {error}")
            if is_limit_refusal(str(error)):
                self._journal.set_fact(facts.RELEASE_REFUSED, str(member.job_id), [str(error), self._now_s])

    def _resume_group(self, action: actions.ResumeGroup) -> None:
        pilot = find_pilot(self._view, action.token)
        if pilot is None:
            return
        intent = next(intent for intent in self._journal.intents("begun") if intent.token == action.token)
        log.info("group %s: resuming its start, pilot job %d", action.token, pilot.job_id)
        self._journal.set_submitted_job(action.token, pilot.job_id)
        place = GroupPlace(pilot.job_id, intent.payload["node"], tuple(intent.payload["reasons"]), pilot.oversubscribe)
        for member in members_in(intent.payload):
            job = self._view.active.get(member.job_id)
            if job is None:
                continue
            if not job.gated:
                if is_lifted(job):  # Slurm had lifted the hold before the call that was to lift it failed
                    note_open(self._gateway, job)
                continue
            if was_changed(job, member):
                log.info("job %d: not made a member: its request was changed meanwhile", member.job_id)
                continue
            if why := self._make_member(member, place):
                self._undo(member, place, why, starts=False)
        self._journal.finish(action.token, "done")

    def _make_member(self, member: actions.MemberPlan, place: GroupPlace) -> str:
        """Change and release a member, which Slurm starts after its pilot; return why it has not become one, or ""."""
        job = self._view.jobs[member.job_id]
        retry = MemoryRetry.WITH_MORE if self._policy.retries_out_of_memory else MemoryRetry.ALONE
        snapshot = self._view.snapshot
        partition = snapshot.limits.partition(job.partition)
        way = snapshot.gpu_removal.way_for(job.gpu_request)
        if not way.request:
            self.errors.append(f"job {member.job_id}: its GPUs cannot be taken away now: {way.why}")
            return f"its GPUs cannot be taken away now: {way.why}"
        change = member_change(
            member, place, job, no_gpus=way.request, mem_per_gpu=partition.mem_per_gpu, memory_retry=retry
        )
        try:
            open_gate(self._gateway, job, change)
        except NoSuchJobError:
            log.info("job %d: gone before its group started", member.job_id)
            return "it is gone"
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            if job_started(error):  # what Slurm told of it was older than its start
                log.info("job %d: has started meanwhile", member.job_id)
                return "it has started"
            self.errors.append(f"job {member.job_id}: Slurm refused to change it: {error}")
            why = f"Slurm refused to change its request: {error}"
            if not is_limit_refusal(str(error)):
                self._journal.set_fact(facts.EXCLUSION, str(member.job_id), why)
            log.warning("job %d: not made a member: %s", member.job_id, error)
            return why
        return ""

    def _split_tasks(self, action: actions.SplitTasks) -> None:
        job = self._view.jobs[action.job_id]
        log.info("job array %d: tasks %s get job ids of their own", job.array_job_id, list(action.tasks))
        with unless_gone(job.job_id):
            try:
                self._gateway.split_tasks(job, action.tasks)
            except GatewayError as error:
                if is_refusal(error):  # the tasks that wait start alone then, as soon as one of them can
                    why = f"Slurm refused to give its array's tasks job ids of their own: {error}"
                    self._journal.set_fact(facts.EXCLUSION, str(job.job_id), why)
                raise

    def _stand_back(self, action: actions.StandBack) -> None:
        job = self._view.jobs[action.job_id]
        change = in_own_place(job) if action.place is None else placed(job, action.place)
        with passing_over(job_started), unless_gone(job.job_id):
            self._gateway.modify(job.job_id, change)

    def _abandon(self, action: actions.Abandon) -> None:
        log.info("start %s: taken back: %s", action.token, action.why)
        self._journal.finish(action.token, "abandoned")

    def _release_solo(self, action: actions.ReleaseSolo) -> None:
        reasons, job = list(action.reasons), self._view.jobs[action.job_id]
        comment = job.admin_comment
        try:
            if action.share is not None:
                why = give_share(self._gateway, job, action.share, self._now_s)
                comment = comment if why else given_comment(job, action.share, self._now_s)
                reasons += [f"it starts with its own request after all: {why}"] if why else []
            log.info("job %d: released alone: %s", action.job_id, "; ".join(reasons))
            open_gate(self._gateway, job, comment=tags.with_plan(comment, tags.Planned(tuple(reasons))))
        except NoSuchJobError:
            log.info("job %d: gone already", action.job_id)
        except GatewayError as error:
            if is_refusal(error) and is_limit_refusal(str(error)):
                self._journal.set_fact(facts.RELEASE_REFUSED, str(action.job_id), [str(error), self._now_s])
            raise

    def _reset(self, action: actions.ResetRequest) -> None:
        """Undo a share. If Slurm keeps refusing the change, the job is released with its share."""
        log.info("job %d: its own CPUs and memory again: %s", action.job_id, action.why)
        job = self._view.jobs[action.job_id]
        tried = job.given is not None and self._now_s - job.given.given_s > self._config.tuning.pilot_start_timeout_s
        (reset_or_release if tried and job.role is Role.CANDIDATE else reset_request)(self._gateway, job)

    def _restore(self, action: actions.Restore) -> None:
        """Undo `_make_member` and let the job run alone."""
        log.info("job %d: runs alone from now on: %s", action.job_id, action.why)
        self._journal.set_fact(facts.EXCLUSION, str(action.job_id), action.why)
        restore_request(self._gateway, self._view.jobs[action.job_id], facts.not_grouped_again(action.why))

    def _cancel(self, action: actions.Cancel) -> None:
        log.info("job %d: cancelled: %s", action.job_id, action.why)
        self._gateway.cancel(action.job_id)

    def _preempt(self, action: actions.Preempt) -> None:
        """Stop a running job: Slurm sends SIGTERM, waits for it to be saved (KillWait), and keeps it in the queue."""
        why = "; ".join(action.reasons)
        log.info("job %d: stopped, to resume later: %s", action.job_id, why)
        token = action.token or self._journal.new_token()
        if not action.token:
            intent = {"job_id": action.job_id, "run": action.run, "why": why, "served_gpu_s": action.served_gpu_s}
            self._journal.begin(token, facts.PREEMPT, intent, self._now_s)
        try:
            stop(self._gateway, self._view.jobs[action.job_id])
        except NoSuchJobError:
            self._journal.finish(token, "abandoned")

    def _keep_gate(self, action: actions.KeepGate) -> None:
        job = self._view.jobs[action.job_id]
        with unless_gone(action.job_id):
            (note_open if job.state is JobState.PENDING else close_gate)(self._gateway, job)

    def _extend_pilot(self, action: actions.ExtendPilot) -> None:
        log.info("pilot job %d: its time limit is %d s now: %s", action.job_id, action.limit_s, action.why)
        with unless_gone(action.job_id):
            self._gateway.modify(action.job_id, JobChange(time_limit_s=action.limit_s))

    def _move_to_license(self, action: actions.MoveToLicense) -> None:
        log.info("job %d: waits for Muri's license from now on, not held", action.job_id)
        with unless_gone(action.job_id):
            move_to_license(self._gateway, self._view.jobs[action.job_id])

    def _return_to_queue(self, action: actions.ReturnToQueue) -> None:
        """Make a stopped job a candidate again, with the request that its user wrote."""
        log.info("job %d: back in the queue: %s", action.job_id, action.why)
        job = self._view.jobs[action.job_id]
        with unless_gone(action.job_id):
            close_gate(self._gateway, job, original_request(job))
        if action.token:
            self._journal.finish(action.token, "done")

    def _ask_for_more(self, action: actions.AskForMore) -> None:
        self._journal.set_fact(facts.GPU_MEM, str(action.job_id), action.gpu_mem_gib)
        self._return_to_queue(actions.ReturnToQueue(action.job_id, "", action.why))

    def _regroup(self, action: actions.Regroup) -> None:
        self._journal.set_fact(facts.LARGEST_GROUP, str(action.job_id), [action.largest_group, action.why, self._now_s])
        self._return_to_queue(actions.ReturnToQueue(action.job_id, "", action.why))

    def _join(self, action: actions.Join) -> None:
        log.info(
            "job %d joins group of pilot job %d: %s", action.member.job_id, action.pilot, "; ".join(action.reasons)
        )
        token = action.token or self._journal.new_token()
        if not action.token:
            self._journal.begin(token, facts.JOIN, join_payload(action), self._now_s)
        self._journal.set_submitted_job(token, action.pilot)
        # A pilot that does not know its new member might end before it, so a refusal here fails the join.
        pilot = self._pilots.get(action.pilot, self._view.jobs[action.pilot])
        change = join_change(pilot, action, self._view)
        self._gateway.modify(action.pilot, change)
        self._pilots[action.pilot] = changed_pilot(pilot, change)
        self._extend_partners(action)
        place = GroupPlace(action.pilot, action.node, action.reasons, action.oversubscribe)
        if why := self._make_member(action.member, place):
            self._undo(action.member, place, why, starts=False)
        self._journal.finish(token, "done")

    def _extend_partners(self, action: actions.Join) -> None:
        """Give the members that a job joins the time that sharing takes."""
        for job_id, limit_s in action.others:
            job = self._view.active.get(job_id)
            if job is None or not limit_s or limit_s <= job.time_limit_s:
                continue
            try:
                self._gateway.modify(job_id, longer_limit_change(job, limit_s))
            except SlurmUnreachableError:
                raise
            except GatewayError as error:
                log.warning("job %d: its time limit stays %d s: %s", job_id, job.time_limit_s, error)

    def _start_dry_run(self, action: actions.StartDryRun) -> None:
        job = self._view.jobs[action.job_id]
        key = profile_key(job, self._view.node_index)
        environment = dry_run_environment(self._gateway.job_environment(job.job_id), job.user) | array_environment(job)
        token = self._journal.new_token()
        log.info("dry run %s: measuring %s with the script of job %d", token, key, job.job_id)
        payload = {"job_id": job.job_id, "key": asdict(key), "again": action.again, "sweep_cpus": action.sweep_cpus}
        if job.facts is not None:
            payload["environment"] = job.facts.environment
        self._journal.begin(token, facts.DRY_RUN, payload, self._now_s)
        try:
            run = self._gateway.submit(dry_run_job(job, token, environment, self._config, action.sweep_cpus))
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            self._dry_run_failed(actions.DryRunFailed(token, str(key), f"Slurm refused it: {error}"))
            self.outcomes["DryRunFailed", "done"] += 1
            return
        self._journal.set_submitted_job(token, run)

    def _keep_profile(self, action: actions.KeepProfile) -> None:
        profile = action.profile
        log.info("profile of %s: stored, %.1f ms per iteration", profile.key, 1000 * profile.iteration_s)
        self._store.put(profile)
        if action.sensitivity is not None:
            log.info("sensitivity of %s: %d CPUs are enough", profile.key, action.sensitivity.cpu.saturating_cpus)
            self._store.put_document(SENSITIVITIES, action.sensitivity.to_document())
        note_accumulates(self._store, profile, accumulates=action.accumulates)
        if action.environment:
            told = [str(profile.key), profile.key.user, action.environment, action.python]
            self._journal.set_fact(facts.PYTHON, f"{profile.key} {action.environment}", told)
        self._journal.forget_fact(facts.DRY_RUN_FAILED, str(profile.key))
        if action.token:
            self._journal.finish(action.token, "done")

    def _dry_run_failed(self, action: actions.DryRunFailed) -> None:
        log.warning("dry run of %s failed: %s", action.key, action.why)
        self._note_failure(action.key, action.why, self._now_s)
        self._journal.finish(action.token, "done")

    def _not_measured(self, action: actions.NotMeasured) -> None:
        log.warning("%s could not be measured in a group: %s", action.key, action.why)
        self._note_failure(action.key, action.why, action.at_s)

    def _note_failure(self, key: str, why: str, at_s: float) -> None:
        earlier = facts.current(self._journal.facts(facts.DRY_RUN_FAILED), self._now_s).get(key)
        failure = facts.Failure(1 if earlier is None else earlier.count + 1, why, at_s)
        self._journal.set_fact(facts.DRY_RUN_FAILED, key, failure.fact)
