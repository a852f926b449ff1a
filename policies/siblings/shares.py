"""CPUs and memory of jobs: demand, fair share and speed of each, and the seats that a mechanism gives out on nodes."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Final

from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.cycle.placing import Placement, place, running_unit, unit_of
from muri.policies.cycle.queue import Contender, select
from muri.policies.cycle.reasons import blanks
from muri.policies.speed import Shape
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import Certificate, CpuMemShare, FreeNode, PlanJob, Reason, Running

SLACK: Final = 1e-9  # Relative difference that is only a rounding error
Wish = Callable[[PlanJob, FreeNode, int], Demand]  # A job's wish per GPU on a node where it has this number of GPUs

_LOAD, _PREPROCESS = 0, 1


def fair_share(node: FreeNode) -> Demand:
    """The GPU-proportional share: a node's CPUs and memory by its GPUs; 0 where unknown."""
    if not node.gpu_count:
        return Demand(0.0, 0.0)
    return Demand(node.cpu_count / node.gpu_count, node.mem_gib / node.gpu_count)


def proportional_wish(job: PlanJob, node: FreeNode, gpus: int) -> Demand:
    """The wish of every job when CPUs and memory follow the GPUs."""
    return fair_share(node)


def saturating_wish(job: PlanJob, node: FreeNode, gpus: int) -> Demand:
    """The least that saturates a job's throughput, within the node's limits; never slower than the fair share.

    A job of unknown sensitivity asks for its proportional share.

    Source: Synergy (Mohan et al., OSDI 2022), section 3: the demand vector.
    """
    fair = fair_share(node)
    if job.sensitivity is None or not node.gpu_count:
        return fair
    return _saturating(job.sensitivity, fair, Demand(node.cpu_count / gpus, node.mem_gib / gpus))


def speed(job: PlanJob, per_gpu: Demand, node: FreeNode) -> float:
    """Throughput with a share, relative to the proportional share of the node; 1 while unknown."""
    fair = fair_share(node)
    return throughput_ratio(job.sensitivity, enough(per_gpu, fair), enough(fair, fair))


def steps(job: PlanJob, node: FreeNode, gpus: int) -> tuple[Demand, ...]:
    """Shares that a job can use between its proportional share and its demand, the fastest first."""
    if job.sensitivity is None or not node.gpu_count:
        return ()
    return _steps(job.sensitivity, fair_share(node), saturating_wish(job, node, gpus))


def exceeds(first: Demand, second: Demand) -> bool:
    """Whether the first has more of anything than the second."""
    return more(first.cpus, second.cpus) or more(first.mem_gib, second.mem_gib)


def more(first: float, second: float) -> bool:
    """Whether the first amount is larger by more than a rounding error."""
    return first > second + SLACK * max(1.0, abs(second))


@lru_cache(maxsize=4096)
def cells(sensitivity: Sensitivity, fair: Demand, most: Demand) -> tuple[Demand, ...]:
    """The shares up to `most` that reach the fair share's speed and that no smaller share matches."""
    cpus = _candidates((*sensitivity.cpus, sensitivity.demand.cpus, fair.cpus), most.cpus, known=fair.cpus > 0)
    mem_gib = _candidates(
        (*sensitivity.mem_gib, sensitivity.demand.mem_gib, fair.mem_gib), most.mem_gib, known=fair.mem_gib > 0
    )
    usual = throughput(sensitivity, fair, fair)
    found: list[tuple[float, Demand]] = []
    for share in (Demand(*pair) for pair in product(cpus, mem_gib)):
        reached = throughput(sensitivity, share, fair)
        beaten = any(
            other >= reached * (1 - SLACK) and smaller.cpus <= share.cpus and smaller.mem_gib <= share.mem_gib
            for other, smaller in found
        )
        if reached >= usual * (1 - SLACK) and not beaten:
            found.append((reached, share))
    return tuple(share for _, share in found)


@lru_cache(maxsize=4096)
def _steps(sensitivity: Sensitivity, fair: Demand, most: Demand) -> tuple[Demand, ...]:
    within = (share for share in cells(sensitivity, fair, most) if not exceeds(share, most))
    return tuple(sorted(within, key=lambda share: (-throughput(sensitivity, share, fair), share)))


@lru_cache(maxsize=4096)
def _saturating(sensitivity: Sensitivity, fair: Demand, most: Demand) -> Demand:
    wanted = Demand(
        min(sensitivity.demand.cpus, most.cpus) if fair.cpus else 0.0,
        min(sensitivity.demand.mem_gib, most.mem_gib) if fair.mem_gib else 0.0,
    )
    usual = throughput(sensitivity, fair, fair)
    if throughput(sensitivity, wanted, fair) >= usual * (1 - SLACK):
        return wanted
    # Profiles tell the demand within some tolerance: take the least that is really as fast as the fair share.
    enough = [share for share in cells(sensitivity, fair, most) if not exceeds(share, fair)]
    return min(enough, default=fair)


def throughput(sensitivity: Sensitivity, per_gpu: Demand, fair: Demand) -> float:
    """Throughput of a share, in the sensitivity's own unit."""
    return sensitivity.throughput_at(*enough(per_gpu, fair))


def enough(per_gpu: Demand, fair: Demand) -> Demand:
    """A share without a limit on amounts unknown for the node."""
    return Demand(per_gpu.cpus if fair.cpus else math.inf, per_gpu.mem_gib if fair.mem_gib else math.inf)


def _candidates(amounts: tuple[float, ...], most: float, *, known: bool) -> list[float]:
    return sorted({amount for amount in amounts if amount <= most}) if known else [0.0]


def throughput_ratio(sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> float:
    """Throughput of a job alone with a share per GPU (infinite: unlimited), relative to the fair share."""
    if sensitivity is None or given == fair:
        return 1.0
    usual = sensitivity.throughput_at(*fair)
    return sensitivity.throughput_at(*given) / usual if usual > 0 else 1.0


def shape_with(shape: Shape, sensitivity: Sensitivity | None, given: Demand, fair: Demand) -> Shape:
    """The stages of a job with a share (infinite where unlimited); those on GPU and network stay as they are.

    CPUs change the preprocess stage, memory changes the load stage. Where a stage has less time than the throughput
    saves, the other one loses the rest.
    """
    ratio = throughput_ratio(sensitivity, given, fair)
    if ratio == 1.0 or ratio <= 0:
        return shape
    by_cpus = throughput_ratio(sensitivity, Demand(given.cpus, fair.mem_gib), fair) or ratio
    iteration_s = shape.iteration_s / ratio
    preprocess_s = shape.stage_s[_PREPROCESS] + shape.iteration_s / by_cpus - shape.iteration_s
    load_s = shape.stage_s[_LOAD] + iteration_s - shape.iteration_s / by_cpus
    load_s, preprocess_s = load_s + min(0.0, preprocess_s), preprocess_s + min(0.0, load_s)
    stage_s = (max(0.0, load_s), max(0.0, preprocess_s), *shape.stage_s[2:])
    return Shape(stage_s, iteration_s, shape.gpu_mem_gib, shape.model)


JobShares = tuple[CpuMemShare, ...]  # CPUs and memory that a job holds of each of its nodes


class Servers:
    """The resources that can still be given out; nodes of one size have the same number in `kind`."""

    def __init__(self, nodes: Iterable[FreeNode], gpus: FreeGpus) -> None:
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.gpus = gpus
        sizes: dict[tuple[float, ...], int] = {}
        self.kind = {
            name: sizes.setdefault((node.gpu_count, node.cpu_count, node.mem_gib), len(sizes))
            for name, node in self.nodes.items()
        }
        self._of_partition: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            for partition in node.partitions:
                self._of_partition.setdefault(partition, []).append(name)
        self._free = {name: Demand(node.free_cpus, node.free_mem_gib) for name, node in self.nodes.items()}

    def copy(self) -> "Servers":
        """An independent copy for trials."""
        twin = Servers.__new__(Servers)
        twin.nodes, twin.kind, twin._of_partition = self.nodes, self.kind, self._of_partition
        twin.gpus, twin._free = self.gpus.copy(), dict(self._free)
        return twin

    def free(self, name: str) -> Demand:
        """CPUs and memory that a node has left."""
        return self._free[name]

    def with_gpus(self, job: PlanJob, gpus: int) -> list[str]:
        """Nodes of the job's partition with this number of free GPUs, by name."""
        on_node = self.gpus.on_node
        return [name for name in self._of_partition.get(job.partition, ()) if on_node(name) >= gpus]

    def has_cpus_and_mem(self, name: str, amount: Demand) -> bool:
        """Whether a node has these CPUs and this memory left; unknown amounts limit nothing."""
        node, free = self.nodes[name], self._free[name]
        # Written out, because this runs for every node and every job.
        if node.cpu_count and amount.cpus > free.cpus + SLACK * (1.0 + amount.cpus):
            return False
        return not node.mem_gib or amount.mem_gib <= free.mem_gib + SLACK * (1.0 + amount.mem_gib)

    def tightness(self, name: str) -> tuple[float, ...]:
        """Resources that a node has left; best fit takes the least."""
        return (self.gpus.on_node(name), *self._free[name])

    def take_shares(self, shares: Iterable[CpuMemShare]) -> None:
        """Give out CPUs and memory."""
        for share in shares:
            self._move(share, -1.0)

    def give_back_shares(self, shares: Iterable[CpuMemShare]) -> None:
        """Get CPUs and memory back."""
        for share in shares:
            self._move(share, 1.0)

    def _move(self, share: CpuMemShare, sign: float) -> None:
        free = self._free[share.node]
        self._free[share.node] = Demand(free.cpus + sign * share.cpus, free.mem_gib + sign * share.mem_gib)

    def shares_on(self, gpus: Shares, per_gpu: Demand | None = None) -> JobShares:
        """CPUs and memory for GPUs: this amount for each, or the proportional share of each node."""
        return tuple([self._share(share.node, share.gpu_count, per_gpu) for share in gpus])

    def fits(self, gpus: Shares, cpu_mem: JobShares) -> bool:
        """Whether GPUs (each node once), CPUs and memory are all free."""
        enough = all(self.gpus.on_node(share.node) >= share.gpu_count for share in gpus)
        return enough and all(self.has_cpus_and_mem(share.node, Demand(share.cpus, share.mem_gib)) for share in cpu_mem)

    def held(self, unit: Running) -> JobShares:
        """CPUs and memory of a running unit, members together; a node's proportional share where none is given."""
        told = [share for job in unit.members for share in unit.cpu_mem_shares.get(job.job_id, ())]
        if len(unit.members) > 1 and told:
            return tuple(told)
        on_node = {share.node: share for share in told}
        return tuple([on_node.get(share.node) or self._share(share.node, share.gpu_count, None) for share in unit.gpus])

    def _share(self, name: str, gpus: int, per_gpu: Demand | None) -> CpuMemShare:
        node = self.nodes[name]
        each = fair_share(node) if per_gpu is None else per_gpu
        cpus = each.cpus * gpus if node.cpu_count else 0.0
        return CpuMemShare(name, cpus, each.mem_gib * gpus if node.mem_gib else 0.0)


def per_gpu(share: CpuMemShare, gpus: int) -> Demand:
    """A share by GPU."""
    return Demand(share.cpus / gpus, share.mem_gib / gpus)


@dataclass(slots=True)
class Seat:
    """A job and its resources.

    Attributes:
        contender: The job.
        gpus: Nodes and numbers of GPUs; of a running job that stays also which ones.
        cpu_mem: CPUs and memory of each of these nodes.
        stays: Whether it runs on these GPUs already.
        held: Its present CPUs and memory, where it stays.
        notes: Additional reasons.
    """

    contender: Contender
    gpus: Shares
    cpu_mem: JobShares
    stays: bool = False
    held: JobShares = ()
    notes: tuple[Reason, ...] = ()

    @property
    def kept(self) -> bool:
        """Whether nothing changes for it; a changed share takes a restart."""
        return self.stays and self.cpu_mem == self.held

    @property
    def rank(self) -> int:
        """Its job's place in the queue."""
        return self.contender.rank

    @property
    def node(self) -> str:
        """The first node."""
        return self.gpus[0].node

    @property
    def share(self) -> Demand:
        """CPUs and memory by GPU on the first node."""
        return per_gpu(self.cpu_mem[0], self.gpus[0].gpu_count)


@dataclass(frozen=True, slots=True)
class Round:
    """The input of a mechanism, which works on copies of the servers; running contenders' resources are free."""

    contenders: tuple[Contender, ...]
    servers: Servers
    interval_s: float

    def runnable(self) -> list[Placement]:
        """The jobs whose GPUs can be found, in order of priority with backfill, and GPUs for them.

        Running jobs stay where they are unless a more urgent job finds no place otherwise.
        """
        selection = select(self.contenders, self.servers.gpus, 1)
        chosen = [*selection.alone, *(item for choice in selection.buckets.values() for item in choice.members)]
        return place([unit_of((contender,)) for contender in chosen], self.servers.gpus.copy())

    def seat_of(self, contender: Contender) -> Seat | None:
        """Where a job runs alone now, with its present resources."""
        unit = running_unit((contender,))
        if unit is None:
            return None
        held = self.servers.held(unit)
        return Seat(contender, unit.gpus, held, stays=True, held=held)


@dataclass(slots=True)
class Seating:
    """The result of a mechanism: seats by rank, and a certificate if it has one."""

    seats: dict[int, Seat] = field(default_factory=dict)
    certificate: Certificate = field(default_factory=Certificate)

    def by_rank(self) -> Sequence[Seat]:
        """The seats in order of priority."""
        return [self.seats[rank] for rank in sorted(self.seats)]


def size_of(contender: Contender) -> object:
    """Common properties of jobs of which none finds room where one does not."""
    return (contender.bucket.size, contender.job.sensitivity)


def spread(servers: Servers, job: PlanJob, gpus: Shares, wish: Wish) -> JobShares:
    """CPUs and memory of a job on several nodes: the same for each GPU everywhere.

    It is the least of its wishes on each of them, or, where that is slower than the proportional share of a node, each
    node's proportional share.
    """
    nodes = [servers.nodes[share.node] for share in gpus]
    wishes = [wish(job, node, share.gpu_count) for node, share in zip(nodes, gpus, strict=True)]
    wanted = Demand(
        min((each.cpus for each in wishes if each.cpus), default=0.0),
        min((each.mem_gib for each in wishes if each.mem_gib), default=0.0),
    )
    slower = any(speed(job, wanted, node) < 1 for node in nodes)
    return servers.shares_on(gpus, None if slower else wanted)


def share_reason(cpu_mem: JobShares) -> Reason:
    """The job's share of its nodes."""
    template, values = amounts_text(cpu_mem)
    return Reason(f"it gets {template}", values)


def amounts_text(cpu_mem: JobShares) -> tuple[str, tuple[object, ...]]:
    """Template and values of a job's amounts on each of its nodes."""
    parts: list[str] = []
    values: list[object] = []
    for item in cpu_mem:
        known = [(item.cpus, "{:.4g} CPUs"), (item.mem_gib, "{:.4g} GiB of memory")]
        amounts = " and ".join(text for amount, text in known if amount) or "neither CPUs nor memory"
        parts.append(amounts + (" on {}" if len(cpu_mem) > 1 else ""))
        values += [amount for amount, _ in known if amount] + ([item.node] if len(cpu_mem) > 1 else [])
    return blanks(len(parts)).format(*parts), tuple(values)
