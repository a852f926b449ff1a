"""The GPUs of a request one by one, and the jobs on each of them, for policies whose jobs overlap."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from math import inf
from types import MappingProxyType
from typing import Final

from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.types import FreeNode, NodeShare, PlanJob, PlanRequest


def mem_gib_of(job: PlanJob, accumulate_steps: int = 1) -> float:
    """GPU memory of a job per GPU, 0 while unknown; its request after an out-of-memory error precedes models."""
    batch = job.batch
    if job.gpu_mem_request_gib is None and batch is not None and (batch.fixed_mem_gib or batch.mem_gib_per_sample):
        return batch.mem_gib(accumulate_steps)
    return job.gpu_mem_gib


@dataclass(slots=True, eq=False)
class PackedGpu:
    """One GPU. Only `PackedGpus` changes it.

    Attributes:
        node: Name of its node.
        gpu_id: Its index on the node.
        capacity_gib: Its memory; infinite when unknown.
        tenants: The jobs on it, by job id.
        mem_gib: Memory that they need, as far as it is known.
    """

    node: str
    gpu_id: int
    capacity_gib: float
    tenants: dict[int, PlanJob] = field(default_factory=dict)
    mem_gib: float = 0.0

    @property
    def place(self) -> tuple[str, int]:
        """Node and index, by which GPUs are sorted."""
        return self.node, self.gpu_id

    @property
    def left_gib(self) -> float:
        """Memory that is still free; infinite when the GPU's is unknown."""
        return self.capacity_gib - self.mem_gib


Gpus = tuple[PackedGpu, ...]  # GPUs by node and index


@dataclass(frozen=True, slots=True)
class Holding:
    """A job and its GPUs, also as in a plan (`shares`), the accumulation steps, and whether it ran there before."""

    job: PlanJob
    gpus: Gpus
    accumulate_steps: int
    shares: Shares
    kept: bool = False

    @property
    def own_gpus(self) -> Gpus:
        """Its GPUs without other jobs."""
        return tuple(gpu for gpu in self.gpus if len(gpu.tenants) == 1)

    @property
    def partners(self) -> tuple[PlanJob, ...]:
        """The other jobs on its GPUs, each once, by job id."""
        others = {job_id: job for gpu in self.gpus for job_id, job in gpu.tenants.items()}
        others.pop(self.job.job_id, None)
        return tuple(others[job_id] for job_id in sorted(others))


class PackedGpus:
    """The GPUs that a policy may give out, free or held by its own jobs, while one plan of a checked request is
    made.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.free = FreeGpus(request.nodes, whole_nodes=request.larger_than_a_node != "slurm")
        self._nodes = {node.name: node for node in request.nodes}
        free = {(node.name, gpu_id) for node in request.nodes for island in node.islands for gpu_id in island}
        held = {(share.node, gpu) for unit in request.running for share in unit.gpus for gpu in share.gpu_ids}
        places = sorted(free | held)
        self._gpus = {place: PackedGpu(*place, self._nodes[place[0]].gpu_mem_gib or inf) for place in places}
        self._on_node = {node: tuple(gpus) for node, gpus in groupby(self._gpus.values(), key=lambda gpu: gpu.node)}
        self._nodes_of: dict[str, set[str]] = {}
        for node in request.nodes:
            for partition in node.partitions:
                self._nodes_of.setdefault(partition, set()).add(node.name)
        self._by_node: dict[str, dict[str, Gpus]] = {}
        self._holdings: dict[int, Holding] = {}
        self._set_aside_for: set[int] = set()
        for unit in sorted(request.running, key=lambda unit: unit.members[0].job_id):
            places = [(share.node, gpu_id) for share in unit.gpus for gpu_id in share.gpu_ids]
            gpus = tuple(self._gpus[place] for place in sorted(places))
            for job in unit.members:
                self._hold(Holding(job, gpus, unit.accumulate_steps, unit.gpus, kept=True))

    @property
    def holdings(self) -> Mapping[int, Holding]:
        """The jobs on GPUs, by job id: earlier ones, then new ones; without those that GPUs are only set aside for."""
        if not self._set_aside_for:
            return MappingProxyType(self._holdings)
        return {job_id: held for job_id, held in self._holdings.items() if job_id not in self._set_aside_for}

    def nodes_of(self, partition: str) -> tuple[FreeNode, ...]:
        """Nodes of a partition by name, also those without a GPU to give out."""
        return tuple(self._nodes[name] for name in sorted(self._nodes_of.get(partition, ())))

    def by_node(self, partition: str) -> Mapping[str, Gpus]:
        """GPUs of a partition's nodes, by name."""
        if partition not in self._by_node:
            names = (node.name for node in self.nodes_of(partition) if node.name in self._on_node)
            self._by_node[partition] = {name: self._on_node[name] for name in names}
        return self._by_node[partition]

    def of_partition(self, partition: str) -> Gpus:
        """GPUs of a partition's nodes."""
        return tuple(chain.from_iterable(self.by_node(partition).values()))

    def put_on_free(
        self, job: PlanJob, *, gpu_count: int = 0, gpu_mem_gib: float = 0.0, accumulate_steps: int = 1
    ) -> Holding | None:
        """Put a job on free GPUs of the fewest nodes: best fit, close to each other, the first by name.

        Without `gpu_count` it gets the number that it asks for; GPUs of unknown memory qualify. None when there is no
        such place.
        """
        shares = self.free.take(job.partition, gpu_count or job.gpu_count, gpu_mem_gib, job.node_count)
        if shares is None:
            return None
        # Taken only to learn which GPUs these are: `put` takes them and notes the tenants.
        self.free.give_back(shares)
        gpus = (self._gpus[share.node, gpu_id] for share in shares for gpu_id in share.gpu_ids)
        return self.put(job, gpus, accumulate_steps)

    def put(self, job: PlanJob, gpus: Iterable[PackedGpu], accumulate_steps: int = 1) -> Holding:
        """Put a job on GPUs, whether or not other jobs are there; its memory is not checked."""
        chosen = tuple(sorted(gpus, key=lambda gpu: gpu.place))
        self.free.take_exactly(shares_of(gpu for gpu in chosen if not gpu.tenants))
        holding = Holding(job, chosen, accumulate_steps, shares_of(chosen))
        self._hold(holding)
        return holding

    def take(self, job_id: int) -> Holding:
        """Take a job off its GPUs; those without other jobs become free."""
        holding = self._holdings.pop(job_id)
        for gpu in holding.gpus:
            del gpu.tenants[job_id]
            self._sum_up(gpu)
        self.free.give_back(shares_of(gpu for gpu in holding.gpus if not gpu.tenants))
        return holding

    def set_aside(self, job: PlanJob) -> None:
        """Keep free GPUs of several nodes for a job that Slurm places, the emptiest first, if there are enough."""
        if self.free.total(job.partition) < job.gpu_count:
            return
        free = [gpu for gpu in self.of_partition(job.partition) if not gpu.tenants]
        on_node = Counter(gpu.node for gpu in free)
        free.sort(key=lambda gpu: (-on_node[gpu.node], *gpu.place))
        # Not groupable, because Slurm may place the job on other GPUs than these.
        self.put(replace(job, groupable=False), free[: job.gpu_count])
        self._set_aside_for.add(job.job_id)

    def whole_sets(self, partition: str) -> Mapping[Gpus, tuple[Holding, ...]]:
        """Sets of GPUs that are shared only by jobs that hold exactly the same set, and these jobs."""
        sets: dict[Gpus, list[Holding]] = {}
        nodes = self._nodes_of.get(partition, set())
        for holding in self._holdings.values():
            if all(gpu.node in nodes for gpu in holding.gpus):
                sets.setdefault(holding.gpus, []).append(holding)
        return {
            gpus: tuple(holders)
            for gpus, holders in sets.items()
            if all(len(gpu.tenants) == len(holders) for gpu in gpus)
        }

    def _hold(self, holding: Holding) -> None:
        self._holdings[holding.job.job_id] = holding
        for gpu in holding.gpus:
            gpu.tenants[holding.job.job_id] = holding.job
            self._sum_up(gpu)

    def _sum_up(self, gpu: PackedGpu) -> None:
        """Add up memory from scratch: with running totals, rounding errors would stay when jobs leave."""
        holdings = self._holdings
        gpu.mem_gib = sum(mem_gib_of(job, holdings[job_id].accumulate_steps) for job_id, job in gpu.tenants.items())


def shares_of(gpus: Iterable[PackedGpu]) -> Shares:
    """GPUs as in a plan, by node and index."""
    places = sorted(gpu.place for gpu in gpus)
    by_node = ((node, tuple(gpu_id for _, gpu_id in group)) for node, group in groupby(places, lambda place: place[0]))
    return tuple(NodeShare(node, len(gpu_ids), gpu_ids) for node, gpu_ids in by_node)


_ROUNDING: Final = 1e-9


def with_promises(request: PlanRequest, min_speed: float) -> PlanRequest:
    """Return a request in which every job has at least this minimum speed."""
    if not min_speed:
        return request
    running = tuple(
        replace(unit, members=tuple(_promised(job, min_speed) for job in unit.members)) for unit in request.running
    )
    return replace(request, jobs=tuple(_promised(job, min_speed) for job in request.jobs), running=running)


def _promised(job: PlanJob, min_speed: float) -> PlanJob:
    return job if job.min_speed >= min_speed else replace(job, min_speed=min_speed)


def keeps_promise(job: PlanJob, speed: float) -> bool:
    """Whether a job's minimum speed is kept at a speed, 1 = as fast as alone."""
    return speed >= job.min_speed - _ROUNDING
