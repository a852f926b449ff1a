"""Dominant resource fairness and Tetris: jobs get their whole demand of CPUs and memory, and nothing is stopped."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from muri.policies.cycle.queue import Contender
from muri.policies.schedulers import EXCLUSIVE_TO_THE_END, FixedOrder, fifo
from muri.policies.siblings.mechanisms import greedy
from muri.policies.siblings.shares import Round, Seat, Seating, Servers, saturating_wish, size_of, spread
from muri.policies.siblings.synergy import AllocationPolicy, Way
from muri.policies.types import CpuMemShare, FreeNode, NodeShare, PlanJob, PlanRequest, PriorityKey, all_jobs

Totals = tuple[float, float, float]  # GPUs, CPUs and memory


def tetris(round_: Round) -> Seating:
    """Seat, one after the other, the job and the node with the greatest dot product of demand and free resources.

    Both are relative to the node's size; ties go to the more urgent job, then to the first node by name. Demands are
    fixed. Jobs of several nodes, which no single dot product describes, are seated last, by GPUs.

    Source: Tetris (Grandl et al., SIGCOMM 2014), section 3.2: alignment. Its bonus for short jobs is left out, as
    durations are not known for certain.
    """
    packing = _Packing(round_.servers.copy())
    for contender in round_.contenders:
        if contender.job.node_count == 1:
            packing.offer(contender)
    while packing.seat_best():
        pass
    for contender in round_.contenders:
        if contender.rank not in packing.seating.seats:
            packing.seat_spread(contender)
    return packing.seating


@dataclass
class _Packing:
    servers: Servers
    seating: Seating = field(default_factory=Seating)
    kinds: dict[object, list[Contender]] = field(default_factory=dict)
    full: set[object] = field(default_factory=set)

    def offer(self, contender: Contender) -> None:
        """Add a job to those of its kind, of which the most urgent is always the next candidate."""
        kind = (contender.bucket.partition, contender.bucket.gpu_count, contender.job.sensitivity)
        self.kinds.setdefault(kind, []).append(contender)

    def seat_best(self) -> bool:
        """Seat one job; False when nothing fits any more."""
        best: tuple[float, int, str] | None = None
        chosen: tuple[object, Seat] | None = None
        for kind, contenders in list(self.kinds.items()):
            found = self._best_node(contenders[0])
            if found is None:
                del self.kinds[kind]
                continue
            score, seat = found
            ranked = (-score, seat.rank, seat.node)
            if best is None or ranked < best:
                best, chosen = ranked, (kind, seat)
        if chosen is None:
            return False
        kind, seat = chosen
        self._settle(seat)
        del self.kinds[kind][0]
        if not self.kinds[kind]:
            del self.kinds[kind]
        return True

    def seat_spread(self, contender: Contender) -> None:
        """Seat a job on several nodes, if its demand fits there."""
        job, servers = contender.job, self.servers
        size = size_of(contender)
        if size in self.full:
            return
        gpus = servers.gpus.copy().take(job.partition, job.gpu_count, node_count=job.node_count)
        if gpus is not None and len(gpus) > 1:
            seat = Seat(contender, gpus, spread(servers, job, gpus, saturating_wish))
            if servers.fits(gpus, seat.cpu_mem):
                self._settle(seat)
                return
        self.full.add(size)

    def _best_node(self, contender: Contender) -> tuple[float, Seat] | None:
        job, best = contender.job, None
        for name in self.servers.with_gpus(job, job.gpu_count):
            node = self.servers.nodes[name]
            gpus = (NodeShare(name, job.gpu_count),)
            cpu_mem = self.servers.shares_on(gpus, saturating_wish(job, node, job.gpu_count))
            if self.servers.fits(gpus, cpu_mem):
                score = self._alignment(node, job.gpu_count, cpu_mem[0])
                if best is None or score > best[0]:
                    best = (score, Seat(contender, gpus, cpu_mem))
        return best

    def _alignment(self, node: FreeNode, gpus: int, cpu_mem: CpuMemShare) -> float:
        free = self.servers.free(node.name)
        parts = (
            (gpus, self.servers.gpus.on_node(node.name), node.gpu_count),
            (cpu_mem.cpus, free.cpus, node.cpu_count),
            (cpu_mem.mem_gib, free.mem_gib, node.mem_gib),
        )
        return sum((wanted / size) * (left / size) for wanted, left, size in parts if size)

    def _settle(self, seat: Seat) -> None:
        self.servers.gpus.take_exactly(seat.gpus)
        self.servers.take_shares(seat.cpu_mem)
        self.seating.seats[seat.rank] = seat


class Tetris(AllocationPolicy, FixedOrder):
    """Packs GPUs, CPUs and memory: the best match of demand and node first.

    Source: Tetris (Grandl et al., SIGCOMM 2014), as a baseline of Synergy (OSDI 2022).
    """

    name = "tetris"
    order = "best match, submit time"
    fixed = EXCLUSIVE_TO_THE_END
    way = Way(tetris)
    ranking = fifo


class Drf(AllocationPolicy):
    """Dominant resource fairness: the user with the smallest share goes first.

    Source: DRF (Ghodsi et al., NSDI 2011), as a baseline of Synergy (OSDI 2022).
    """

    name = "drf"
    order = "dominant share"
    fixed = EXCLUSIVE_TO_THE_END
    way = Way(greedy)

    def key(self, request: PlanRequest) -> PriorityKey:
        """By the dominant share of the job's user when its turn comes."""
        share = fill_order(request)

        def smallest_first(job: PlanJob) -> tuple[float, ...]:
            return (share[job.job_id],)

        return smallest_first


def fill_order(request: PlanRequest) -> Mapping[int, float]:
    """Return the dominant share of its user when a job's turn comes, by job id.

    Progressive filling starts the next job of the user with the smallest dominant share. With demands that only add up,
    that is the order of the sums over a user's earlier jobs; running jobs come first, then others as submitted.

    Source: DRF (Ghodsi et al., NSDI 2011), algorithm 1.
    """
    totals, nodes = _totals(request), _first_nodes(request.nodes)
    running = {job.job_id for unit in request.running for job in unit.members}
    held: dict[str, list[float]] = {}
    share: dict[int, float] = {}
    for job in sorted(all_jobs(request), key=lambda job: (job.job_id not in running, job.submit_s, job.job_id)):
        amounts = held.setdefault(job.user, [0.0, 0.0, 0.0])
        share[job.job_id] = max(
            (amount / total for amount, total in zip(amounts, totals, strict=True) if total), default=0.0
        )
        for index, amount in enumerate(_demand(job, nodes.get(job.partition))):
            amounts[index] += amount
    return share


def _totals(request: PlanRequest) -> Totals:
    nodes = request.nodes
    return (
        sum(node.gpu_count or node.free_gpus for node in nodes),
        sum(node.cpu_count for node in nodes),
        sum(node.mem_gib for node in nodes),
    )


def _first_nodes(nodes: Iterable[FreeNode]) -> Mapping[str, FreeNode]:
    """The first node of known size by name, for each partition."""
    last_first = sorted((node for node in nodes if node.gpu_count), key=lambda node: node.name, reverse=True)
    return {partition: node for node in last_first for partition in node.partitions}


def _demand(job: PlanJob, node: FreeNode | None) -> Totals:
    """Return a job's demand on a node that could be its own."""
    if node is None:
        return (job.gpu_count, 0.0, 0.0)
    each = saturating_wish(job, node, min(job.gpu_count, node.gpu_count))
    return (job.gpu_count, each.cpus * job.gpu_count, each.mem_gib * job.gpu_count)
