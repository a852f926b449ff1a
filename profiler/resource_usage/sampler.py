"""Host and GPUs over time: a sampler beside one measurement, and the monitor of a node and each job on it.

CPU, memory, disk and network through psutil, GPUs through NVML; None for what cannot be read.
"""

import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import psutil

from muri.errors import UsageError
from muri.profiler.resource_usage.host import HostReader, HostReading, node_disk_mib, node_network_mib, rate
from muri.profiler.resource_usage.nvml import GpuReader, GpuReading, GpuUnreadableError
from muri.profiler.resource_usage.sample import Sample, Throttle, Usage
from muri.profiler.resource_usage.use import JobUse, NodeUse, Use
from muri.units import GIB

LEAST_INTERVAL_S: Final = 0.01
CPU_SHARE: Final = 0.004
"""Share of one core that sampling may take; expensive samples are taken less often."""

JOIN_S: Final = 5.0
FORKED_NOTE: Final = "this process was forked from the one that samples; the samples are there"


class SamplerError(UsageError):
    """The sampling interval is too short."""


class Sampler:
    """Samples a process and its descendants until it is stopped.

    The thread is a daemon, so it keeps no process alive; after a fork it runs only in the parent.

    Args:
        pid: The process.
        interval_s: Seconds between samples, more where samples are costly.

    Raises:
        SamplerError: The interval is too short.
    """

    def __init__(self, pid: int, interval_s: float = 0.1) -> None:
        if interval_s < LEAST_INTERVAL_S:
            raise SamplerError(f"cannot sample every {interval_s} s; the least is {LEAST_INTERVAL_S} s")
        self._pid = pid
        self._host = HostReader(pid)
        self._gpus: GpuReader | None = None
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muri-telemetry", daemon=True)
        self._samples: list[Sample] = []
        self._owner = os.getpid()
        self._before: tuple[float, HostReading] | None = None
        self._cpu_s = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Start sampling."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self.stop()

    def start(self) -> None:
        """Start sampling; returns at once."""
        self._thread.start()

    def stop(self) -> Usage:
        """Take a last sample and return them all; a second call returns the same."""
        if os.getpid() != self._owner:  # the thread and its locks are the parent's
            return Usage(notes=(FORKED_NOTE,))
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)
        gpu_notes = () if self._gpus is None else tuple(self._gpus.notes)
        return Usage(tuple(self._samples), (*self._host.notes, *gpu_notes, *self._notes), self._cpu_s)

    def _run(self) -> None:
        try:
            self._gpus = self._open_gpus()
            self._sample()  # the most expensive one: it looks at all processes of the node
            since_s, start_cpu_s = time.perf_counter(), self._cpu_s
            while not self._ended.wait(self._pause_s(since_s, start_cpu_s)):
                self._sample()
            self._sample()
        except Exception as error:
            self._notes.append(f"sampling ended early: {type(error).__name__}: {error}")
        finally:
            if self._gpus is not None:
                self._gpus.close()

    def _open_gpus(self) -> GpuReader | None:
        """In the thread, since NVML may take seconds to wake a GPU."""
        try:
            return GpuReader(_environment(self._pid))
        except GpuUnreadableError as error:
            self._notes.append(str(error))
            return None

    def _sample(self) -> None:
        at_s, reading = time.perf_counter(), self._host.read()
        if self._before is not None:
            gpu = GpuReading() if self._gpus is None else self._gpus.read(self._host.pids)
            self._samples.append(_sample(self._before, (at_s, reading), gpu))
        self._before = (at_s, reading)
        self._cpu_s = time.thread_time()

    def _pause_s(self, since_s: float, start_cpu_s: float) -> float:
        """How long to wait for the next sample, so that all of them together keep to their share of a core."""
        earned_s = (time.perf_counter() - since_s) * CPU_SHARE
        return max(self._interval_s, (self._cpu_s - start_cpu_s - earned_s) / CPU_SHARE)


def _environment(pid: int) -> Mapping[str, str]:
    """The process's own environment, since CUDA_VISIBLE_DEVICES may differ from ours."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return os.environ


def _sample(before: tuple[float, HostReading], after: tuple[float, HostReading], gpu: GpuReading) -> Sample:
    (before_s, old), (at_s, new) = before, after
    over_s = at_s - before_s
    return Sample(
        at_s=at_s,
        over_s=over_s,
        cpu_cores=rate(old.cpu_s, new.cpu_s, over_s),
        host_mem_gib=new.mem_gib,
        disk_mib_per_s=rate(old.disk_mib, new.disk_mib, over_s),
        network_mib_per_s=rate(old.network_mib, new.network_mib, over_s),
        loopback_mib_per_s=rate(old.loopback_mib, new.loopback_mib, over_s),
        gpu_utilisation=gpu.utilisation,
        gpu_mem_gib=gpu.mem_gib,
        gpu_device_mem_gib=gpu.device_mem_gib,
        pcie_mib_per_s=gpu.pcie_mib_per_s,
    )


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
