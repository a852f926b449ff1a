"""The controller's cycle: snapshot, reconcile, plan, diff, journal, apply."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from muri.errors import MuriError
from muri.policies.cycle.validation import RequestError
from muri.policies.types import Plan, Policy
from muri.profiler.errors import CorruptStoreError, StoreError
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.profiler.upkeep import StaleMark
from muri.slurm_plugin.actions import Action, ReleaseSolo
from muri.slurm_plugin.apply import Executor
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.damage import log_set_aside
from muri.slurm_plugin.drift_watch import watch
from muri.slurm_plugin.estimated import notes_of, with_estimates, without_started
from muri.slurm_plugin.gateway import Gateway
from muri.slurm_plugin.joins import find_joins
from muri.slurm_plugin.journal import Intent, Journal
from muri.slurm_plugin.known_traits import read_traits
from muri.slurm_plugin.model import Snapshot
from muri.slurm_plugin.out_of_memory import FACT as GPU_MEM_FACT
from muri.slurm_plugin.out_of_memory import requested_gib
from muri.slurm_plugin.plain_sharing import with_measured_pairs
from muri.slurm_plugin.planning import Knowledge, Preparation, actions_of, prepare
from muri.slurm_plugin.preemption import served_gpu_s
from muri.slurm_plugin.reconcile import reconcile
from muri.slurm_plugin.reuse import note_reuse
from muri.slurm_plugin.running import Settled, running_units, settle, stop_actions
from muri.slurm_plugin.sharing import ask_to_share
from muri.slurm_plugin.status import Status, status_of, write_status
from muri.slurm_plugin.view import Role, View, view_of

log = logging.getLogger("muri.controller")

# Closed intents are kept this long for `muri explain`.
_KEEP_INTENTS_S = 7 * 86400.0


LOCK_NAME: Final = "controller.lock"
"""In the state directory; its time of change tells since when it is held."""


class AnotherControllerError(MuriError):
    """Another controller is at work; this one has nothing to do, which is no failure."""

    exit_code = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a cycle would do, before it does anything.

    Attributes:
        view: What it looked at.
        repairs: Actions that mend what an earlier cycle left unfinished.
        preparation: What the policy was asked.
        plan: What the policy answered.
        actions: What follows from the plan.
    """

    view: View
    repairs: tuple[Action, ...]
    preparation: Preparation
    plan: Plan
    actions: tuple[Action, ...]


def decide(
    snapshot: Snapshot, intents: tuple[Intent, ...], know: Knowledge, policy: Policy, config: Config
) -> Decision:
    """Make a cycle's decision. Pure: the snapshot's own time is the clock."""
    view = view_of(snapshot, config.partitions)
    repairs = reconcile(view, intents, config, snapshot.taken_s)
    preparation = prepare(view, know, config, snapshot.taken_s, policy.profile_use)
    know = preparation.know
    if policy.supports_packing:
        shared, preparation = ask_to_share(policy, preparation, view, know, config)
        plan, starts, stops = shared.plan, shared.actions, stop_actions((), preparation.request, view)
    else:
        settled, preparation = ask(policy, preparation, view, know, config)
        plan, stops = settled.plan, stop_actions(settled.stops, preparation.request, view)
        starts = actions_of(plan, view, know, config) + find_joins(view, plan, know, config, snapshot.taken_s)
    why = ("Muri does not serve its partition, or cannot read how many GPUs it asks for",)
    releases = tuple(ReleaseSolo(job.job_id, why) for job in view.having(Role.NOT_OURS))
    runs = without_started(preparation, starts)
    # Jobs need not wait for what measures a model again: it comes behind them in Slurm's queue.
    new, again = tuple(run for run in runs if not run.again), tuple(run for run in runs if run.again)
    actions = stops + releases + new + starts + again
    return Decision(view, repairs, preparation, plan, actions)


def ask(
    policy: Policy, preparation: Preparation, view: View, know: Knowledge, config: Config
) -> tuple[Settled, Preparation]:
    """Ask the policy, with what runs if it may stop running jobs."""
    request = preparation.request
    if config.preemption.enabled:
        request = replace(request, running=running_units(view, know, config, request.now_s))
    request = with_measured_pairs(request, policy, know.traits.pairs)
    preparation = replace(preparation, request=request)
    try:
        return settle(policy.plan(request), request), preparation
    except RequestError as error:
        if not request.running:
            raise
        log.warning("running jobs are left alone in this cycle: %s", error)
    request = replace(request, running=())
    return settle(policy.plan(request), request), replace(preparation, request=request)


def knowledge(journal: Journal | None, profiles: Sequence[StageProfile], marks: Sequence[StaleMark] = ()) -> Knowledge:
    """Gather what a cycle knows beyond the snapshot; without a journal only the profiles."""
    known = {profile.key: profile for profile in profiles}
    if journal is None:
        return Knowledge(known)
    running = [intent for intent in journal.intents("begun") if intent.kind == "dry-run"]
    return Knowledge(
        profiles=known,
        stale=frozenset(mark.key for mark in marks),
        profiling=frozenset(ProfileKey(**intent.payload["key"]) for intent in running),
        targets=frozenset(int(intent.payload["job_id"]) for intent in running),
        failures={key: (int(count), str(why)) for key, (count, why) in journal.facts("dry-run-failed").items()},
        bars={int(job_id): str(why) for job_id, why in journal.facts("bar").items()},
        served_gpu_s=served_gpu_s(journal.intents()),
        gpu_mem_gib=requested_gib(journal.facts(GPU_MEM_FACT)),
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
            SlurmUnreachableError: slurmctld does not answer; nothing is lost, the next cycle carries on.
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
        decision = self.decide()
        errors: list[str] = []
        if decision.repairs:
            errors += self._apply(decision, decision.repairs)
            decision = self.decide()
        errors += self._apply(decision, decision.actions)
        errors += self._keep_up(decision)
        status = self._status(decision, errors)
        write_status(self._config.state_dir / "status.json", status)
        self._tidy(decision.view)
        return status

    def _keep_up(self, decision: Decision) -> list[str]:
        """Look for drift and count, which is worth no cycle."""
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

    def decide(self) -> Decision:
        """Look at the cluster and decide, changing nothing."""
        snapshot = self._gateway.snapshot()
        know = knowledge(self._journal, self._store.list(), self._store.stale_marks())
        know = replace(know, traits=read_traits(self._store))
        know = with_estimates(know, view_of(snapshot, self._config.partitions), self._store, self._config)
        return decide(snapshot, self._journal.intents(), know, self._policy, self._config)

    def _apply(self, decision: Decision, actions: tuple[Action, ...]) -> list[str]:
        if not actions:
            return []
        now_s = decision.view.snapshot.taken_s
        executor = Executor(self._gateway, self._journal, self._store, self._config, decision.view, now_s)
        executor.carry_out(actions)
        return executor.errors

    def _status(self, decision: Decision, errors: list[str]) -> Status:
        # Seen before the actions: what they change shows in Slurm at once and here at the next cycle,
        # except for who was grouped, which the journal already knows.
        estimated = notes_of(decision.preparation.request.jobs, decision.plan)
        notes: dict[int, tuple[str, ...]] = {job_id: (why,) for job_id, why in estimated.items()}
        for job_id, reasons in self._journal.facts("solo").items():
            notes[int(job_id)] = (*reasons, *notes.get(int(job_id), ()))
        for job_id, why in self._journal.facts("bar").items():
            notes[int(job_id)] = (*notes.get(int(job_id), ()), f"not grouped again: {why}")
        intents = self._journal.intents()
        view = view_of(self._gateway.snapshot(), self._config.partitions) if decision.actions else decision.view
        jobs = status_of(view, decision.plan, decision.preparation.waiting, intents, notes)
        return Status(view.snapshot.taken_s, decision.plan.policy, self._gateway.name, jobs, tuple(errors))

    def _tidy(self, view: View) -> None:
        self._journal.forget_before(view.snapshot.taken_s - _KEEP_INTENTS_S)
        for name in ("solo", "bar", GPU_MEM_FACT):
            for job_id in self._journal.facts(name):
                if int(job_id) not in view.jobs:
                    self._journal.forget_fact(name, job_id)


@contextmanager
def only_one(state_dir: Path) -> Iterator[None]:
    """Hold the controller's lock.

    Raises:
        AnotherControllerError: Another controller holds it.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AnotherControllerError(
                f"another controller (process {holder}) is at work on {state_dir}; nothing to do"
            ) from error
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def run_for_ever(controller: Controller, interval_s: float, stop: "StopFlag") -> None:
    """Run a cycle every `interval_s` seconds until told to stop.

    A cycle that fails is logged and the next one tried: jobs stay as they are meanwhile.
    """
    while not stop.is_set():
        begun_s = time.monotonic()
        try:
            controller.cycle()
        except MuriError as error:
            log.error("cycle skipped: %s", error)  # noqa: TRY400
        except Exception:  # a fault of Muri's own; the watchdog goes by finished cycles, not by this process
            log.exception("cycle skipped")
        stop.wait(max(0.0, interval_s - (time.monotonic() - begun_s)))


class StopFlag(Protocol):
    """The part of threading.Event that the loop needs."""

    def is_set(self) -> bool:
        """Whether to stop now."""
        ...

    def wait(self, timeout: float) -> bool:
        """Sleep until told to stop, at most `timeout` seconds."""
        ...
