"""How fast a script's datasets are read, as their caches see it in a dry run, for the memory axis of sensitivity.

Reading is when the thread that fetches an item neither computes nor waits for a core: decoding belongs to the CPU axis.
Items count when they are read for the first time.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

WORDS: Final = 8
"""Whole numbers of 8 bytes that one dataset takes, shared by all processes that read it."""

_OWNER, _ELSEWHERE, _ITEMS, _BYTES, _FETCH_NS, _BLOCKED_NS, _COVERED_NS, _UNTIL_NS = range(WORDS)

UNSEEN_SHARE: Final = 0.01
"""Where fetching blocks for a smaller share of its time, it hardly reads: memory would change nothing."""

_WAITS: Final = Path("/proc/thread-self/schedstat")
_S_PER_NS: Final = 1e-9


class Fetch:
    """A call of the dataset that begins now.

    Attributes:
        start_ns: When, on the clock that all processes share.
        end_ns: When it ended.
        blocked_ns: How long its thread waited for something else than a core.
    """

    def __init__(self) -> None:
        self.start_ns, self._awake_ns = _clocks()
        self.end_ns, self.blocked_ns = self.start_ns, 0

    def end(self) -> None:
        """The dataset has answered."""
        self.end_ns, awake_ns = _clocks()
        self.blocked_ns = max(0, self.end_ns - self.start_ns - (awake_ns - self._awake_ns))


class DatasetReads:
    """The reads of one dataset.

    Args:
        words: `WORDS` whole numbers in shared memory, 0 at first.
        length: How many items the dataset has.
    """

    def __init__(self, words: memoryview, length: int) -> None:
        self._words = words
        self._length = length
        self._counts: list[int] = []
        self._words[_OWNER] = self._words[_OWNER] or os.getpid()
        _known.add(self)

    def add(self, fetch: Fetch, sizes: Collection[int]) -> None:
        """Count one fetch; others must not do so in the same moment.

        Args:
            fetch: It has ended.
            sizes: Bytes of each item.
        """
        words, begin_ns = self._words, max(fetch.start_ns, self._words[_UNTIL_NS])
        words[_ITEMS] += len(sizes)
        words[_BYTES] += sum(sizes)
        words[_FETCH_NS] += fetch.end_ns - fetch.start_ns
        words[_BLOCKED_NS] += fetch.blocked_ns
        words[_COVERED_NS] += max(0, fetch.end_ns - begin_ns)
        words[_UNTIL_NS] = max(fetch.end_ns, words[_UNTIL_NS])
        if os.getpid() != words[_OWNER]:
            words[_ELSEWHERE] = 1

    def iteration_ended(self) -> None:
        """Remember what was read by now."""
        self._counts.append(self._words[_ITEMS])

    def figures(self) -> dict[str, Any] | None:
        """What a dry run tells of it, None where too little was seen.

        The rate is that of all fetchers together: bytes over the time in which any of them was fetching, as far as they
        were blocked then.

        Returns:
            "items" of the dataset, "item_bytes" as kept, "batch_items" that an iteration reads, "bytes_per_s",
            and "workers": whether other processes fetch.
        """
        _, elsewhere, items, size, fetch_ns, blocked_ns, covered_ns, _ = self._words
        batch_items = per_iteration(self._counts)
        if not (batch_items and size) or blocked_ns < UNSEEN_SHARE * fetch_ns:
            return None
        read_s = covered_ns * blocked_ns / fetch_ns * _S_PER_NS
        return {
            "items": self._length,
            "item_bytes": size / items,
            "batch_items": batch_items,
            "bytes_per_s": size / read_s,
            "workers": bool(elsewhere),
        }

    @property
    def items(self) -> int:
        """How many items were read."""
        return int(self._words[_ITEMS])


_known: weakref.WeakSet[DatasetReads] = weakref.WeakSet()


def iteration_ended() -> None:
    """The script of this process has ended an iteration."""
    for reads in list(_known):
        reads.iteration_ended()


def reads_found() -> dict[str, Any] | None:
    """The figures of the dataset of which most was read; None where the script caches none."""
    most = max(_known, key=lambda reads: reads.items, default=None)
    return None if most is None else most.figures()


def per_iteration(counts: Sequence[int]) -> float | None:
    """Items read in an iteration, from their number after each; None while too few were seen.

    Workers fill their queues before the first iteration ends, and at the end of a small dataset nothing is new. So the
    second half of the iterations counts, up to the last that read something new.
    """
    last = counts.index(counts[-1]) if counts else 0
    first = last // 2
    return (counts[last] - counts[first]) / (last - first) if last > first else None


def _clocks() -> tuple[int, int]:
    """Return this moment, and how long this thread has computed, or waited for a core where the kernel tells, by then.

    If the thread loses its core between the readings, they belong to different moments, and all are made again.
    """
    waited_ns, before_ns = _waited_ns(), -1
    while waited_ns != before_ns:
        now_ns, computed_ns, before_ns = time.monotonic_ns(), time.thread_time_ns(), waited_ns
        waited_ns = _waited_ns()
    return now_ns, computed_ns + waited_ns


def _waited_ns() -> int:
    try:
        return int(_WAITS.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
