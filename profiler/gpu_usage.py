"""What the visible NVIDIA GPUs do, through NVML; says why where it can't be read."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from muri.clock import GIB
from muri.errors import MuriError
from muri.profiler.records import OneGpu
from muri.pythons import what_brings

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
"""The namespace that the kernel starts with; NVML names processes by their ids there."""

FOREIGN_PIDS_NOTE: Final = (
    "GPU memory of the job's processes cannot be told apart: NVML names processes as the node does, and this runs "
    "in a container with process ids of its own"
)


class GpuUnreadableError(MuriError):
    """The GPUs cannot be read; the text says why."""


def check(environment: Mapping[str, str] | None = None, library: Any = None) -> str | None:
    """Why the visible GPUs cannot be read; None where they can."""
    try:
        GpuReader(os.environ if environment is None else environment, library).close()
    except GpuUnreadableError as error:
        return str(error)
    return None


class GpuReader:
    """Reads the GPUs that CUDA shows to a process.

    CUDA numbers GPUs by speed and NVML by PCI bus; on nodes with different GPUs
    CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers agree. Names (GPU-…, MIG-…) are always right.

    Args:
        environment: The process's, for CUDA_VISIBLE_DEVICES.
        library: NVML's bindings, `pynvml` unless given.

    Attributes:
        notes: Figures that could not be read, and why.

    Raises:
        GpuUnreadableError: There is no driver, no permission, or no visible GPU.
    """

    def __init__(self, environment: Mapping[str, str], library: Any = None) -> None:
        self.notes: dict[str, None] = {}
        self._nvml = library or _bindings()
        self._unsupported: set[str] = set()
        self._sampled_us: dict[int, int] = {}
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise GpuUnreadableError(_reason(self._nvml, error)) from error
        try:
            self._devices = _visible(self._nvml, environment.get(VISIBLE_VARIABLE))
        except self._nvml.NVMLError as error:
            self.close()
            raise GpuUnreadableError(_reason(self._nvml, error)) from error
        except GpuUnreadableError:
            self.close()
            raise

    def close(self) -> None:
        """Let NVML go."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            self.notes["NVML could not be shut down"] = None

    def read(self, pids: frozenset[int]) -> tuple[float | None, float | None]:
        """Read the mean utilization of all visible GPUs, 0 to 1, and the GPU memory (GiB) of some processes."""
        used = self._utilization()
        return (None if used is None else sum(used) / len(used)), self._own_mem_gib(pids)

    def each_gpu(self) -> dict[int, OneGpu]:
        """Read each visible GPU, by its number in /dev (Slurm's index where gres.conf lists the files in order)."""
        nvml, count = self._nvml, len(self._devices)
        numbers = self._each("the GPU's number", nvml.nvmlDeviceGetMinorNumber) or list(range(count))
        memory = self._each("GPU memory", lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used / GIB)
        used = self._utilization()
        rows = zip(numbers, [None] * count if used is None else used, memory or [None] * count, strict=True)
        return {int(number): OneGpu(utilization, mem_gib) for number, utilization, mem_gib in rows}

    def by_owner(self, owners: Mapping[str, frozenset[int]]) -> dict[str, tuple[float | None, float | None]]:
        """Share the GPUs' time and memory out to jobs, given each one's processes.

        Returns:
            Share of the time that each job's kernels ran since the last call, and its GPU memory (GiB), both summed
            over all visible GPUs; None where the driver does not tell.
        """
        per_pid = self._utilization_by_pid()
        found = {}
        for name, pids in owners.items():
            used = None if per_pid is None else sum(share for pid, share in per_pid.items() if pid in pids)
            found[name] = used, self._own_mem_gib(pids)
        return found

    def _utilization(self) -> list[float] | None:
        nvml = self._nvml
        return self._each("GPU utilization", lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)

    def _utilization_by_pid(self) -> dict[int, float] | None:
        """Share of the time that each process's kernels ran, from the driver's own samples since the last call."""
        numbers = iter(range(len(self._devices)))
        found = self._each("use of each process", lambda device: self._samples_of(next(numbers), device))
        if found is None:
            return None
        shares: dict[int, float] = {}
        for number, samples in enumerate(found):
            self._sampled_us[number] = max(
                (each.timeStamp for each in samples), default=self._sampled_us.get(number, 0)
            )
            by_pid: dict[int, list[float]] = {}
            for sample in samples:
                by_pid.setdefault(int(sample.pid), []).append(sample.smUtil / 100)
            for pid, used in by_pid.items():
                shares[pid] = shares.get(pid, 0.0) + sum(used) / len(used)
        return shares

    def _samples_of(self, number: int, device: Any) -> list[Any]:
        nvml = self._nvml
        try:
            return list(nvml.nvmlDeviceGetProcessUtilization(device, self._sampled_us.get(number, 0)))
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_FOUND:  # no process ran anything meanwhile
                return []
            raise

    def _own_mem_gib(self, pids: frozenset[int]) -> float | None:
        found = self._each("memory of each process", self._nvml.nvmlDeviceGetComputeRunningProcesses)
        if found is None:
            return None
        running = [process for processes in found for process in processes]
        own = [process.usedGpuMemory for process in running if process.pid in pids]
        if (running and not own and _pid_namespace() != FIRST_PID_NAMESPACE) or None in own:
            self.notes[FOREIGN_PIDS_NOTE if not own else "the driver does not say how much each process holds"] = None
            return None
        return float(sum(own) / GIB)

    def _each(self, what: str, read: Callable[[Any], Any]) -> list[Any] | None:
        """Read one thing of every device; None from the first time that one of them refuses for good."""
        nvml = self._nvml
        if what in self._unsupported:
            return None
        try:
            return [read(device) for device in self._devices]
        except nvml.NVMLError as error:
            self.notes[f"{what} cannot be read: {_reason(nvml, error)}"] = None
            lasting = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION, nvml.NVML_ERROR_INVALID_ARGUMENT)
            if getattr(error, "value", None) in lasting:
                self._unsupported.add(what)
            return None


def _bindings() -> Any:
    try:
        import pynvml  # an extra: nodes without GPUs have no use for it
    except ImportError as error:
        raise GpuUnreadableError(
            f"GPUs cannot be read: the Python package nvidia-ml-py is missing: {what_brings('torch', 'muri-node')}"
        ) from error
    return pynvml


def _reason(nvml: Any, error: Exception) -> str:
    """Explain NVML's error to someone who runs jobs."""
    reasons = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver on this node (its library libnvidia-ml is missing)",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "no NVIDIA driver is loaded on this node (see `nvidia-smi`)",
        nvml.NVML_ERROR_NO_PERMISSION: "no permission to read the GPUs; try as root, or ask for access to /dev/nvidia*",
        nvml.NVML_ERROR_NOT_SUPPORTED: "not supported by this GPU or MIG instance",
        nvml.NVML_ERROR_INVALID_ARGUMENT: "not supported by this GPU or MIG instance",
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library differ in version; reboot the node",
    }
    return reasons.get(getattr(error, "value", 0), f"NVML says: {error}")


def _visible(nvml: Any, listed: str | None) -> tuple[Any, ...]:
    """Handles of the devices that CUDA shows; like CUDA, it stops at the first name that means none."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not every:
        raise GpuUnreadableError("the NVIDIA driver finds no GPU on this node")
    if listed is None:
        return tuple(every)
    found: list[Any] = []
    for name in (part.strip() for part in listed.split(",")):
        device = _named(nvml, every, name)
        if device is None:
            break
        found.append(device)
    if not found:
        raise GpuUnreadableError(f"{VISIBLE_VARIABLE}={listed!r} shows none of the {len(every)} GPUs of this node")
    return tuple(found)


def _named(nvml: Any, every: list[Any], name: str) -> Any | None:
    """The device of a number, a UUID or the beginning of one, or a MIG instance."""
    if name.isdecimal():
        return every[int(name)] if int(name) < len(every) else None
    if name.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            return None
    if not name.startswith("GPU-"):
        return None
    found = [device for device in every if _text(nvml.nvmlDeviceGetUUID(device)).startswith(name)]
    return found[0] if len(found) == 1 else None


def _text(value: str | bytes) -> str:
    """Older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return FIRST_PID_NAMESPACE
