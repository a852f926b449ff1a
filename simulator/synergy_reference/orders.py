"""Who goes first: the keys of the public simulator, ascending, computed with the last round's speeds."""

from collections.abc import Callable
from typing import Final

import numpy as np

from muri.policies.speed.model import Floats
from muri.simulator.synergy_reference.jobs import ROUND_S, Rows
from muri.simulator.synergy_reference.ledger import Ledger

URGENT_AFTER_S: Final = 1000 * 3600
"""A job that has not run for longer goes first for good, whatever the order, save for first in first out."""

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
