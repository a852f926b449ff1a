"""The metrics: names, help texts and values, counters that outlive the process, and the answer to Prometheus.

Nothing here asks Slurm. Values of labels come from short lists, most of them in this code, never from users' texts or
job ids. Any host that reaches the address may connect, which must not disturb the controller.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from muri.clock import GIB, MIB
from muri.files import Newcomers
from muri.profiler.records import STAGES
from muri.slurm_plugin.controller.status import JobStatus, Status
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.repairs import groups_by_pilot
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import member_report, node_use
from muri.slurm_plugin.records.comment_tags import Mode
from muri.slurm_plugin.records.journal import COUNTERS, Intent
from muri.slurm_plugin.records.nodes import names_in
from muri.slurm_plugin.records.roles import RunningGroup, View

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

Labels = tuple[str, ...]
"""Values of a metric's labels, in their order."""

_SEPARATOR: Final = "/"
"""Between labels' values in the journal; no value holds one."""


class Counters:
    """Sums by metric and labels, read from the journal's facts; a damaged one begins anew."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._values: dict[str, dict[Labels, float]] = {
            name: {
                tuple(text.split(_SEPARATOR)) if text else (): float(value)
                for text, value in (values.items() if isinstance(values, dict) else ())
                if isinstance(value, int | float) and value >= 0
            }
            for name, values in facts.items()
        }

    def add(self, name: str, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to one sum."""
        values = self._values.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a value that has no labels."""
        self._values[name] = {(): value}

    def of(self, name: str) -> dict[Labels, float]:
        """Return the sums of one metric by labels, in alphabetical order."""
        return dict(sorted(self._values.get(name, {}).items()))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the sums for the journal."""
        return {
            COUNTERS: {
                name: {_SEPARATOR.join(labels): value for labels, value in values.items()}
                for name, values in self._values.items()
            }
        }


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, to which Prometheus adds `_total` for a counter, its kind, help text, and label names."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name that queries use."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


METRICS: Final = (
    Metric(
        "muri_info", "gauge", "Always 1; labels name the version, policy and gateway", ("version", "policy", "gateway")
    ),
    Metric("muri_last_cycle_timestamp_seconds", "gauge", "When the last cycle finished"),
    Metric("muri_interval_seconds", "gauge", "Time between two cycles (interval_s)"),
    Metric("muri_lease_end_timestamp_seconds", "gauge", "When Slurm starts all waiting jobs unless a cycle follows"),
    Metric("muri_cycles", "counter", "Cycles: finished, failed", ("outcome",)),
    Metric("muri_cycle_seconds", "gauge", "Time that the last cycle took in each phase", ("phase",)),
    Metric("muri_slurm_requests", "counter", "Requests of the controller to Slurm", ("request", "outcome")),
    Metric("muri_slurm_calls", "counter", "Calls of Slurm: RPCs and commands, by purpose", ("kind",)),
    Metric("muri_actions", "counter", "Actions of cycles: done, refused by Slurm, failed", ("action", "outcome")),
    Metric("muri_jobs", "gauge", "Jobs submitted with --muri that wait or run", ("state", "reason")),
    Metric("muri_groups", "gauge", "Running groups of two or more jobs", ("mode",)),
    Metric("muri_group_members", "gauge", "Jobs in running groups"),
    Metric("muri_group_efficiency", "gauge", "Mean interleaving efficiency γ of the running groups", ("figure",)),
    Metric("muri_groups_ended", "counter", "Groups that ended, by how their pilot jobs ended", ("end",)),
    Metric("muri_members_ended", "counter", "Members that ended, by whether their time alone is known", ("basis",)),
    Metric("muri_member_gpu_seconds_alone", "counter", "GPU time alone of ended members, where it was counted"),
    Metric("muri_member_gpu_seconds_shared", "counter", "GPU time that the same had: shares of their groups' GPU time"),
    Metric("muri_gpu_seconds_saved", "gauge", "Alone less shared, without estimates; negative where sharing cost time"),
    Metric("muri_reports_waiting", "gauge", "Ended members whose reports have yet to be written to the accounts"),
    Metric("muri_dry_runs", "counter", "Dry runs: started, measured, failed", ("outcome",)),
    Metric("muri_left_out", "gauge", "Records that the last cycle left out because deciding failed on them", ("what",)),
    Metric("muri_unreadable_jobs", "gauge", "Jobs whose records cannot be read"),
    Metric("muri_node_cpu_cores", "gauge", "Cores in use on a node with a group, by all processes", ("node",)),
    Metric("muri_node_memory_bytes", "gauge", "Host memory in use there", ("node",)),
    Metric("muri_node_disk_bytes_per_second", "gauge", "Read from and written to its disks", ("node",)),
    Metric("muri_node_network_bytes_per_second", "gauge", "Sent and received by it", ("node",)),
    Metric("muri_node_gpu_utilization", "gauge", "Share of the time that its GPU computed", ("node", "gpu")),
    Metric("muri_node_gpu_memory_bytes", "gauge", "GPU memory in use", ("node", "gpu")),
)
"""All metrics, in the order of docs/metrics.md."""

_MODES: Final[tuple[Mode, ...]] = ("interleave", "plain")

Values = Mapping[str, Mapping[Labels, float]]
"""By the metric's name and the values of its labels."""


def queue_values(decision: Decision, status: Status, intents: tuple[Intent, ...]) -> dict[str, dict[Labels, float]]:
    """Return the gauges that describe the queue and its groups."""
    view, left_out = decision.view, decision.quarantine
    groups = tuple(group for group in view.running_groups if len(group.members) > 1)
    jobs = Counter((job.state, _reason(job, decision)) for job in status.jobs)
    jobs_out, intents_out = len(left_out.jobs), len(left_out.intents)
    kinds = {"job": jobs_out, "intent": intents_out, "profile": len(left_out.blamed) - jobs_out - intents_out}
    return {
        "muri_jobs": {key: float(count) for key, count in jobs.items()},
        "muri_groups": {(mode,): float(sum(group.mode == mode for group in groups)) for mode in _MODES},
        "muri_group_members": {(): float(sum(len(group.members) for group in groups))},
        "muri_group_efficiency": _efficiencies(groups, intents),
        "muri_left_out": {(kind,): float(count) for kind, count in kinds.items()},
        "muri_unreadable_jobs": {(): float(len(view.snapshot.unreadable))},
        **_node_values(view),
    }


def _node_values(view: View) -> dict[str, dict[Labels, float]]:
    """Latest reports of the pilot jobs' monitors on their first nodes; of several on a node the newest pilot counts."""
    values: dict[str, dict[Labels, float]] = {}
    for group in view.running_groups:
        use, name = node_use(group.pilot.reports.speeds), min(names_in(group.pilot.nodes), default="")
        node = view.node_index.by_name.get(name)
        if use is None or node is None:
            continue
        figures: list[tuple[str, Labels, float | None, float]] = [
            ("muri_node_cpu_cores", (name,), use.cpu_cores, 1),
            ("muri_node_memory_bytes", (name,), use.mem_gib, GIB),
            ("muri_node_disk_bytes_per_second", (name,), use.disk_mib_per_s, MIB),
            ("muri_node_network_bytes_per_second", (name,), use.network_mib_per_s, MIB),
        ]
        for number, gpu in use.gpus.items():
            if 0 <= number < node.gpu_count:  # comments, which users may write, must not make up labels
                figures.append(("muri_node_gpu_utilization", (name, str(number)), gpu.utilization, 1))
                figures.append(("muri_node_gpu_memory_bytes", (name, str(number)), gpu.mem_gib, GIB))
        for metric, labels, value, unit in figures:
            if value is not None:
                values.setdefault(metric, {})[labels] = float(value) * unit
    return values


def _efficiencies(groups: tuple[RunningGroup, ...], intents: tuple[Intent, ...]) -> dict[Labels, float]:
    starts = groups_by_pilot(intents)
    begun = [starts[group.pilot.job_id] for group in groups if group.pilot.job_id in starts]
    planned = [float(start.payload["efficiency"]) for start in begun]
    measured = [used for group in groups if (used := measured_efficiency(group)) is not None]
    return {(name,): fmean(values) for name, values in (("predicted", planned), ("measured", measured)) if values}


def measured_efficiency(group: RunningGroup) -> float | None:
    """Return the measured γ: the share of time that a resource is held, averaged over all four; None if unknown."""
    reports = [member_report(group.pilot.reports.speeds, member.job_id) for member in group.members]
    used = [sum(report.stage_s) / report.iteration_s for report in reports if report is not None and report.stage_s]
    return min(1.0, sum(used) / len(STAGES)) if len(used) == len(reports) else None


_REASONS: Final[tuple[tuple[str, Callable[[str], bool]], ...]] = (
    ("dependency", lambda word: word.startswith("Dependency")),
    ("begin-time", lambda word: word == "BeginTime"),
    ("held", lambda word: word.startswith(("JobHeld", "job_requeued_in_held", "SpecialExit"))),
    ("limit", lambda word: "Limit" in word or word.startswith(("Assoc", "QOS", "MaxJobs"))),
    ("resources", lambda word: word in {"Resources", "Priority"}),
    ("nodes", lambda word: word.startswith(("Reservation", "ReqNode", "BadConstraints", "Partition", "NodeDown"))),
)
"""Classes of Slurm's reasons; all others are "other"."""


def _reason(job: JobStatus, decision: Decision) -> str:
    """Why a job waits, as one word of a short list; "" when it does not."""
    if job.slurm_state != JobState.PENDING:
        return ""
    if job.job_id in decision.quarantine.blamed:
        return "left-out"
    record = decision.view.jobs.get(job.job_id)
    word = "" if record is None else record.reason
    reason = next((name for name, fits in _REASONS if fits(word)), "other")
    if job.state != "waiting" or reason in {"dependency", "begin-time"}:
        return reason
    # Jobs behind the gate wait for Muri's own reasons.
    return "not-ready" if job.job_id in decision.preparation.waiting else "gpus"


def counter_values(counters: Counters) -> dict[str, dict[Labels, float]]:
    """Return the counters that are kept between cycles, and the values that follow from them."""
    values = {metric.name: counters.of(metric.name.removeprefix("muri_")) for metric in METRICS}
    alone = values["muri_member_gpu_seconds_alone"].setdefault((), 0.0)
    shared = values["muri_member_gpu_seconds_shared"].setdefault((), 0.0)
    steps = {"StartDryRun": "started", "KeepProfile": "measured", "DryRunFailed": "failed"}
    actions = values["muri_actions"]
    return {
        **{name: sums for name, sums in values.items() if sums},
        "muri_gpu_seconds_saved": {(): alone - shared},
        "muri_dry_runs": {(word,): actions.get((action, "done"), 0.0) for action, word in steps.items()},
    }


def families(values: Values) -> Iterator["Family"]:
    """Return the metrics that have values, as prometheus_client takes them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for metric in METRICS:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.text, labels=metric.labels)
        for labels, value in sorted(values.get(metric.name, {}).items()):
            family.add_metric(labels, value)
        if family.samples:
            yield family


def registry_of(values: Callable[[], Values]) -> "CollectorRegistry":
    """Return a registry for prometheus_client that asks for the values each time."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    class Source(Collector):
        def collect(self) -> Iterator["Family"]:
            return families(values())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Source())
    return registry


def text_of(values: Values) -> str:
    """Return the metrics in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(registry_of(lambda: values)).decode()


MOST_CONNECTIONS: Final = 20
REQUEST_LIMIT_S: Final = 10.0
"""A connection with its request and answer takes no longer."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (so it is called there)
        """Strangers write nothing into the log."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection; the oldest of too many ends. Raises an OSError if it cannot listen there."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, registry: "CollectorRegistry") -> None:
        from prometheus_client import make_wsgi_app

        self._newcomers = Newcomers(MOST_CONNECTIONS)
        self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own."""
        self._newcomers.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._newcomers.take(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that take too long; called twice a second."""
        self._newcomers.end_older(REQUEST_LIMIT_S)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections of strangers end as they like: nothing is logged."""
