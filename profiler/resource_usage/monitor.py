"""Looks at what a node and each job on it use (Muri, section 3: the worker monitor).

CPU, memory, disk and network through psutil, GPUs through NVML; None for what cannot be read.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil

from muri.profiler.resource_usage.host import HostReader, HostReading, node_disk_mib, node_network_mib, rate
from muri.profiler.resource_usage.nvml import GpuReader, GpuUnreadableError
from muri.profiler.resource_usage.sample import Throttle
from muri.profiler.resource_usage.use import JobUse, NodeUse, Use
from muri.units import GIB

EVERY_S: Final = 10.0
"""Least time between two looks. A look that costs much, as with very many processes, is followed by a longer pause, so
that all of them take 0.1 % of a core."""


class Monitor:
    """Looks at the node and at some jobs on it, again and again.

    Args:
        library: NVML's bindings, `pynvml` unless given.

    Attributes:
        notes: What cannot be read, and why.
    """

    def __init__(self, library: Any = None) -> None:
        self.notes: dict[str, None] = {}
        self._due = Throttle(EVERY_S)  # (each of the readers keeps to a share of its own as well)
        self._jobs: dict[str, tuple[int, HostReader]] = {}
        self._before_s = 0.0
        self._totals: tuple[float | None, ...] = ()
        self._job_totals: dict[str, HostReading] = {}
        self._gpus: GpuReader | None = None
        try:
            self._gpus = GpuReader({}, library)
        except GpuUnreadableError as error:
            self.notes[str(error)] = None

    def close(self) -> None:
        """Let NVML go."""
        if self._gpus is not None:
            self._gpus.close()

    def look(self, jobs: Mapping[str, int]) -> Use | None:
        """Return what the node and some jobs use; None while it is not time, and at the first look.

        It looks at once where a job has come or gone: rates begin with the first look at a job.

        Args:
            jobs: The process id of each job's script, by name; what it has started counts, too.
        """
        if not self._due.due() and jobs.keys() == self._jobs.keys():
            return None
        try:
            return self._look(jobs)
        finally:
            self._due.done()

    def _look(self, jobs: Mapping[str, int]) -> Use | None:
        now_s, before_s = time.perf_counter(), self._before_s
        over_s = now_s - before_s if before_s else 0.0
        totals = (_busy_s(), node_disk_mib(), node_network_mib())
        readings = {name: self._reader(name, pid).read() for name, pid in jobs.items()}
        gpus = {} if self._gpus is None else self._gpus.each_gpu()
        shares = self._gpu_shares(jobs)
        self._jobs = {name: reader for name, reader in self._jobs.items() if name in jobs}
        old, old_readings = self._totals, self._job_totals
        self._before_s, self._totals, self._job_totals = now_s, totals, readings
        if not over_s:
            return None
        cpu, disk, network = (rate(one, other, over_s) for one, other in zip(old, totals, strict=True))
        node = NodeUse(cpu, os.cpu_count() or 0, psutil.virtual_memory().used / GIB, disk, network, gpus)
        uses = {
            name: _job_use(old_readings.get(name), reading, over_s, *shares.get(name, (None, None)))
            for name, reading in readings.items()
        }
        return Use(node, uses)

    def _reader(self, name: str, pid: int) -> HostReader:
        known = self._jobs.get(name)
        if known is None or known[0] != pid:
            known = self._jobs[name] = (pid, HostReader(pid))
            self._job_totals.pop(name, None)
        return known[1]

    def _gpu_shares(self, jobs: Mapping[str, int]) -> dict[str, tuple[float | None, float | None]]:
        """Share of the time and memory of each job on the GPUs."""
        if self._gpus is None or not jobs:
            return {}
        pids = {name: self._jobs[name][1].pids for name in jobs}
        return self._gpus.by_owner(pids)


def _busy_s() -> float:
    """Core seconds that anybody used since the node was started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # these are in user and nice as well
    return float(sum(times) - guests - idle)


def _job_use(
    old: HostReading | None, new: HostReading, over_s: float, gpu_utilisation: float | None, gpu_mem_gib: float | None
) -> JobUse:
    before = old or new
    return JobUse(
        None if old is None else rate(before.cpu_s, new.cpu_s, over_s),
        new.mem_gib,
        # Where processes' own counters cannot be read, the reader gives the node's, which is not a share of a job's.
        None if old is None or new.is_node_disk else rate(before.disk_mib, new.disk_mib, over_s),
        gpu_utilisation,
        gpu_mem_gib,
    )
