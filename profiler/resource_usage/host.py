"""What a process and its descendants use of the host, and how much other processes hold a script up."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import psutil

from muri.profiler.resource_usage.sample import Throttle
from muri.units import GIB, MIB

TREE_EVERY_S: Final = 0.05
"""Least time between two searches for new descendants; on nodes with many processes it is longer."""

WEIGH_EVERY_S: Final = 0.2
"""Least time between two questions how much of a process's memory is shared; for large processes it is longer, since
the kernel walks all pages to answer."""

LOOPBACK: Final = "lo"
NETWORK_NOTE: Final = (
    "network rates are the node's, not the job's alone (loopback, which ranks on one node use, is counted apart)"
)
NODE_DISK_NOTE: Final = (
    "disk rates are the node's, not the job's alone: no permission to read the processes' own "
    "(run as the user who owns them)"
)
NO_DISK_NOTE: Final = "disk rates cannot be read: neither the processes' own nor the node's"
RSS_NOTE: Final = "host memory counts pages shared between processes more than once: no permission to read their shares"


@dataclass(frozen=True, slots=True)
class HostReading:
    """Totals since the processes started, and memory now; None where it could not be read.

    Attributes:
        is_node_disk: Whether the disk's total is the node's, since the processes' own cannot be read.
    """

    cpu_s: float | None
    mem_gib: float | None
    disk_mib: float | None
    network_mib: float | None
    loopback_mib: float | None
    is_node_disk: bool = False


class HostReader:
    """Reads what one process and its descendants use.

    CPU seconds and disk bytes of children that ended are in their parent's figures once the parent
    has waited for them, so the totals keep them. A descendant whose parent ended is still followed
    if it was seen before.

    Attributes:
        notes: What could not be read, or not of these processes alone.
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
        self._node_disk = False
        self.notes: dict[str, None] = {}

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
        network_mib, loopback_mib = self._network()
        disk_mib = self._disk_mib()
        return HostReading(self._cpu_s(), self._memory_gib, disk_mib, network_mib, loopback_mib, self._node_disk)

    def _first_tree(self) -> None:
        self._seen = set(psutil.pids())
        try:
            root = psutil.Process(self._pid)
            self._tree = {process.pid: process for process in (root, *root.children(recursive=True))}
        except psutil.NoSuchProcess:
            self.notes[f"process {self._pid} has ended"] = None

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

    def _cpu_s(self) -> float | None:
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
        except (psutil.AccessDenied, AttributeError):
            self.notes[RSS_NOTE] = None
            self._weights[process.pid] = 1.0

    def _disk_mib(self) -> float | None:
        if not self._node_disk:
            total_bytes = 0
            for process in self._tree.values():
                try:
                    counters = process.io_counters()
                except psutil.NoSuchProcess:
                    continue
                except (psutil.AccessDenied, NotImplementedError, AttributeError, OSError):
                    self._node_disk = True  # from now on: a change of meaning within a run would be a false rate
                    return None
                total_bytes += counters.read_bytes + counters.write_bytes
            return self._grown("disk", total_bytes) / MIB
        node_mib = node_disk_mib()
        self.notes[NO_DISK_NOTE if node_mib is None else NODE_DISK_NOTE] = None
        return node_mib

    def _network(self) -> tuple[float | None, float | None]:
        try:
            counters = psutil.net_io_counters(pernic=True, nowrap=False)
        except OSError as error:
            self.notes[f"network rates cannot be read: {error.strerror}"] = None
            return None, None
        self.notes[NETWORK_NOTE] = None
        loopback = counters.pop(LOOPBACK, None)
        others = sum(item.bytes_sent + item.bytes_recv for item in counters.values())
        return others / MIB, loopback.bytes_sent / MIB if loopback else 0.0


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
