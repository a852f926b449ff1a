"""Use of a node by all processes, and each job's part of it: the monitor's figures."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class OneGpu:
    """What all processes together use of one GPU now; None where it could not be read.

    Attributes:
        utilisation: Share of the time that any kernel ran, 0 to 1.
        mem_gib: GPU memory in use.
    """

    utilisation: float | None = None
    mem_gib: float | None = None


@dataclass(frozen=True, slots=True)
class NodeUse:
    """Use of a node by all processes since the look before.

    Attributes:
        cpu_cores: Cores in use.
        cpu_count: Cores that there are.
        mem_gib: Host memory in use.
        disk_mib_per_s: Read from and written to local disks.
        network_mib_per_s: Sent and received, loopback left out.
        gpus: Each GPU that can be seen, by its number in /dev.
    """

    cpu_cores: float | None = None
    cpu_count: int = 0
    mem_gib: float | None = None
    disk_mib_per_s: float | None = None
    network_mib_per_s: float | None = None
    gpus: Mapping[int, OneGpu] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobUse:
    """Use by a job's processes since the look before. Linux counts no network traffic by process.

    Attributes:
        cpu_cores: Cores in use.
        mem_gib: Host memory, shared pages once.
        disk_mib_per_s: Read from and written to storage, page cache hits left out.
        gpu_utilisation: Share of the time that its kernels ran, summed over its GPUs.
        gpu_mem_gib: GPU memory on all of its GPUs.
    """

    cpu_cores: float | None = None
    mem_gib: float | None = None
    disk_mib_per_s: float | None = None
    gpu_utilisation: float | None = None
    gpu_mem_gib: float | None = None


class Use(NamedTuple):
    """One look at a node and at each job on it, by name."""

    node: NodeUse
    jobs: Mapping[str, JobUse]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        gpus = {str(number): asdict(gpu) for number, gpu in self.node.gpus.items()}
        node = {**asdict(self.node), "gpus": gpus}
        return {"node": node, "jobs": {name: asdict(use) for name, use in self.jobs.items()}}
