"""The controller's books: counters of cycles for Prometheus, and reports of ended members for Slurm's accounts.

They come after everything else of a cycle, which succeeds without them. slurmctld refuses to change a job that has
ended, so a member's report goes to slurmdbd (`sacctmgr modify job`): one call each, tried again in the next cycle.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from pydantic import TypeAdapter

from muri import __version__
from muri.errors import MuriError
from muri.files import write_atomically
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import metrics
from muri.slurm_plugin.controller.history import (
    GroupRun,
    MemberRun,
    Service,
    Standing,
    forgotten,
    gaps,
    looked_up,
    noted,
    updated,
    with_accounts,
    with_profiles,
)
from muri.slurm_plugin.controller.metrics import Counters, Labels, MetricsServer
from muri.slurm_plugin.controller.status import STATUS_NAME, Status
from muri.slurm_plugin.gateway.accounting import Accounting, NoAccountingError
from muri.slurm_plugin.gateway.base import Calls, Gateway, GatewayError, NoSuchJobError, Requests, counted
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.gathered import Gathered
from muri.slurm_plugin.records.journal import COUNTERS, GROUP_RUN, SERVICE, Journal, by_job
from muri.slurm_plugin.records.roles import View
from muri.slurm_plugin.records.usage import Run, with_report

if TYPE_CHECKING:
    from muri.slurm_plugin.controller.assemble import Surroundings

log = logging.getLogger("muri.controller")


def note_service(journal: Journal, accounting: Accounting, view: View) -> None:
    """Record the running jobs, and look up runs that the controller has missed: one call at the end of a cycle."""
    before = journal.facts(SERVICE)
    known = noted(by_job(before, Service.of), view)
    missed = gaps(known, view, journal.intents())
    names = [view.jobs[job_id].name_in_slurm for job_id in missed]
    if missed and (runs := _runs_of(accounting, names, "earlier runs of jobs")) is not None:
        known = with_accounts(known, missed, runs, view)
    facts = {str(job_id): service.fact for job_id, service in known.items()}
    if facts != before:
        journal.replace_facts({SERVICE: facts})


def _runs_of(accounting: Accounting, names: Iterable[str | int], subject: str) -> list[Run] | None:
    """Return the accounts' records; () where Slurm keeps none, None when that has to wait for the next cycle."""
    try:
        return accounting.runs_of(names)
    except NoAccountingError:
        return []
    except GatewayError as error:
        log.warning("%s are looked up in the next cycle: %s", subject, error)
        return None


_GROUP: Final = TypeAdapter(GroupRun)

_GIVE_UP_S: Final = 86400.0

_NO_RECORD_FOR_S: Final = 1800.0
"""So long after a job's end its record may still be on its way to the database."""

_WRITING_S: Final = 30.0
"""Most seconds of a cycle for writing reports; the rest follows in the next one."""


def _count(run: GroupRun, member: MemberRun, counters: Counters, now_s: float) -> GroupRun:
    report = member.report(run, run.gpu_s(now_s).get(member.job_id, 0.0))
    shared = bool(report.partners)
    counters.add("members_ended", (report.basis or "unknown" if shared else "unshared",))
    if shared and report.is_counted:
        counters.add("member_gpu_seconds_alone", (), report.alone_gpu_s)
        counters.add("member_gpu_seconds_shared", (), report.gpu_s)
    comment = with_report(member.admin_comment, report)
    return run.with_member(replace(member, admin_comment=comment, standing=Standing.COUNTED))


class MetricsError(MuriError):
    """Metrics cannot be served."""


class Books:
    """Counts cycles' actions and requests, and settles the accounts of members that have ended.

    Attributes:
        accounting: Slurm's accounts, with requests counted.
        lease_end_s: End of the lease as the last cycle has extended it; 0 where it has not.
    """

    def __init__(self, journal: Journal, config: Config, around: "Surroundings") -> None:
        self._journal = journal
        self._config = config
        self._stop = around.stop
        self._clock = around.clock
        self._requests: Requests = Counter()
        self._calls: Calls = Counter()
        self._calls_saved: Calls = Counter()
        self._calls_before: Calls = Counter()
        self.accounting: Accounting = counted(around.accounting or Accounting(), self._requests)
        self._actions: Counter[Labels] = Counter()
        self._phase_s: dict[str, float] = {}
        self._values: metrics.Values = {}
        self.lease_end_s = 0.0

    def counted(self, gateway: Gateway) -> Gateway:
        """Return the same gateway with requests counted."""
        self._calls = gateway.slurm_calls
        return counted(gateway, self._requests)

    @property
    def calls_of_cycle(self) -> dict[str, int]:
        """The gateway's calls to Slurm since the cycle began, by kind."""
        return dict(sorted((self._calls - self._calls_before).items()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time of a phase of the cycle."""
        begun_s = self._clock()
        try:
            yield
        finally:
            self._phase_s[name] = self._phase_s.get(name, 0.0) + self._clock() - begun_s

    def note_actions(self, outcomes: Mapping[Labels, int]) -> None:
        """Count actions by their names and outcomes."""
        self._actions.update(outcomes)

    @contextmanager
    def cycle(self) -> Iterator[None]:
        """Surround a cycle; a failed one is counted and published."""
        self._phase_s.clear()
        self._calls_before = self._calls.copy()
        try:
            yield
        except Exception:
            self.close(None, None)
            raise

    def close(self, decision: Decision | None, status: Status | None) -> None:
        """Close the books of a cycle; both are None after one that has failed. A failure here costs no cycle."""
        try:
            self._close(decision, status)
        except Exception as error:
            log.warning("the metrics of this cycle are incomplete: %s: %s", type(error).__name__, error)
            log.debug("keeping the books failed", exc_info=True)

    def _close(self, decision: Decision | None, status: Status | None) -> None:
        counters = Counters(self._journal.facts(COUNTERS))
        self._add_up(counters, "failed" if decision is None else "finished")
        if decision is None or status is None:
            self._save(counters)
            self._publish(counters, {})
            return
        runs = self._look(decision.preparation.cycle, counters)
        self._save(counters, runs)
        left = self._write(runs, decision.view.snapshot.taken_s)
        if self._requests:
            self._add_requests(counters)
            self._save(counters, left)
        waiting = sum(member.standing is Standing.COUNTED for run in left.values() for member in run.members)
        self._publish(
            counters,
            {
                **metrics.queue_values(decision, status, self._journal.intents()),
                "muri_info": {(__version__, status.policy, status.gateway): 1.0},
                "muri_reports_waiting": {(): float(waiting)},
            },
        )

    def _look(self, cycle: Gathered, counters: Counters) -> dict[int, GroupRun]:
        """Bring the open accounts up to Slurm's records, and count members that have ended since the last cycle."""
        view, now_s, telemetry_s = cycle.view, cycle.now_s, cycle.config.tuning.telemetry_s
        before = by_job(self._journal.facts(GROUP_RUN), _GROUP.validate_python)
        runs = updated(before, view, self._journal.intents(), now_s)
        runs = with_profiles(runs, view, cycle.knowledge, view.node_index)
        lost = forgotten({pilot: runs[pilot] for pilot in before}, view)
        if lost and (records := _runs_of(self.accounting, lost, "jobs that slurmctld has forgotten")) is not None:
            runs = looked_up(runs, lost, records, now_s)
        for pilot, run in runs.items():
            if run.end and (pilot not in before or not before[pilot].end):
                counters.add("groups_ended", (run.end,))
            for member in run.due(now_s, telemetry_s):
                runs[pilot] = _count(runs[pilot], member, counters, now_s)
        return runs

    def _save(self, counters: Counters, runs: Mapping[int, GroupRun] | None = None) -> None:
        """Write counters, and accounts if there are any, in one step, and begin anew: nothing is counted twice."""
        facts = counters.facts()
        if runs is not None:
            running = {pilot: run for pilot, run in runs.items() if not run.is_over}
            facts[GROUP_RUN] = {str(pilot): _GROUP.dump_python(run, mode="json") for pilot, run in running.items()}
        self._journal.replace_facts(facts)
        self._requests.clear()
        self._calls_saved = self._calls.copy()
        self._actions.clear()

    def _write(self, runs: Mapping[int, GroupRun], now_s: float) -> dict[int, GroupRun]:
        """Write the reports of members that were counted; return the accounts with those closed that were written."""
        left = dict(runs)
        end_s = self._clock() + _WRITING_S
        members = ((run.pilot, member) for run in runs.values() for member in run.members)
        for pilot, member in members:
            if member.standing is not Standing.COUNTED:
                continue
            if self._stop.is_set() or self._clock() > end_s:
                break
            try:
                closed = self._is_written(member, now_s)
            except GatewayError as error:
                log.warning("reports of ended jobs wait for the next cycle: %s", error)
                break
            if closed:
                left[pilot] = left[pilot].with_member(replace(member, standing=Standing.CLOSED))
        return left

    def _is_written(self, member: MemberRun, now_s: float) -> bool:
        """Write one report; return whether it needs no further try."""
        age_s = now_s - member.end_s
        try:
            self.accounting.set_admin_comment(member.job_id, member.admin_comment, member.name)
        except NoAccountingError:
            return True
        except NoSuchJobError:
            return age_s > _NO_RECORD_FOR_S
        except GatewayError:
            if age_s > _GIVE_UP_S:
                log.warning("job %d: its report is given up", member.job_id)
                return True
            raise
        return True

    def _add_up(self, counters: Counters, outcome: str) -> None:
        """Add the events since the books were last saved."""
        counters.add("cycles", (outcome,))
        counters.add("cycles", ("failed",), 0.0)  # a series that begins with its first failure hides it from Prometheus
        if self.lease_end_s:
            counters.set("lease_end_timestamp_seconds", self.lease_end_s)
        self._add_requests(counters)
        for action, count in self._actions.items():
            counters.add("actions", action, count)

    def _add_requests(self, counters: Counters) -> None:
        for request, count in self._requests.items():
            counters.add("slurm_requests", request, count)
        for kind, count in (self._calls - self._calls_saved).items():
            counters.add("slurm_calls", (kind,), count)

    def _publish(self, counters: Counters, queue: metrics.Values) -> None:
        """Write the metrics file, and serve the same values."""
        try:
            finished_s = (self._config.state_dir / STATUS_NAME).stat().st_mtime
        except OSError:
            finished_s = 0.0
        self._values = {
            **metrics.counter_values(counters),
            **queue,
            "muri_cycle_seconds": {(phase,): seconds for phase, seconds in self._phase_s.items()},
            "muri_interval_seconds": {(): self._config.interval_s},
            "muri_last_cycle_timestamp_seconds": {(): finished_s} if finished_s else {},
        }
        if self._config.metrics_file:
            write_atomically(Path(self._config.metrics_file), metrics.text_of(self._values), 0o644)

    def serve(self) -> tuple[MetricsServer, Thread]:
        """Answer Prometheus at `metrics_listen` from a thread that ends with the process; or raise a MetricsError."""
        host, _, port = self._config.metrics_listen.rpartition(":")
        try:
            server = MetricsServer(host, int(port), metrics.registry_of(lambda: self._values))
        except OSError as error:
            where = self._config.metrics_listen
            raise MetricsError(f"metrics_listen: cannot listen at {where}: {error.strerror or error}") from error
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        log.info("metrics are served at http://%s/metrics", self._config.metrics_listen)
        return server, thread
