"""The controller's books: what each cycle did, for Prometheus, and what ended members used, for Slurm's accounts.

Keeping them comes after everything else of a cycle, and a failure in it costs the cycle nothing.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from muri import __version__
from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.files import write_atomically
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller import metrics
from muri.slurm_plugin.controller.counters import Counters, Labels
from muri.slurm_plugin.controller.metrics_server import MetricsServer
from muri.slurm_plugin.controller.settlement import Settlement
from muri.slurm_plugin.controller.status import STATUS_NAME, Status
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.gateway.accounting import Accounting
from muri.slurm_plugin.gateway.base import Calls, Gateway, Requests, counted
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.history import GroupRun, Standing
from muri.slurm_plugin.records.journal import COUNTERS, Journal

log = logging.getLogger("muri.controller")


class MetricsError(MuriError):
    """Metrics cannot be served."""


class Books:
    """Counts what cycles do and settles the accounts of members that have ended.

    Attributes:
        accounting: Slurm's accounts; what is asked of them is counted.
        lease_end_s: Until when the last cycle has extended the lease; 0 where it has not.

    Args:
        journal: Where counters and open accounts are kept.
        config: The configuration.
        stop: Ends the settling between two calls.
        accounting: Slurm's accounts.
        clock: Tells the time.
    """

    def __init__(
        self,
        journal: Journal,
        config: Config,
        stop: StopFlag,
        accounting: Accounting | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        self._journal = journal
        self._config = config
        self._clock = clock
        self._requests: Requests = Counter()
        self._calls: Calls = Counter()
        self._calls_saved: Calls = Counter()
        self._calls_before: Calls = Counter()
        self.accounting: Accounting = counted(accounting or Accounting(), self._requests)
        self._settlement = Settlement(journal, self.accounting, stop, clock)
        self._actions: Counter[Labels] = Counter()
        self._phase_s: dict[str, float] = {}
        self._values: metrics.Values = {}
        self.lease_end_s = 0.0

    def counted(self, gateway: Gateway) -> Gateway:
        """Return the same way to Slurm; what is asked of it is counted."""
        self._calls = gateway.slurm_calls
        return counted(gateway, self._requests)

    @property
    def calls_of_cycle(self) -> dict[str, int]:
        """How often the gateway has called Slurm since the cycle began, by kind."""
        return dict(sorted((self._calls - self._calls_before).items()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within, time counts for a phase of the cycle."""
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
        """Within, a cycle runs; when it fails, that is counted and told."""
        self._phase_s.clear()
        self._calls_before = self._calls.copy()
        try:
            yield
        except Exception:
            with self._harmless():
                self._close(None, None)
            raise

    def close(self, decision: Decision, status: Status) -> None:
        """Close the books of a cycle that has finished."""
        with self._harmless():
            self._close(decision, status)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.warning("the metrics of this cycle are incomplete: %s: %s", type(error).__name__, error)
            log.debug("keeping the books failed", exc_info=True)

    def _close(self, decision: Decision | None, status: Status | None) -> None:
        counters = Counters(self._journal.facts(COUNTERS))
        self._add_up(counters, "failed" if decision is None else "finished")
        if decision is None or status is None:
            self._journal.replace_facts(counters.facts())
            self._forget()
            self._publish(counters, {})
            return
        runs = self._settlement.look(decision.preparation.cycle, counters)
        self._settlement.save(runs, counters)
        self._forget()
        left = self._settlement.write(runs, decision.view.snapshot.taken_s)
        if self._requests:
            self._add_requests(counters)
            self._settlement.save(left, counters)
            self._forget()
        queue = metrics.queue_values(decision, status, self._journal.intents())
        self._publish(counters, {**queue, **_told_by(status), "muri_reports_waiting": {(): _waiting(left)}})

    def _add_up(self, counters: Counters, outcome: str) -> None:
        """Add what happened since the books were last saved."""
        counters.add("cycles", (outcome,))
        counters.add("cycles", ("failed",), 0.0)  # what appears with its first failure hides that one from Prometheus
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

    def _forget(self) -> None:
        """Forget what has been saved."""
        self._requests.clear()
        self._calls_saved = self._calls.copy()
        self._actions.clear()

    def _publish(self, counters: Counters, queue: metrics.Values) -> None:
        """Write the file, and let whoever asks see the same."""
        finished_s = _modified_s(self._config.state_dir / STATUS_NAME)
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
        """Answer Prometheus at `metrics_listen`, from a thread that ends with the process; return server and thread.

        Raises:
            MetricsError: Nothing can listen there.
        """
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


def _told_by(status: Status) -> dict[str, dict[Labels, float]]:
    return {"muri_info": {(__version__, status.policy, status.gateway): 1.0}}


def _waiting(runs: Mapping[int, GroupRun]) -> float:
    return float(sum(each.standing is Standing.COUNTED for run in runs.values() for each in run.members))


def _modified_s(path: Path) -> float:
    """When a file was last written, 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
