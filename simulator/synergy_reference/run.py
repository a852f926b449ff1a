"""Simulate a trace with the semantics of Synergy's public simulator: a plan every round, from scratch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np

from muri.policies.allocation.names import ALIASES, SYNERGY_NAMES, SynergyName, parse_name
from muri.policies.speed.model import Floats
from muri.simulator.engine.checks import ConservationError, check_cluster, check_records, check_sizes, wanted
from muri.simulator.engine.meter import LEAST_REMAINING_S, Samples
from muri.simulator.model import (
    Cluster,
    GroupSpan,
    JobRecord,
    Sample,
    Settings,
    SimulationError,
    SimulationResult,
    Trace,
    TraceJob,
)
from muri.simulator.synergy_reference.mechanisms import MECHANISMS, Round, runnable
from muri.simulator.synergy_reference.state import ROUND_S, Ledger, Rows, job_table

SYNERGY_REFERENCE_POLICIES: Final = tuple(
    name for name in (*SYNERGY_NAMES, *ALIASES) if (parsed := parse_name(name)) and parsed.mechanism in MECHANISMS
)
"""The public simulator's policies that are simulated here; `opt` is not among them."""

URGENT_AFTER_S: Final = 1000 * 3600
"""A job that has not run for longer goes first for good, whatever the order, save for first in first out."""

_PROGRESS_EVERY = 200
"""Rounds from one report of progress to the next."""

_ROUNDING = 1e-6


def simulate_synergy(
    trace: Trace,
    policy: str,
    cluster: Cluster,
    settings: Settings,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
    *,
    with_spans: bool = False,
) -> SimulationResult:
    """Simulate a trace.

    There is a plan every 300 s, in which every job gets its place anew at no cost. Jobs end at the end of a round.

    Args:
        trace: The jobs, all of Synergy's models.
        policy: One of `SYNERGY_REFERENCE_POLICIES`.
        cluster: Where they run; its CPUs and host memory must be known.
        settings: Only `until` counts; this model has no noise and no seed.
        options: There are none.
        progress: Called now and then with the share of the jobs that have ended, 0 to 1.
        with_spans: Whether the result tells who ran when.

    Raises:
        SimulationError: The policy, an option or a setting is one that this model doesn't know, or the trace cannot run
            on the cluster.
    """
    name = _check(trace, policy, cluster, settings, options or {})
    begin_s = perf_counter()
    ledger = Ledger(job_table(trace, cluster, by_demand=name.mechanism != "proportional"))
    count = min(settings.until or len(trace.jobs), len(trace.jobs))
    film = Film(ledger, cluster, count, progress, with_spans=with_spans)
    decision_s = run_rounds(ledger, name, cluster, film.look, count)
    records, unfinished = ledger.records(), ledger.unfinished()
    _check_ended(trace, records, unfinished)
    return SimulationResult(
        policy=policy,
        trace=trace.name,
        settings=settings,
        cluster=cluster,
        records=records,
        samples=film.samples(),
        spans=film.spans(),
        unfinished=unfinished,
        decision_s=tuple(decision_s),
        wall_s=perf_counter() - begin_s,
    )


def _check(trace: Trace, policy: str, cluster: Cluster, settings: Settings, options: Mapping[str, Any]) -> SynergyName:
    name = check_synergy(policy, options)
    _check_settings(settings)
    _check_room(cluster)
    check_sizes(trace, cluster)
    return name


def check_synergy(policy: str, options: Mapping[str, Any]) -> SynergyName:
    """Refuse a policy or option that this model doesn't know.

    Raises:
        SimulationError: Lists the valid ones.
    """
    name = parse_name(policy)
    valid = ", ".join(SYNERGY_REFERENCE_POLICIES)
    if name is None:
        raise SimulationError(f"the reference model has no policy {policy!r}; of Synergy's it has: {valid}")
    if name.mechanism not in MECHANISMS:
        raise SimulationError(
            f"the reference model has no {policy}: an integer program for each of thousands of rounds would take too "
            f"long, and no results of it are published; simulate it under the default model, or take one of: {valid}"
        )
    if options:
        raise SimulationError(f"under the reference model {policy} has no option {next(iter(options))!r}; it has none")
    return name


def _check_settings(settings: Settings) -> None:
    for name in ("interval_s", "profiling_s", "profile_noise", "outages"):
        if getattr(settings, name):
            raise SimulationError(f"the reference model of Synergy has no {name}; leave it out")


def _check_room(cluster: Cluster) -> None:
    check_cluster(cluster)
    for what, amount, option in (
        ("CPUs", cluster.cpus_per_node, "--cpus-per-node"),
        ("host memory", cluster.mem_gib_per_node, "--mem-gb-per-node"),
    ):
        if not amount > 0:
            raise SimulationError(
                f"the cluster's {what} are unlimited, but Synergy shares them out; say {option}, such as "
                "--cpus-per-node 24 --mem-gb-per-node 500"
            )


def _check_ended(trace: Trace, records: Sequence[JobRecord], unfinished: Iterable[TraceJob]) -> None:
    """There is one record for every job that the simulation saw to its end."""
    left = {job.job_id for job in unfinished}
    check_records([job for job in trace.jobs if job.job_id not in left], records)


Look = Callable[[float, Rows, Round], None]
"""Told of each round before it runs: when, who is there in order of arrival, and who runs."""


def run_rounds(ledger: Ledger, name: SynergyName, cluster: Cluster, look: Look, until: int) -> list[float]:
    """Simulate until the first jobs have ended.

    At the same time a job arrives first, then leases end, then the next round is planned.

    Args:
        ledger: The jobs.
        name: Mechanism and order.
        cluster: Where they run.
        look: Told of each round.
        until: How many of the jobs, in order of submission, must have ended.

    Returns:
        Wall-clock seconds of each plan.
    """
    submit_s, arrived, now_s = ledger.table.submit_s, 0, 0.0
    queue = np.empty(0, dtype=np.int64)
    decision_s = []
    awaited = until
    while awaited:
        if not len(queue):
            now_s = max(now_s, float(np.ceil(submit_s[arrived] / ROUND_S)) * ROUND_S)
        count = int(np.searchsorted(submit_s, now_s, side="right"))
        if count > arrived:
            queue = np.concatenate((queue, np.arange(arrived, count)))
            arrived = count
        begin_s = perf_counter()
        found = _plan(ledger, queue, now_s, name, cluster)
        decision_s.append(perf_counter() - begin_s)
        look(now_s, queue, found)
        done = ledger.run_round(now_s, queue, found.rows, found.speeds)
        if len(done):
            awaited -= int((done < until).sum())
            queue = queue[np.isnan(ledger.end_s[queue])]
        now_s += ROUND_S
    return decision_s


def _plan(ledger: Ledger, queue: Rows, now_s: float, name: SynergyName, cluster: Cluster) -> Round:
    rows = in_order(KEYS[name.order], ledger, queue, now_s)
    if name.order == "las":  # chooses who runs before anything is shared out, and TUNE then starts with the largest
        rows = runnable(ledger.table, cluster.gpu_count, rows)
        if name.mechanism == "tune":
            rows = rows[np.argsort(-ledger.table.gpus[rows], kind="stable")]
    return MECHANISMS[name.mechanism](ledger.table, cluster, rows)


Key = Callable[[Ledger, Rows, float], Floats]


def _remaining_s(ledger: Ledger, queue: Rows) -> Floats:
    return np.asarray(ledger.table.iteration_s[queue] * ledger.left[queue] / ledger.speed[queue])


def _srtf(ledger: Ledger, queue: Rows, now_s: float) -> Floats:
    return _remaining_s(ledger, queue)


def _las(ledger: Ledger, queue: Rows, now_s: float) -> Floats:
    return np.asarray(ledger.rounds[queue] * ROUND_S * ledger.table.gpus[queue], dtype=np.float64)


def _ftf(ledger: Ledger, queue: Rows, now_s: float) -> Floats:
    """Finish-time fairness so far, the least unfairly treated first: Themis has it the other way round."""
    table = ledger.table
    alone_s = table.iteration_s[queue] * table.iterations[queue]
    return np.asarray((now_s - table.submit_s[queue] + _remaining_s(ledger, queue)) / alone_s)


KEYS: Final[dict[str, Key | None]] = {"fifo": None, "srtf": _srtf, "las": _las, "ftf": _ftf}


def in_order(key: Key | None, ledger: Ledger, queue: Rows, now_s: float) -> Rows:
    """The rows of the queue, which is in order of arrival, by their keys; those alike by arrival.

    Who has waited too long by now goes first from the next round on.
    """
    if key is None:
        return queue
    values, urgent = key(ledger, queue, now_s), ledger.urgent[queue]
    order = np.lexsort((values, ~urgent)) if urgent.any() else np.argsort(values, kind="stable")
    ledger.urgent[queue[ledger.seen_s[queue] < now_s - URGENT_AFTER_S]] = True
    return queue[order]


class Film:
    """Looks at every round before it runs.

    Args:
        ledger: The jobs.
        cluster: The nodes.
        until: How many of the jobs must end.
        progress: Called with the share of these that have ended.
        with_spans: Whether to note who ran when.
    """

    def __init__(
        self,
        ledger: Ledger,
        cluster: Cluster,
        until: int,
        progress: Callable[[float], None] | None,
        *,
        with_spans: bool,
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._until = until
        self._progress = progress
        self._busy = np.array([job.profile.stage_s for job in ledger.table.jobs]) / ledger.table.iteration_s[:, None]
        self._busy *= ledger.table.gpus[:, None] / cluster.gpu_count
        self._samples = Samples()
        self._open: dict[int, tuple[float, int]] | None = {} if with_spans else None  # since when, on which node
        self._spans: list[GroupSpan] = []
        self._checks = wanted()
        self._looks = 0

    def look(self, now_s: float, queue: Rows, found: Round) -> None:
        """Note a round."""
        if self._checks:
            self._check(now_s, queue, found)
        if self._open is not None:
            self._look_at_spans(self._open, now_s, found)
        self._samples.add(self._sample(now_s, queue, found))
        self._looks += 1
        if self._progress is not None and self._looks % _PROGRESS_EVERY == 0:
            self._progress(float(np.isfinite(self._ledger.end_s[: self._until]).mean()))

    def samples(self) -> tuple[Sample, ...]:
        """The samples, thinned; to be asked for at the end."""
        if self._progress is not None:
            self._progress(1.0)
        return self._samples.thinned()

    def spans(self) -> tuple[GroupSpan, ...]:
        """The jobs' stays, each on the first node that it had; to be asked for at the end."""
        for row, since in (self._open or {}).items():
            self._spans.append(self._span(row, *since))
        self._open = None
        return tuple(sorted(self._spans, key=lambda span: (span.start_s, span.members)))

    def _sample(self, now_s: float, queue: Rows, found: Round) -> Sample:
        ledger, table = self._ledger, self._ledger.table
        waits = np.ones(len(table.jobs), dtype=np.bool_)
        waits[found.rows] = False
        off = queue[waits[queue]]
        remaining_s = np.maximum(ledger.left[off] * table.iteration_s[off], LEAST_REMAINING_S)
        waited_s = now_s + ROUND_S / 2 - ledger.seen_s[off]
        busy = np.minimum(found.speeds @ self._busy[found.rows], 1.0).tolist()
        return Sample(
            start_s=now_s,
            length_s=ROUND_S,
            pending=len(off),
            blocking_index=float((waited_s / remaining_s).mean()) if len(off) else 0.0,
            gpus_held=int(table.gpus[found.rows].sum()),
            utilization=(busy[0], busy[1], busy[2], busy[3]),
        )

    def _look_at_spans(self, before: dict[int, tuple[float, int]], now_s: float, found: Round) -> None:
        firsts = dict(zip(found.rows.tolist(), found.first_nodes.tolist(), strict=True))
        for row in before.keys() - firsts.keys():
            self._spans.append(self._span(row, *before[row]))
        self._open = {row: before.get(row, (now_s, node)) for row, node in firsts.items()}

    def _span(self, row: int, since_s: float, node: int) -> GroupSpan:
        job = self._ledger.table.jobs[row]
        return GroupSpan(since_s, float(self._ledger.seen_s[row]), (job.job_id,), node, job.gpu_count)

    def _check(self, now_s: float, queue: Rows, found: Round) -> None:
        """Check what holds whatever the mechanism.

        Raises:
            ConservationError: Says what is wrong.
        """
        held = int(self._ledger.table.gpus[found.rows].sum())
        if held > self._cluster.gpu_count:
            raise ConservationError(f"at {now_s} s: {held} of {self._cluster.gpu_count} GPUs are held")
        if len(set(found.rows.tolist())) != len(found.rows) or not np.isin(found.rows, queue).all():
            raise ConservationError(f"at {now_s} s: a job runs twice, or has ended or not arrived")
        nodes = found.nodes
        if nodes is None:
            return
        if sum(nodes.gpus) != self._cluster.gpu_count - held:
            raise ConservationError(f"at {now_s} s: {held} GPUs are held and {sum(nodes.gpus)} free")
        if min(*nodes.gpus, *nodes.cpus, *nodes.mem_gib) < -_ROUNDING:
            raise ConservationError(f"at {now_s} s: a node has given out more than it has")
