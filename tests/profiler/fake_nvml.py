"""A stand-in for pynvml on machines without a GPU: the calls that telemetry makes, with figures that tests set."""

# ruff: noqa: N802 -- the names are those of pynvml

from dataclasses import dataclass, field
from types import SimpleNamespace

MIB = 1024**2


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"error {value}")
        self.value = value


@dataclass
class Device:
    uuid: str
    utilization: int = 50
    used_mib: int = 1024
    processes: dict = field(default_factory=dict)
    minor: int = 0
    samples: list = field(default_factory=list)
    refuses: dict = field(default_factory=dict)

    def answer(self, what, value):
        if what in self.refuses:
            raise NVMLError(self.refuses[what])
        return value


class FakeNvml:
    """Bindings with the names of pynvml."""

    NVMLError = NVMLError
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18

    def __init__(self, *devices, init_error=None, mig=None):
        self.devices = devices
        self.init_error = init_error
        self.mig = mig or {}
        self.open = 0

    def nvmlInit(self):
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.mig:
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return self.mig[uuid]

    def nvmlDeviceGetUUID(self, device):
        return device.uuid.encode()

    def nvmlDeviceGetUtilizationRates(self, device):
        return device.answer("utilization", SimpleNamespace(gpu=device.utilization, memory=0))

    def nvmlDeviceGetMemoryInfo(self, device):
        return device.answer("memory", SimpleNamespace(used=device.used_mib * MIB))

    def nvmlDeviceGetComputeRunningProcesses(self, device):
        running = [SimpleNamespace(pid=pid, usedGpuMemory=mem) for pid, mem in device.processes.items()]
        return device.answer("processes", running)

    def nvmlDeviceGetMinorNumber(self, device):
        return device.answer("minor", device.minor)

    def nvmlDeviceGetProcessUtilization(self, device, since_us):
        """The samples (time in µs, process, percent) after a time; NVML has an error where there are none."""
        found = [SimpleNamespace(timeStamp=at, pid=pid, smUtil=sm) for at, pid, sm in device.samples if at > since_us]
        if not found:
            raise NVMLError(device.refuses.get("samples", self.NVML_ERROR_NOT_FOUND))
        return found
