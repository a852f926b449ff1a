"""The controller's cycle: read Slurm and the stores, decide, repair, execute, and report."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from muri.policies.types import Policy
from muri.profiler.errors import CorruptStoreError, StoreError
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.status import Status, notes_of, status_of, write_status
from muri.slurm_plugin.execute.executor import Executor
from muri.slurm_plugin.gateway.base import Gateway
from muri.slurm_plugin.planning.actions import Action
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge, dry_run_key, served_gpu_s
from muri.slurm_plugin.planning.decision import Decision, decide
from muri.slurm_plugin.planning.repairs import requested_gib
from muri.slurm_plugin.profile_use import log_set_aside, note_reuse, read_traits, watch, with_estimates
from muri.slurm_plugin.records.cluster import Snapshot
from muri.slurm_plugin.records.dry_run_failures import current
from muri.slurm_plugin.records.journal import DRY_RUN, DRY_RUN_FAILED, EXCLUSION, GPU_MEM, SOLO, Journal
from muri.slurm_plugin.records.roles import View, view_of

log = logging.getLogger("muri.controller")

# Closed intents are kept this long for `muri explain`.
_KEEP_INTENTS_S = 7 * 86400.0


def cycle_input(
    snapshot: Snapshot, store: ProfileStore | None, config: Config, journal: Journal | None = None
) -> CycleInput:
    """Gather all that a cycle decides on.

    Args:
        snapshot: The queue and the nodes.
        store: Profiles, None where there are none.
        config: The configuration.
        journal: The controller's memory; without it only profiles are known.

    Raises:
        CorruptStoreError: The store is damaged.
    """
    view = view_of(snapshot, config.partitions)
    known = {} if store is None else {profile.key: profile for profile in store.list()}
    knowledge = Knowledge(known) if journal is None else _remembered(journal, known, view, config)
    cycle = CycleInput(view, knowledge, config, () if journal is None else journal.intents())
    if store is None:
        return cycle
    stale = knowledge.stale if journal is None else frozenset(mark.key for mark in store.stale_marks())
    return with_estimates(replace(cycle, knowledge=replace(knowledge, stale=stale, traits=read_traits(store))), store)


def _remembered(journal: Journal, profiles: Mapping[ProfileKey, StageProfile], view: View, config: Config) -> Knowledge:
    """What the journal knows of jobs and models."""
    running = [intent for intent in journal.intents("begun") if intent.kind == DRY_RUN]
    failures = current(journal.facts(DRY_RUN_FAILED), view.snapshot.taken_s, config.profiling.retry_after_s)
    return Knowledge(
        profiles=profiles,
        profiling=frozenset(dry_run_key(intent, view) for intent in running),
        dry_run_jobs=frozenset(int(intent.payload["job_id"]) for intent in running),
        failures={key: (each.count, each.why) for key, each in failures.items()},
        exclusions={int(job_id): str(why) for job_id, why in journal.facts(EXCLUSION).items()},
        served_gpu_s=served_gpu_s(journal.intents()),
        gpu_mem_gib=requested_gib(journal.facts(GPU_MEM)),
    )


class Controller:
    """Runs cycles against one cluster."""

    def __init__(self, gateway: Gateway, journal: Journal, store: ProfileStore, policy: Policy, config: Config) -> None:
        """Bind the controller to its cluster, memory and policy."""
        self._gateway = gateway
        self._journal = journal
        self._store = store
        self._policy = policy
        self._config = config

    def cycle(self) -> Status:
        """Run one cycle and write the status file.

        A profile store that turns out to be damaged is set aside, and the cycle begins anew with an empty
        one: each step of a cycle can be repeated, and models are measured again.

        Raises:
            SlurmUnreachableError: slurmctld does not answer; nothing is lost, and the next cycle resumes.
        """
        try:
            return self._cycle()
        except CorruptStoreError as error:
            log_set_aside(error, self._store.start_over(datetime.now(UTC)))
            return self._cycle()

    def _cycle(self) -> Status:
        """Run one cycle.

        Repairs come first and are followed by a fresh snapshot when there were any, so that the plan
        rests on what is true now.
        """
        decision = self.decision()
        errors: list[str] = []
        if decision.repairs:
            errors += self._apply(decision, decision.repairs)
            decision = self.decision()
        errors += self._apply(decision, decision.actions)
        errors += self._keep_up(decision)
        status = self._status(decision, errors)
        write_status(self._config.state_dir / "status.json", status)
        self._tidy(decision.view)
        return status

    def _keep_up(self, decision: Decision) -> list[str]:
        """Watch for drift and count reuse; a failure here must not cost the cycle."""
        jobs, now_s = decision.preparation.request.jobs, decision.view.snapshot.taken_s
        try:
            watch(self._store, decision.view, self._config)
            note_reuse(self._store, decision.actions, jobs, self._journal.intents(), now_s)
        except CorruptStoreError:
            raise
        except StoreError as error:
            log.warning("drift is not watched in this cycle: %s", error)
            return [str(error)]
        return []

    def decision(self) -> Decision:
        """Look at the cluster and decide, changing nothing."""
        snapshot = self._gateway.snapshot()
        return decide(cycle_input(snapshot, self._store, self._config, self._journal), self._policy)

    def _apply(self, decision: Decision, actions: tuple[Action, ...]) -> list[str]:
        if not actions:
            return []
        executor = Executor(self._gateway, self._journal, self._store, self._config, self._policy, decision.view)
        executor.carry_out(actions)
        return executor.errors

    def _status(self, decision: Decision, errors: list[str]) -> Status:
        # Seen before the actions: what they change shows in Slurm at once and here at the next cycle,
        # except for who was grouped, which the journal already knows.
        estimated = notes_of(decision.preparation.request.jobs, decision.plan)
        notes: dict[int, tuple[str, ...]] = {job_id: (why,) for job_id, why in estimated.items()}
        for job_id, reasons in self._journal.facts(SOLO).items():
            notes[int(job_id)] = (*reasons, *notes.get(int(job_id), ()))
        for job_id, why in self._journal.facts(EXCLUSION).items():
            notes[int(job_id)] = (*notes.get(int(job_id), ()), f"not grouped again: {why}")
        intents = self._journal.intents()
        view = view_of(self._gateway.snapshot(), self._config.partitions) if decision.actions else decision.view
        jobs = status_of(view, decision.plan, decision.preparation.waiting, intents, notes)
        return Status(view.snapshot.taken_s, decision.plan.policy, self._gateway.name, jobs, tuple(errors))

    def _tidy(self, view: View) -> None:
        self._journal.forget_before(view.snapshot.taken_s - _KEEP_INTENTS_S)
        for name in (SOLO, EXCLUSION, GPU_MEM):
            for job_id in self._journal.facts(name):
                if int(job_id) not in view.jobs:
                    self._journal.forget_fact(name, job_id)
        facts = self._journal.facts(DRY_RUN_FAILED)
        failures = current(facts, view.snapshot.taken_s, self._config.profiling.retry_after_s)
        for key, fact in facts.items():
            if key not in failures:
                self._journal.forget_fact(DRY_RUN_FAILED, key)
            elif fact != failures[key].fact:  # of a version that did not note the time
                self._journal.set_fact(DRY_RUN_FAILED, key, failures[key].fact)
