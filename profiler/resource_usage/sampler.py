"""Samples what a process and its descendants use, in a cheap thread that neither blocks nor outlives them."""

import os
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import psutil

from muri.errors import UsageError
from muri.profiler.resource_usage.host import HostReader, HostReading, rate
from muri.profiler.resource_usage.nvml import GpuReader, GpuReading, GpuUnreadableError
from muri.profiler.resource_usage.sample import Sample, Usage

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
