"""Use of a host and its GPUs: by a process and its descendants, sampled beside a measurement, and by a node's jobs.

CPU, memory, disk and network through psutil, GPUs through NVML; None for what cannot be read.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple, Self

import psutil

from muri.clock import GIB, MIB
from muri.profiler.gpu_usage import GpuReader, GpuUnreadableError
from muri.profiler.records import JobUse, NodeUse, OneGpu, Use

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
    """Reads what some processes and their descendants use.

    CPU seconds and disk bytes of children that ended are in their parent's figures once the parent
    has waited for them, so the totals keep them. So they do of the given processes, whose parents are others'.
    A descendant whose parent ended is still followed if it was seen before.
    """

    def __init__(self, *pids: int) -> None:
        self._roots = set(pids)
        self._ended = {"cpu": 0.0, "disk": 0.0}
        self._last: dict[tuple[str, int], float] = {}
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
        """Read everything that is due; the rest keeps its last value."""
        if not self._seen:
            self._first_tree()
        elif self._tree_due.due():
            self._refresh_tree()
            self._tree_due.done()
        self._memory_gib = self._memory()
        disk_mib = self._disk_mib()
        return HostReading(self._cpu_s(), self._memory_gib, disk_mib)

    def follow(self, pids: Collection[int]) -> None:
        """Read these processes and their descendants as well, from now on."""
        new = set(pids) - self._roots
        self._roots |= new
        if self._seen:
            for process in self._add_trees(new):
                with contextlib.suppress(psutil.Error, OSError):
                    self._ended["cpu"] -= sum(process.cpu_times()[:4])
                    counters = process.io_counters()
                    self._ended["disk"] -= counters.read_bytes + counters.write_bytes

    def _first_tree(self) -> None:
        self._seen = set(psutil.pids())
        self._add_trees(self._roots)

    def _add_trees(self, pids: set[int]) -> list[psutil.Process]:
        added: list[psutil.Process] = []
        for pid in pids - self._tree.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                added += [each for each in (root, *root.children(recursive=True)) if each.pid not in self._tree]
                self._tree.update((process.pid, process) for process in added)
        return added

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
                used_s = sum(process.cpu_times()[:4])  # user, system and those of children waited for
            except psutil.NoSuchProcess:
                del self._tree[pid]
                self._weights.pop(pid, None)
                self._keep(pid)
            except psutil.Error:
                continue
            else:
                total_s += used_s
                self._note("cpu", pid, used_s)
        return self._grown("cpu", total_s)

    def _note(self, name: str, pid: int, used: float) -> None:
        if pid in self._roots:
            self._last[name, pid] = used

    def _keep(self, pid: int) -> None:
        """Keep the figures of a given process that has ended; those of another one are in its parent's."""
        self._roots.discard(pid)
        for name in self._ended:
            self._ended[name] += self._last.pop((name, pid), 0.0)

    def _grown(self, name: str, total: float) -> float:
        """The total, which never falls: a process that ends is missing until its parent has waited for it."""
        self._totals[name] = max(self._totals[name], self._ended[name] + total)
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
        for pid, process in self._tree.items():
            try:
                counters = process.io_counters()
            except psutil.NoSuchProcess:
                continue
            except (psutil.AccessDenied, NotImplementedError, AttributeError, OSError):
                self._disk_is_secret = True  # from now on: a total without one of the processes would be a false rate
                return None
            total_bytes += counters.read_bytes + counters.write_bytes
            self._note("disk", pid, counters.read_bytes + counters.write_bytes)
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


log = logging.getLogger("muri.profiler")

SAMPLE_EVERY_S: Final = 0.1
SAMPLING_SHARE: Final = 0.004
"""Share of one core that sampling may take; expensive samples are taken less often."""

JOIN_S: Final = 5.0
LEAST_SAMPLES: Final = 3
"""Fewer samples of the steady work say less than those of the whole run."""

_STEADY_SINCE: Final = "steady_since_s"
"""The script's own process adds this figure for `with_usage`; the result does not keep it."""

Figure = Literal["cpu_cores", "host_mem_gib", "gpu_utilization", "gpu_mem_gib"]


class Sample(NamedTuple):
    """Use by a process and its descendants; None for what could not be read."""

    at_s: float  # When it was read, on the clock `time.perf_counter`
    over_s: float  # Seconds since the sample before
    cpu_cores: float | None = None  # Cores in use over these seconds
    host_mem_gib: float | None = None  # Host memory, shared pages counted once
    gpu_utilization: float | None = None  # Mean over the visible devices, 0 to 1
    gpu_mem_gib: float | None = None  # GPU memory on all visible devices


class Usage(tuple[Sample, ...]):
    """Samples in the order of time."""

    __slots__ = ()

    def mean(self, figure: Figure) -> float | None:
        """Mean over time, in which each sample counts for the seconds that it covers."""
        read = [sample for sample in self if getattr(sample, figure) is not None]
        weight = sum(sample.over_s for sample in read)
        return sum(getattr(sample, figure) * sample.over_s for sample in read) / weight if weight > 0 else None

    def peak(self, figure: Figure) -> float | None:
        """The highest value."""
        values = (getattr(sample, figure) for sample in self)
        return max((value for value in values if value is not None), default=None)

    def since(self, at_s: float) -> "Usage":
        """The samples that begin at or after a time of `time.perf_counter`, for leaving a warm-up out."""
        return Usage(sample for sample in self if sample.at_s - sample.over_s >= at_s)


def with_usage(found: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    """Complete a script's own result, figures or an error, with the usage that was sampled."""
    if "error" in found:
        return dict(found)
    steady = usage.since(float(found[_STEADY_SINCE]))
    counted = steady if len(steady) >= LEAST_SAMPLES else usage
    seen = {
        "host_mem_gib": usage.peak("host_mem_gib"),
        "cpu_cores": counted.mean("cpu_cores"),
        "gpu_utilization": counted.mean("gpu_utilization"),
    }
    detail = {**found["detail"], **{name: value for name, value in seen.items() if value is not None}}
    figures = {name: value for name, value in found.items() if name != _STEADY_SINCE}
    gpu_mem_gib = max(float(found["gpu_mem_gib"]), usage.peak("gpu_mem_gib") or 0.0)
    return {**figures, "gpu_mem_gib": gpu_mem_gib, "detail": detail}


class Sampler:
    """Samples a process and its descendants until it is stopped.

    The thread is a daemon, so it keeps no process alive; after a fork it runs only in the parent.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._host = HostReader(pid)
        self._gpus: GpuReader | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muri-telemetry", daemon=True)
        self._samples: list[Sample] = []
        self._before: tuple[float, HostReading] | None = None
        self._cpu_s = 0.0

    def __enter__(self) -> Self:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self.stop()

    def stop(self) -> Usage:
        """Take a last sample and return them all; a second call returns the same."""
        self._ended.set()
        self._thread.join(JOIN_S)
        return Usage(self._samples)

    def _run(self) -> None:
        try:
            self._gpus = self._open_gpus()
            self._sample()  # the most expensive one: it looks at all processes of the node
            since_s, start_cpu_s = time.perf_counter(), self._cpu_s
            while not self._ended.wait(self._pause_s(since_s, start_cpu_s)):
                self._sample()
            self._sample()
        except Exception as error:
            log.warning("sampling ended early: %s: %s", type(error).__name__, error)
        finally:
            if self._gpus is not None:
                self._gpus.close()

    def _open_gpus(self) -> GpuReader | None:
        """In the thread, since NVML may take seconds to wake a GPU."""
        environment: Mapping[str, str] = os.environ
        try:
            environment = psutil.Process(self._pid).environ()  # its CUDA_VISIBLE_DEVICES may differ from ours
        except (psutil.Error, OSError):
            log.debug("no environment of process %d", self._pid)
        try:
            return GpuReader(environment)
        except GpuUnreadableError:
            return None

    def _sample(self) -> None:
        at_s, reading = time.perf_counter(), self._host.read()
        if self._before is not None:
            before_s, old = self._before
            gpu = (None, None) if self._gpus is None else self._gpus.read(self._host.pids)
            cores = rate(old.cpu_s, reading.cpu_s, at_s - before_s)
            self._samples.append(Sample(at_s, at_s - before_s, cores, reading.mem_gib, *gpu))
        self._before = (at_s, reading)
        self._cpu_s = time.thread_time()

    def _pause_s(self, since_s: float, start_cpu_s: float) -> float:
        """How long to wait for the next sample, so that all of them together keep to their share of a core."""
        earned_s = (time.perf_counter() - since_s) * SAMPLING_SHARE
        return max(SAMPLE_EVERY_S, (self._cpu_s - start_cpu_s - earned_s) / SAMPLING_SHARE)


EVERY_S: Final = 10.0
"""Least time between two looks. A look that costs much, as with very many processes, is followed by a longer pause, so
that all of them take 0.1 % of a core."""


class Monitor:
    """Looks at the node and at some jobs on it, again and again.

    Args:
        library: NVML's bindings, `pynvml` unless given.

    Attributes:
        notes: Why GPUs cannot be read.
    """

    def __init__(self, library: Any = None) -> None:
        self.notes: dict[str, None] = {}
        self._due = Throttle(EVERY_S)  # (each of the readers keeps to a share of its own as well)
        self._jobs: dict[str, HostReader] = {}
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

    def look(self, jobs: Mapping[str, Collection[int]]) -> Use | None:
        """Return what the node and some jobs use; None while it is not time, and at the first look.

        It looks at once where a job has come or gone: rates begin with the first look at a job.

        Args:
            jobs: Ids of each job's processes, by name; their descendants count, too.
        """
        if not self._due.due() and jobs.keys() == self._jobs.keys():
            return None
        try:
            return self._look(jobs)
        finally:
            self._due.done()

    def _look(self, jobs: Mapping[str, Collection[int]]) -> Use | None:
        now_s, before_s = time.perf_counter(), self._before_s
        over_s = now_s - before_s if before_s else 0.0
        totals = (_busy_s(), node_disk_mib(), node_network_mib())
        readings = {name: self._reader(name, pids).read() for name, pids in jobs.items()}
        gpus: dict[int, OneGpu] = {}
        shares: dict[str, tuple[float | None, float | None]] = {}
        if self._gpus is not None:
            gpus = self._gpus.each_gpu()
            shares = self._gpus.by_owner({name: self._jobs[name].pids for name in jobs}) if jobs else {}
        self._jobs = {name: reader for name, reader in self._jobs.items() if name in jobs}
        old, old_readings = self._totals, self._job_totals
        self._before_s, self._totals, self._job_totals = now_s, totals, readings
        if not over_s:
            return None
        cpu, disk, network = (rate(one, other, over_s) for one, other in zip(old, totals, strict=True))
        node = NodeUse(cpu, os.cpu_count() or 0, psutil.virtual_memory().used / GIB, disk, network, gpus)
        uses = {}
        for name, new in readings.items():
            before = old_readings.get(name)
            job_cpu = None if before is None else rate(before.cpu_s, new.cpu_s, over_s)
            job_disk = None if before is None else rate(before.disk_mib, new.disk_mib, over_s)
            uses[name] = JobUse(job_cpu, new.mem_gib, job_disk, *shares.get(name, (None, None)))
        return Use(node, uses)

    def _reader(self, name: str, pids: Collection[int]) -> HostReader:
        reader = self._jobs.setdefault(name, HostReader())
        reader.follow(pids)
        return reader


def _busy_s() -> float:
    """Core seconds that all processes used since the node was started."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # these are in user and nice as well
    return float(sum(times) - guests - idle)
