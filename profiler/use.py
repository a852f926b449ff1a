"""Use of a node by all processes, and each job's part of it: the monitor's figures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class OneGpu:
    """What all processes together use of one GPU now; None where it could not be read."""

    utilisation: float | None = None  # Share of the time that any kernel ran, 0 to 1
    mem_gib: float | None = None  # GPU memory in use


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Use of a node by all processes since the look before."""

    cpu_cores: float | None = None  # Cores in use
    cpu_count: int = 0  # Cores that there are
    mem_gib: float | None = None  # Host memory in use
    disk_mib_per_s: float | None = None  # Read from and written to local disks
    network_mib_per_s: float | None = None  # Sent and received, loopback left out
    gpus: Mapping[int, OneGpu] = field(default_factory=dict)  # Each GPU that can be seen, by its number in /dev


@dataclass(frozen=True, slots=True)
class JobUse:
    """Use by a job's processes since the look before. Linux counts no network traffic by process."""

    cpu_cores: float | None = None  # Cores in use
    mem_gib: float | None = None  # Host memory, shared pages once
    disk_mib_per_s: float | None = None  # Read from and written to storage, page cache hits left out
    gpu_utilisation: float | None = None  # Share of the time that its kernels ran, summed over its GPUs
    gpu_mem_gib: float | None = None  # GPU memory on all of its GPUs


class Use(NamedTuple):
    """One look at a node and at each job on it, by name."""

    node: NodeUse
    jobs: Mapping[str, JobUse]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        gpus = {str(number): asdict(gpu) for number, gpu in self.node.gpus.items()}
        node = {**asdict(self.node), "gpus": gpus}
        return {"node": node, "jobs": {name: asdict(use) for name, use in self.jobs.items()}}
