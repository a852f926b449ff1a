"""The clock: a plan every round, from scratch."""

from collections.abc import Callable
from time import perf_counter

import numpy as np

from muri.policies.allocation.names import SynergyName
from muri.simulator.model import Cluster
from muri.simulator.synergy_reference.jobs import ROUND_S, Rows
from muri.simulator.synergy_reference.ledger import Ledger
from muri.simulator.synergy_reference.mechanisms import MECHANISMS, Round, runnable
from muri.simulator.synergy_reference.orders import KEYS, in_order

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
