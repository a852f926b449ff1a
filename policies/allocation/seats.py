"""Seats: who gets which GPUs with which CPUs and memory, and what a mechanism decides it from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from muri.policies.allocation.demand import Wish, speed
from muri.policies.allocation.servers import Host, Servers, per_gpu
from muri.policies.cycle.placement import Shares
from muri.policies.cycle.placing import Placement, place
from muri.policies.cycle.queue import Contender
from muri.policies.cycle.selection import select
from muri.policies.cycle.units import running_unit, unit_of
from muri.policies.reason import Reason
from muri.policies.traits import Demand
from muri.policies.types import Certificate, PlanJob


@dataclass(slots=True)
class Seat:
    """A job and what it gets.

    Attributes:
        contender: The job.
        gpus: Nodes and numbers of GPUs; of a running job that stays also which ones.
        host: CPUs and memory of each of these nodes.
        stays: Whether it runs on these GPUs already.
        held: What it holds now, where it stays.
        notes: Reasons beside the usual ones.
    """

    contender: Contender
    gpus: Shares
    host: Host
    stays: bool = False
    held: Host = ()
    notes: tuple[Reason, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether nothing changes for it; a changed share takes a restart."""
        return self.stays and self.host == self.held

    @property
    def rank(self) -> int:
        """Its job's place in the queue."""
        return self.contender.rank

    @property
    def node(self) -> str:
        """The node of a job that is on one."""
        return self.gpus[0].node

    @property
    def share(self) -> Demand:
        """CPUs and memory by GPU on the first node."""
        return per_gpu(self.host[0], self.gpus[0].gpu_count)


@dataclass(frozen=True, slots=True)
class Round:
    """What a mechanism decides from.

    Attributes:
        contenders: Jobs by rank.
        servers: What can be given out, with what running contenders hold; mechanisms work on copies.
        interval_s: Seconds until the next plan.
    """

    contenders: tuple[Contender, ...]
    servers: Servers
    interval_s: float

    def runnable(self) -> list[Placement]:
        """The jobs whose GPUs can be found, in order of priority with backfill, and GPUs for them.

        What runs stays where it is unless a more urgent job finds no place otherwise.
        """
        selection = select(self.contenders, self.servers.gpus, 1)
        chosen = [*selection.alone, *(item for choice in selection.buckets.values() for item in choice.members)]
        return place([unit_of((contender,)) for contender in chosen], self.servers.gpus.copy())

    def seat_of(self, contender: Contender) -> Seat | None:
        """Where a job runs alone now, with what it holds."""
        unit = running_unit((contender,))
        if unit is None:
            return None
        held = self.servers.held(unit)
        return Seat(contender, unit.gpus, held, stays=True, held=held)


@dataclass(slots=True)
class Seating:
    """What a mechanism decided.

    Attributes:
        seats: Seats by rank.
        certificate: How good it is, of a mechanism that knows.
    """

    seats: dict[int, Seat] = field(default_factory=dict)
    certificate: Certificate = field(default_factory=Certificate)

    def by_rank(self) -> Sequence[Seat]:
        """The seats in order of priority."""
        return [self.seats[rank] for rank in sorted(self.seats)]


def spread(servers: Servers, job: PlanJob, gpus: Shares, wish: Wish) -> Host:
    """CPUs and memory of a job on several nodes: the same for each GPU everywhere.

    It is the least of what the job would ask for on each of them that tells what it has, and where that is slower than
    the proportional share of a node, each node's proportional share.
    """
    nodes = [servers.nodes[share.node] for share in gpus]
    wishes = [wish(job, node, share.gpu_count) for node, share in zip(nodes, gpus, strict=True)]
    wanted = Demand(
        min((each.cpus for each in wishes if each.cpus), default=0.0),
        min((each.mem_gib for each in wishes if each.mem_gib), default=0.0),
    )
    slower = any(speed(job, wanted, node) < 1 for node in nodes)
    return servers.host_of(gpus, None if slower else wanted)
