"""What a process and its descendants use of the host, and the totals of a node."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

import psutil

from muri.units import GIB, MIB

TREE_EVERY_S: Final = 0.05
"""Least time between two searches for new descendants; on nodes with many processes it is longer."""

WEIGH_EVERY_S: Final = 0.2
"""Least time between two questions how much of a process's memory is shared; for large processes it is longer, since
the kernel walks all pages to answer."""

CPU_SHARE: Final = 0.001
"""Share of one core that each kind of reading may take."""

LOOPBACK: Final = "lo"


class Throttle:
    """Says when a reading is due again: after `least_s`, or later the more CPU time the last one took."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._next_s = 0.0
        self._began_s = 0.0

    def due(self) -> bool:
        """Whether it is time; a reading that begins now has to end with `done`."""
        if time.perf_counter() < self._next_s:
            return False
        self._began_s = time.thread_time()
        return True

    def done(self) -> None:
        """Note that the reading ended."""
        cost_s = time.thread_time() - self._began_s
        self._next_s = time.perf_counter() + max(self._least_s, cost_s / CPU_SHARE)


class HostReading(NamedTuple):
    """CPU time and disk traffic since the processes started, and memory now; None where it could not be read."""

    cpu_s: float
    mem_gib: float | None
    disk_mib: float | None


class HostReader:
    """Reads what one process and its descendants use.

    CPU seconds and disk bytes of children that ended are in their parent's figures once the parent
    has waited for them, so the totals keep them. A descendant whose parent ended is still followed
    if it was seen before.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._tree: dict[int, psutil.Process] = {}
        self._seen: set[int] = set()
        self._tree_due = Throttle(TREE_EVERY_S)
        self._weigh_due = Throttle(WEIGH_EVERY_S)
        self._weights: dict[int, float] = {}
        self._memory_gib: float | None = None
        self._totals = {"cpu": 0.0, "disk": 0.0}
        self._disk_is_secret = False

    @property
    def pids(self) -> frozenset[int]:
        """The process and the descendants that are known."""
        return frozenset(self._tree)

    def read(self) -> HostReading:
        """Read everything that is due; the rest is what it was last."""
        if not self._seen:
            self._first_tree()
        elif self._tree_due.due():
            self._refresh_tree()
            self._tree_due.done()
        self._memory_gib = self._memory()
        disk_mib = self._disk_mib()
        return HostReading(self._cpu_s(), self._memory_gib, disk_mib)

    def _first_tree(self) -> None:
        self._seen = set(psutil.pids())
        try:
            root = psutil.Process(self._pid)
            self._tree = {process.pid: process for process in (root, *root.children(recursive=True))}
        except psutil.NoSuchProcess:
            return

    def _refresh_tree(self) -> None:
        """Adopt the processes that are new since the last time; looking at all would cost far more."""
        alive = set(psutil.pids())
        known = (_with_parent(pid) for pid in alive - self._seen)
        parents = {process: parent for process, parent in known if process is not None}
        self._seen = alive
        while found := [item for item, parent in parents.items() if parent in self._tree]:
            for process in found:
                self._tree[process.pid] = process
                del parents[process]

    def _cpu_s(self) -> float:
        total_s = 0.0
        for pid, process in list(self._tree.items()):
            try:
                total_s += sum(process.cpu_times()[:4])  # user, system and those of children waited for
            except psutil.NoSuchProcess:
                del self._tree[pid]
                self._weights.pop(pid, None)
            except psutil.Error:
                continue
        return self._grown("cpu", total_s)

    def _grown(self, name: str, total: float) -> float:
        """The total, which never falls: a process that ends is missing until its parent has waited for it."""
        self._totals[name] = max(self._totals[name], total)
        return self._totals[name]

    def _memory(self) -> float | None:
        """Resident memory, of several processes each weighed by what of its pages is its own."""
        processes = list(self._tree.values())
        if len(processes) <= 1:
            return sum(map(_rss, processes)) / GIB or self._memory_gib  # what has ended has none
        if self._weigh_due.due():
            self._weigh(processes)
            self._weigh_due.done()
        common = fmean(self._weights.values()) if self._weights else 1.0  # processes of a job share alike
        weighed = (_rss(process) * self._weights.get(process.pid, common) for process in processes)
        return sum(weighed) / GIB or self._memory_gib

    def _weigh(self, processes: Sequence[psutil.Process]) -> None:
        """Learn one process's proportional share (PSS / RSS): a new one's, else the one that was learned first."""
        order = list(self._weights)
        process = min(processes, key=lambda item: order.index(item.pid) if item.pid in order else -1)
        self._weights.pop(process.pid, None)
        try:
            memory = process.memory_full_info()
            self._weights[process.pid] = memory.pss / max(1, memory.rss)
        except psutil.NoSuchProcess:  # or it has ended and its parent has yet to notice
            self._tree.pop(process.pid, None)
        except (psutil.AccessDenied, AttributeError):  # then pages that processes share count more than once
            self._weights[process.pid] = 1.0

    def _disk_mib(self) -> float | None:
        if self._disk_is_secret:
            return None
        total_bytes = 0
        for process in self._tree.values():
            try:
                counters = process.io_counters()
            except psutil.NoSuchProcess:
                continue
            except (psutil.AccessDenied, NotImplementedError, AttributeError, OSError):
                self._disk_is_secret = True  # from now on: a total without one of the processes would be a false rate
                return None
            total_bytes += counters.read_bytes + counters.write_bytes
        return self._grown("disk", total_bytes) / MIB


def _with_parent(pid: int) -> tuple[psutil.Process | None, int | None]:
    """The process and the id of its parent; nothing where it has ended."""
    try:
        process = psutil.Process(pid)
        return process, process.ppid()
    except psutil.Error:
        return None, None


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def node_network_mib() -> float | None:
    """MiB that the node has sent and received, loopback left out; None where that cannot be read."""
    try:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
    except OSError:
        return None
    return sum(item.bytes_sent + item.bytes_recv for name, item in counters.items() if name != LOOPBACK) / MIB


def node_disk_mib() -> float | None:
    """MiB that the node's disks have read and written; None where that cannot be read."""
    try:
        counters = psutil.disk_io_counters()
    except (OSError, RuntimeError, NotImplementedError):
        return None
    return None if counters is None else (counters.read_bytes + counters.write_bytes) / MIB


def rate(before: float | None, after: float | None, over_s: float) -> float | None:
    """Growth per second, None where one of the two could not be read."""
    if before is None or after is None or over_s <= 0:
        return None
    return max(0.0, after - before) / over_s
