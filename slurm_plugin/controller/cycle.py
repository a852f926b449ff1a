"""The controller's cycle: read Slurm and the stores, decide, repair, execute, and report."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from muri.inherited import garbage_collector_paused
from muri.policies.types import Policy
from muri.profiler.errors import CorruptStoreError, StoreError
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.books import Books, note_service
from muri.slurm_plugin.controller.history import Service, had_before, noted, saved_gpu_s, served_gpu_s
from muri.slurm_plugin.controller.status import Status, notes_of, report, status_of
from muri.slurm_plugin.execute.apply import CycleCutShortError, InterruptibleGateway, Left, apply
from muri.slurm_plugin.execute.executor import Executor
from muri.slurm_plugin.execute.gate import close_gate
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, SlurmUnreachableError
from muri.slurm_plugin.gateway.gpu_removal import GpuRemovalFile
from muri.slurm_plugin.planning.actions import Action
from muri.slurm_plugin.planning.asking import Proposals, proposed_moves
from muri.slurm_plugin.planning.cycle_input import (
    Claim,
    Claims,
    CycleInput,
    Knowledge,
    KnownPythons,
    MeasuredPython,
    claim_facts,
    dry_run_key,
    first_submits,
    noted_claims,
)
from muri.slurm_plugin.planning.decision import Decision, Quarantine, by_user, decide
from muri.slurm_plugin.planning.plan_actions import shares_gpus
from muri.slurm_plugin.profile_use import (
    learn_pairs,
    log_set_aside,
    read_traits,
    watch,
    with_estimates,
    without_doubtful,
)
from muri.slurm_plugin.records.cluster import JobState, Snapshot
from muri.slurm_plugin.records.journal import (
    CLAIMS,
    DRY_RUN,
    DRY_RUN_FAILED,
    EXCLUSION,
    FIRST_SUBMIT,
    GPU_MEM,
    LARGEST_GROUP,
    PAIR,
    PYTHON,
    RELEASE_REFUSED,
    SERVICE,
    CorruptJournalError,
    Intent,
    Journal,
    by_job,
    current,
    not_grouped_again,
    readable,
)
from muri.slurm_plugin.records.roles import ManagedJob, Role, View, is_behind_license, view_of

if TYPE_CHECKING:
    from muri.slurm_plugin.controller.assemble import Surroundings

log = logging.getLogger("muri.controller")

# Closed intents are kept this long for `muri explain`.
_KEEP_INTENTS_S = 7 * 86400.0

_KEEP_REFUSALS_S = 3600.0

_MOST_NAMED = 5

_Read = TypeVar("_Read")


def cycle_input(
    snapshot: Snapshot, store: ProfileStore | None, config: Config, journal: Journal | None = None
) -> CycleInput:
    """Gather all that a cycle decides on.

    Raises:
        CorruptStoreError: The store is damaged.
    """
    view = view_of(snapshot, config.partitions)
    known = {} if store is None else {profile.key: profile for profile in store.list()}
    without = Knowledge(known, pythons=KnownPythons.of((), config.node_python))
    intents = () if journal is None else journal.intents()
    knowledge = without if journal is None else _remembered(journal, intents, known, view, config)
    cycle = CycleInput(view, knowledge, config, intents)
    if store is None:
        return cycle
    marked_at = {} if journal is None else {mark.key: mark.since for mark in store.stale_marks()}
    knowledge = replace(knowledge, stale=frozenset(marked_at), marked_at=marked_at, traits=read_traits(store))
    return with_estimates(without_doubtful(replace(cycle, knowledge=knowledge), store), store)


def _remembered(
    journal: Journal,
    intents: tuple[Intent, ...],
    profiles: Mapping[ProfileKey, StageProfile],
    view: View,
    config: Config,
) -> Knowledge:
    """What the journal knows of jobs and models."""
    running = [intent for intent in intents if intent.kind == DRY_RUN and intent.state == "begun"]
    now_s = view.snapshot.taken_s
    failures = current(journal.facts(DRY_RUN_FAILED), now_s)
    measuring = tuple(readable(running, lambda run: (dry_run_key(run, view), int(run.payload["job_id"]))))
    return Knowledge(
        profiles=profiles,
        profiling=frozenset(key for key, _ in measuring),
        dry_run_jobs=frozenset(job_id for _, job_id in measuring),
        failures={key: (each.count, each.why) for key, each in failures.items()},
        failed_s={key: each.last_s for key, each in failures.items()},
        largest_group=_lately(journal.facts(LARGEST_GROUP), now_s, lambda size, why: (max(1, int(size)), str(why))),
        exclusions=by_job(journal.facts(EXCLUSION), str),
        served_gpu_s=served_gpu_s(noted(by_job(journal.facts(SERVICE), Service.of), view), view, intents),
        saved_gpu_s=saved_gpu_s(view, intents),
        claims=noted_claims(_claims(journal), view),
        first_submit_s=first_submits(by_job(journal.facts(FIRST_SUBMIT), float), view),
        gpu_mem_gib=by_job(journal.facts(GPU_MEM), float),
        refused_releases=_lately(journal.facts(RELEASE_REFUSED), now_s, str),
        pythons=KnownPythons.of(
            readable(journal.facts(PYTHON).values(), lambda told: MeasuredPython(*map(str, told))), config.node_python
        ),
    )


def _claims(journal: Journal) -> Claims:
    """How far users' jobs had kept to their stated durations by the last cycle."""
    return dict(readable(journal.facts(CLAIMS).items(), lambda fact: (fact[0], tuple(map(Claim.of, fact[1])))))


def _lately(facts: Mapping[str, Any], now_s: float, read: Callable[..., _Read]) -> dict[int, _Read]:
    """Read what was noted of jobs not long ago, by job id; after a while it is tried again."""
    found = by_job(facts, lambda fact: (read(*fact[:-1]), float(fact[-1])))
    return {job_id: value for job_id, (value, at_s) in found.items() if now_s - at_s < _KEEP_REFUSALS_S}


def _gate_is_open(member: ManagedJob) -> bool:
    """Whether a member that waits for the license once it is back in the queue would not do so now."""
    return member.gate == "license" and not is_behind_license(member)


class PolicyFor(Protocol):
    """Gives the policy for a PriorityType of Slurm."""

    def __call__(self, priority_type: str, *, stopping: bool = False) -> Policy:
        """With `stopping` as if running jobs might be stopped, whatever the configuration says."""


class Controller:
    """Runs cycles against one cluster.

    Attributes:
        books: Take note of what cycles do.
        someone_waits: Whether a job waited for a plan when gates were last looked at.
        has_more: Whether the last cycle has left something to the next one.
    """

    def __init__(
        self,
        gateway: Gateway,
        journal: Journal,
        store: ProfileStore,
        policy_for: PolicyFor,
        config: Config,
        around: "Surroundings",
        *,
        look_only: bool = False,
    ) -> None:
        """Bind the controller to its cluster and memory."""
        self._gpu_removal = GpuRemovalFile(config.state_dir, config.partitions, may_try=not look_only)
        self._around = around
        self._stop = around.stop
        self.books = Books(journal, config, around)
        self._gateway = self.books.counted(gateway)
        self._journal = journal
        self._store = store
        self._policy_for = policy_for
        self._config = config
        self._read_s = 0.0
        self._members_start = False
        self._proposals = Proposals()
        self.someone_waits = False
        self.has_more = False

    def cycle(self) -> Status:
        """Run one cycle and write the status file.

        A profile store or a journal that turns out to be damaged is set aside, and the cycle begins anew with an empty
        one: each step of a cycle can be repeated, models are measured again, and what was done to jobs stands in their
        own AdminComment. A cycle that has lost its profiles starts nothing: without one, a member would be released
        alone, without its GPUs, if Slurm's answer were older than the group.

        Raises:
            SlurmUnreachableError: slurmctld does not answer; nothing is lost, and the next cycle resumes.
        """
        with self.books.cycle(), garbage_collector_paused():
            try:
                status = self._cycle()
            except CorruptStoreError as error:
                log_set_aside(error, self._store.start_over(datetime.now(UTC)))
                status = self._cycle()
            except CorruptJournalError as error:
                self._journal.start_over(error, datetime.now(UTC))
                status = self._cycle()
        self._store.is_replacement = False
        return status

    def _cycle(self) -> Status:
        """Run one cycle.

        Repairs come first and are followed by a fresh snapshot when there were any, so that the plan
        rests on what is true now.
        """
        decision = self.decision()
        errors: list[str] = []
        unrepaired = Left()
        if decision.repairs:
            with self.books.phase("repair"):
                unrepaired = self._apply(decision, decision.repairs, errors)
            if not self._stop.is_set():
                decision = self.decision()
        with self.books.phase("start"):
            if self._store.is_replacement:
                left = Left(decision.actions, "the profile store was damaged")
            else:
                left = self._apply(decision, decision.actions, errors)
        self.has_more = bool(unrepaired.actions or left.actions)
        errors += self._keep_up(decision)
        self._note_facts(decision)
        note_service(self._journal, self.books.accounting, decision.view)
        self._tidy(decision.view)
        errors += self._extend_lease()
        view = self._view_after(decision)
        self._members_start = any(_gate_is_open(job) for job in view.having(Role.MEMBER))
        status = self._status(decision, view, left.notes(), errors)
        report(self._config, status, decision.view)
        self.books.close(decision, status)
        return status

    def close_gates(self) -> bool:
        """Close the gates of members that have started since the last cycle.

        A member that loses its group before that is not kept from starting anew, without GPUs. Gates that are open when
        the controller is told to stop are closed after the next cycle.

        Returns:
            Whether members have yet to start, or their gates to be closed.
        """
        if not self._members_start:
            return False
        view = view_of(self._gateway.queue(), self._config.partitions)
        gateway = InterruptibleGateway(self._gateway, self._stop, self._config.tuning.cycle_limit_s, self._around.clock)
        self.someone_waits = bool(view.having(Role.CANDIDATE))
        open_members = [job for job in view.having(Role.MEMBER) if _gate_is_open(job)]
        for job in (job for job in open_members if job.state is JobState.RUNNING):
            try:
                close_gate(gateway, job)
            except CycleCutShortError:
                return True
            except SlurmUnreachableError:
                raise
            except GatewayError as error:
                log.warning("job %d: its gate stays open: %s", job.job_id, error)
        return any(job.state is JobState.PENDING for job in open_members)

    def _extend_lease(self) -> list[str]:
        """Keep waiting jobs behind the license for another while.

        This comes last: a controller that cannot decide any more, or cannot carry out its decisions because its
        journal cannot be written or its profiles are lost again and again, lets the lease end, and Slurm starts every
        job by itself.
        """
        if self._config.gate != "license" or self._stop.is_set() or self._store.is_replacement:
            return []
        end_s = self._read_s + self._config.lease_s
        try:
            self._gateway.extend_lease(end_s)
            self.books.lease_end_s = end_s
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("new jobs start as ordinary jobs: %s", error)
            return [f"new jobs start as ordinary jobs: {error}"]
        return []

    def _keep_up(self, decision: Decision) -> list[str]:
        """Watch for drift and learn of pairs; a failure here must not cost the cycle."""
        try:
            watch(self._store, decision.view, self._config)
            policy = self._policy_for(decision.view.snapshot.limits.priority_type)
            learn_pairs(self._store, self._journal, decision.preparation.cycle, policy)
        except CorruptStoreError:
            raise
        except StoreError as error:
            log.warning("drift is not watched in this cycle: %s", error)
            return [str(error)]
        return []

    def decision(self) -> Decision:
        """Look at the cluster and decide, changing nothing."""
        with self.books.phase("read"):
            snapshot = self._gateway.snapshot()
            self._read_s = snapshot.taken_s
            nodes = self._around.gres_conf.with_places(self._gateway, snapshot.nodes)
            snapshot = replace(snapshot, nodes=nodes, gpu_removal=self._gpu_removal.current(self._gateway, snapshot))
        policy = self._policy_for(snapshot.limits.priority_type)
        with self.books.phase("plan"):
            return decide(cycle_input(snapshot, self._store, self._config, self._journal), policy)

    def _apply(self, decision: Decision, actions: tuple[Action, ...], errors: list[str]) -> Left:
        """Carry out actions and return those that are left; what Slurm refuses is added to `errors`.

        Repairs and starts have half of a cycle's time and calls each: slow repairs of one user's jobs never hold up
        the starts. The time for deciding does not count, or a queue that is long to plan would never be served.
        """
        if not actions:
            return Left()
        config, tuning = self._config, self._config.tuning
        gateway = InterruptibleGateway(
            self._gateway, self._stop, tuning.cycle_limit_s / 2, self._around.clock, tuning.cycle_calls / 2
        )
        policy = self._policy_for(decision.view.snapshot.limits.priority_type)
        executor = Executor(gateway, self._journal, self._store, config, policy, decision.view, errors)
        try:
            left = apply(actions, executor.carry_out, gateway)
        finally:
            self.books.note_actions(executor.outcomes)
        if left.actions:
            log.warning("%s", left)
            errors.append(str(left))
        return left

    def _view_after(self, decision: Decision) -> View:
        """The queue once the decision has been applied, read anew where something was to change."""
        if not decision.actions or self._stop.is_set():
            return decision.view
        return view_of(self._gateway.queue(), self._config.partitions)

    def _status(self, decision: Decision, view: View, left: Mapping[int, str], errors: list[str]) -> Status:
        policy = self._policy_for(decision.view.snapshot.limits.priority_type)
        shares, dry_runs = shares_gpus(policy), self._config.profiling.starts_dry_runs and policy.profile_use != "none"
        # Of others an estimate decides nothing, and no measurement follows.
        concerned = [job for job in decision.preparation.request.jobs if dry_runs or (shares and job.may_share)]
        estimated = notes_of(concerned, decision.plan)
        unreadable = [f"job {each.job_id} is left alone: {each.why}" for each in decision.view.snapshot.unreadable]
        errors += unreadable[:_MOST_NAMED]
        if more := len(unreadable[_MOST_NAMED:]):
            errors.append(f"{more} more jobs are left alone, whose records cannot be read either")
        untrue = by_user(decision.untrue, decision.view)
        for line in untrue:
            log.warning("%s", line)
        errors += (*untrue, *decision.quarantine.faults(decision.view))
        served, doubts = decision.preparation.cycle.knowledge.served_gpu_s, decision.preparation.cycle.doubts()
        notes: dict[int, tuple[str, ...]] = {}
        for job_id, why in (
            *left.items(),
            *decision.quarantine.jobs.items(),
            *decision.untrue.items(),
            *{**estimated, **self._proposed(decision)}.items(),
            *((job_id, not_grouped_again(why)) for job_id, why in by_job(self._journal.facts(EXCLUSION), str).items()),
            *((job_id, had_before(gpu_s)) for job_id, gpu_s in served.items()),
            *((job_id, doubt.why) for job_id, doubt in doubts.items()),
        ):
            notes[job_id] = (*notes.get(job_id, ()), why)
        jobs = tuple(
            replace(job, duration_factor=doubts[job.job_id].times) if job.job_id in doubts else job
            for job in status_of(view, decision.plan, decision.preparation.waiting, notes)
        )
        name, calls = decision.plan.policy, self.books.calls_of_cycle
        return Status(view.snapshot.taken_s, name, self._gateway.name, jobs, tuple(errors), calls)

    def _proposed(self, decision: Decision) -> dict[int, str]:
        """What to tell jobs that could move if running jobs were stopped; a failure here must not cost the cycle."""
        if self._config.preemption.enabled or decision.quarantine != Quarantine():
            return {}
        policy_for, snapshot = self._policy_for, decision.view.snapshot
        request, restart_s = decision.preparation.request, self._config.tuning.restart_s
        if not self._proposals.is_recent(snapshot.taken_s):
            try:
                moves = proposed_moves(
                    request, decision.view, restart_s, lambda: policy_for(snapshot.limits.priority_type, stopping=True)
                )
            except Exception as error:  # a site's own policy may raise anything
                log.warning("proposals to move jobs are left out: %s", error)
                moves = {}
            self._proposals = Proposals(snapshot.taken_s, moves)
        return self._proposals.notes(decision.view)

    def _note_facts(self, decision: Decision) -> None:
        known = decision.preparation.cycle.knowledge
        facts = {str(job_id): time_s for job_id, time_s in known.first_submit_s.items()}
        if facts != self._journal.facts(FIRST_SUBMIT):
            self._journal.replace_facts({FIRST_SUBMIT: facts})

        if known.claims != _claims(self._journal):
            self._journal.replace_facts({CLAIMS: claim_facts(known.claims)})

    def _tidy(self, view: View) -> None:
        self._journal.forget_before(view.snapshot.taken_s - _KEEP_INTENTS_S)
        present = {str(job_id) for job_id in view.jobs}
        for name in (EXCLUSION, GPU_MEM, LARGEST_GROUP, PAIR, RELEASE_REFUSED):
            for job_id in self._journal.facts(name):
                if job_id not in present:
                    self._journal.forget_fact(name, job_id)
        pythons = self._journal.facts(PYTHON)
        stored = {str(profile.key) for profile in self._store.list()} if pythons else set()
        for subject, told in pythons.items():
            if not (isinstance(told, list) and told and str(told[0]) in stored):
                self._journal.forget_fact(PYTHON, subject)
        facts = self._journal.facts(DRY_RUN_FAILED)
        failures = current(facts, view.snapshot.taken_s)
        for key, fact in facts.items():
            if key not in failures:
                self._journal.forget_fact(DRY_RUN_FAILED, key)
            elif fact != failures[key].fact:  # of a version that did not note the time
                self._journal.set_fact(DRY_RUN_FAILED, key, failures[key].fact)
