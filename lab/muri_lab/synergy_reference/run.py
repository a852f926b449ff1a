"""Simulate a trace with the semantics of Synergy's public simulator: a plan every round, from scratch."""

import math
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

import numpy as np

from muri.policies.options import PolicyOptions
from muri.policies.speed import Floats
from muri.simulator.engine.checks import ConservationError, check_cluster, check_records, check_sizes, wanted
from muri.simulator.engine.world import LEAST_REMAINING_S
from muri.simulator.model import Cluster, GroupSpan, Sample, Settings, Simulation, SimulationError, SimulationResult
from muri_lab.film import Film
from muri_lab.synergy_reference.mechanisms import MECHANISMS, Round, runnable
from muri_lab.synergy_reference.state import ROUND_S, Ledger, Rows, job_table

SYNERGY: Final = "synergy"
"""The one policy of the public simulator; its options `mechanism` and `order` are known here, no others."""

URGENT_AFTER_S: Final = 1000 * 3600
"""A job that has not run for longer than this goes first from then on, in every order except first in, first out."""

_OPTIONS = ("mechanism", "order")
_ROUNDING = 1e-6


def simulate_synergy(task: Simulation) -> SimulationResult:
    """Simulate a trace of Synergy's models on a cluster whose CPUs and host memory are known.

    There is a plan every 300 s, in which every job gets its place anew at no cost. Jobs end at the end of a round. Of
    the settings only `until` counts; this model has neither noise nor seed.
    """
    trace, cluster = task.trace, task.cluster
    rules = PolicyOptions(**task.options)
    _check_settings(task.settings)
    _check_room(cluster)
    check_sizes(trace, cluster)
    ledger = Ledger(job_table(trace, cluster, by_demand=rules.mechanism != "proportional"))
    count = min(task.settings.until or len(trace.jobs), len(trace.jobs))
    film = _Film(task, ledger, count)
    decision_s = run_rounds(ledger, rules, cluster, film.look, count)
    records, unfinished = ledger.records(), ledger.unfinished()
    left = {job.job_id for job in unfinished}
    check_records([job for job in trace.jobs if job.job_id not in left], records)
    return task.result(records, film.samples(), film.spans(), decision_s, unfinished)


def check_synergy(options: Mapping[str, Any]) -> None:
    """Refuse an option that this model does not know."""
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise SimulationError(
            f"under the reference model synergy has no option {unknown[0]!r}; valid are: {', '.join(_OPTIONS)}"
        )
    PolicyOptions(**options)


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


Look = Callable[[float, Rows, Round], None]
"""Called before each round with its time, the queue in order of arrival, and the jobs that run."""


def run_rounds(ledger: Ledger, rules: PolicyOptions, cluster: Cluster, look: Look, until: int) -> list[float]:
    """Simulate until the first jobs have ended; return the wall-clock seconds of each plan.

    At the same time a job arrives first, then leases end, then the next round is planned.
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
        found = _plan(ledger, queue, now_s, rules, cluster)
        decision_s.append(perf_counter() - begin_s)
        look(now_s, queue, found)
        done = ledger.run_round(now_s, queue, found.rows, found.speeds)
        if len(done):
            awaited -= int((done < until).sum())
            queue = queue[np.isnan(ledger.end_s[queue])]
        now_s += ROUND_S
    return decision_s


def _plan(ledger: Ledger, queue: Rows, now_s: float, rules: PolicyOptions, cluster: Cluster) -> Round:
    rows = in_order(KEYS[rules.order], ledger, queue, now_s)
    if rules.order == "las":  # chooses who runs before anything is shared out, and TUNE then starts with the largest
        rows = runnable(ledger.table, cluster.gpu_count, rows)
        if rules.mechanism == "tune":
            rows = rows[np.argsort(-ledger.table.gpus[rows], kind="stable")]
    return MECHANISMS[rules.mechanism](ledger.table, cluster, rows)


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
    """Return the rows of the queue by their keys; ties in order of arrival, jobs that have waited too long first."""
    if key is None:
        return queue
    values, urgent = key(ledger, queue, now_s), ledger.urgent[queue]
    order = np.lexsort((values, ~urgent)) if urgent.any() else np.argsort(values, kind="stable")
    ledger.urgent[queue[ledger.seen_s[queue] < now_s - URGENT_AFTER_S]] = True
    return queue[order]


class _Film(Film[int]):
    """Looks at every round before it runs; a stay is that of one job, from its first node on."""

    def __init__(self, task: Simulation, ledger: Ledger, until: int) -> None:
        super().__init__(task, report_every=200)
        self._ledger = ledger
        self._until = until
        self._busy = np.array([job.profile.stage_s for job in ledger.table.jobs]) / ledger.table.iteration_s[:, None]
        self._busy *= ledger.table.gpus[:, None] / task.cluster.gpu_count
        self._checked = wanted()

    def look(self, now_s: float, queue: Rows, found: Round) -> None:
        """Note a round."""
        if self._checked:
            self._check(now_s, queue, found)
        if self.with_spans:
            firsts = zip(found.rows.tolist(), found.first_nodes.tolist(), strict=True)
            self.note_stays({row: self._stay(row, now_s, node) for row, node in firsts})
        self.note(self._sample(now_s, queue, found))

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

    def _stay(self, row: int, since_s: float, node: int) -> GroupSpan:
        job = self._ledger.table.jobs[row]
        return GroupSpan(since_s, math.inf, (job.job_id,), node, job.gpu_count)

    def _end_s(self, key: int) -> float:
        return float(self._ledger.seen_s[key])

    def _done(self) -> float:
        return float(np.isfinite(self._ledger.end_s[: self._until]).mean())

    def _check(self, now_s: float, queue: Rows, found: Round) -> None:
        """Check what holds whatever the mechanism."""
        gpu_count = self.task.cluster.gpu_count
        held = int(self._ledger.table.gpus[found.rows].sum())
        if held > gpu_count:
            raise ConservationError(f"at {now_s} s: {held} of {gpu_count} GPUs are held")
        if len(set(found.rows.tolist())) != len(found.rows) or not np.isin(found.rows, queue).all():
            raise ConservationError(f"at {now_s} s: a job runs twice, or has ended or not arrived")
        nodes = found.nodes
        if nodes is None:
            return
        if sum(nodes.gpus) != gpu_count - held:
            raise ConservationError(f"at {now_s} s: {held} GPUs are held and {sum(nodes.gpus)} free")
        if min(*nodes.gpus, *nodes.cpus, *nodes.mem_gib) < -_ROUNDING:
            raise ConservationError(f"at {now_s} s: a node has given out more than it has")
