"""How fast an all-reduce is: the ring model, and measured figures of the store, as 0.2 took them."""

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

from muri.profiler import figures
from muri.profiler.records import ProfileError
from muri.profiler.store import Document, ProfileStore
from muri.units import MIB_PER_GIB

log = logging.getLogger("muri.profiler")

BANDWIDTH_KIND: Final = "bandwidth"
"""Kind of the store's documents that hold bandwidths."""

DEFAULT_MIB_PER_S: Final = 10.0 * MIB_PER_GIB
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
            ProfileError: A figure is outside of what `muri.profiler.figures` allows.
        """
        for name, bounds, value in (
            ("number of nodes", figures.GPU_COUNT, self.nodes),
            ("number of ranks per node", figures.GPU_COUNT, self.ranks_per_node),
            ("MiB/s", figures.BANDWIDTH_MIB_PER_S, self.mib_per_s),
            ("latency", figures.TIME_S, self.latency_s),
        ):
            if fault := bounds.fault(value):
                raise ProfileError(f"bandwidth {self.name}: {name} {fault}")

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
    """All bandwidths in the store; one that cannot be true is left out, and the log names it."""
    found: list[Bandwidth] = []
    for document in store.documents(BANDWIDTH_KIND):
        try:
            found.append(Bandwidth.from_document(document))
        except ProfileError as error:
            log.warning("%s", error)
    return tuple(found)


def ring_share(ranks: int) -> float:
    """How often each link of a ring carries the gradients in an all-reduce: 2 (n − 1) / n."""
    return 2 * (ranks - 1) / ranks


def ring_s(size_over_bandwidth_s: float, latency_s: float, ranks: int) -> float:
    """Seconds of a ring all-reduce: 2 (n − 1) steps, each of one n-th of the data.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        size_over_bandwidth_s: Seconds in which a link would carry all the data once.
        latency_s: Seconds of a step beside the data.
        ranks: Ranks in the ring; a single one exchanges nothing.
    """
    return ring_share(ranks) * size_over_bandwidth_s + 2 * (ranks - 1) * latency_s


def nearest_bandwidth(known: Iterable[Bandwidth], gpu_type: str, ranks: int) -> Bandwidth | None:
    """The measurement between GPUs of this type whose number of ranks is nearest, None without any."""
    of_type = [item for item in known if item.gpu_type == gpu_type and item.ranks > 1]
    return min(of_type, key=lambda item: (abs(math.log(item.ranks / ranks)), -item.nodes), default=None)
