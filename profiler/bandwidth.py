"""How fast an all-reduce is between so many GPUs: the ring model, and measured bandwidths in the store."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

from muri.profiler.records import ProfileError
from muri.profiler.store import Document, ProfileStore

KIND: Final = "bandwidth"

DEFAULT_MIB_PER_S: Final = 10 * 1024.0
"""Assumed where nothing was measured: between a 100 Gbit/s network and PCIe 3.0 × 16."""

DEFAULT_LATENCY_S: Final = 20e-6
"""Assumed for one step of the ring: the order of NCCL's over PCIe and InfiniBand."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A measured all-reduce between the ranks of one job.

    Attributes:
        gpu_type: GRES type of the GPUs.
        nodes: Nodes that the ranks ran on.
        ranks_per_node: Ranks on each node, one for each GPU.
        mib_per_s: What each link of the ring carries, MiB per second.
        latency_s: Seconds that a step of the ring takes beside that.
        backend: What carried it: "nccl" or "gloo".
        measured_at: UTC time, ISO-8601.
    """

    gpu_type: str
    nodes: int
    ranks_per_node: int
    mib_per_s: float
    latency_s: float
    backend: str = "nccl"
    measured_at: str = ""

    def __post_init__(self) -> None:
        """Refuse figures that no measurement can give.

        Raises:
            ProfileError: A figure is not finite, or too small.
        """
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ProfileError(f"bandwidth {self.name}: there must be at least one rank")
        if not (math.isfinite(self.mib_per_s) and self.mib_per_s > 0):
            raise ProfileError(f"bandwidth {self.name}: {self.mib_per_s} MiB/s; it must be > 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ProfileError(f"bandwidth {self.name}: a latency of {self.latency_s} s; it must be ≥ 0")

    @property
    def name(self) -> str:
        """Name in the store: GPU type, ranks per node × nodes."""
        return f"{self.gpu_type}/{self.ranks_per_node}x{self.nodes}"

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.ranks_per_node

    def to_document(self) -> Document:
        """As the store keeps it."""
        body = asdict(self)
        return Document(self.name, body.pop("measured_at"), body)

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Read what `to_document` made; figures of a newer version are ignored.

        Raises:
            ProfileError: A figure is missing or cannot be true.
        """
        known = {item.name: document.body[item.name] for item in fields(cls) if item.name in document.body}
        try:
            return cls(**known, measured_at=document.measured_at)
        except TypeError as error:
            raise ProfileError(f"bandwidth {document.name} in the store: {error}") from error


def bandwidths(store: ProfileStore) -> tuple[Bandwidth, ...]:
    """All that was measured."""
    return tuple(Bandwidth.from_document(document) for document in store.documents(KIND))


def ring_share(ranks: int) -> float:
    """How often each link of a ring carries the gradients in an all-reduce: 2 (n − 1) / n."""
    return 2 * (ranks - 1) / ranks


def ring_s(size_over_bandwidth_s: float, latency_s: float, ranks: int) -> float:
    """Seconds of a ring all-reduce: 2 (n − 1) steps, each of one n-th of the data.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        size_over_bandwidth_s: Seconds in which a link would carry all the data once.
        latency_s: Seconds of a step beside the data.
        ranks: Ranks in the ring; one has nobody to talk to.
    """
    return ring_share(ranks) * size_over_bandwidth_s + 2 * (ranks - 1) * latency_s


def nearest_bandwidth(known: Iterable[Bandwidth], gpu_type: str, ranks: int) -> Bandwidth | None:
    """The measurement between GPUs of this type whose number of ranks is nearest, None without any."""
    of_type = [item for item in known if item.gpu_type == gpu_type and item.ranks > 1]
    return min(of_type, key=lambda item: (abs(math.log(item.ranks / ranks)), -item.nodes), default=None)
