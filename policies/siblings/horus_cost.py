"""Horus: the cost of putting a job on a GPU, the cheapest places, and memory requests after an out-of-memory error."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Final, NamedTuple

from muri.errors import UsageError
from muri.policies.siblings.packed import Gpus, Holding, PackedGpu, PackedGpus, keeps_promise, mem_gib_of
from muri.policies.types import PlanJob, PlanRequest, may_share_gpus
from muri.profiler.slowdown import Slowdown, slowdown_of

# How many times as much memory a job asks for after an out-of-memory error, on Slurm as in the simulator. The paper
# leaves the amount open; this is Muri's choice: one raise mends a prediction of two thirds of the truth, and without
# any raise a job could fail next to the same jobs again and again.
RAISED_BY: Final = 1.5
MAX_RAISES: Final = 3  # The next error is the job's own failure; the last raise asks for a whole GPU
Kind = tuple[object, ...]  # Common properties of jobs that find the same places


@dataclass(frozen=True, slots=True)
class Load:
    """The jobs of one GPU.

    Attributes:
        count: Number of jobs.
        used_gib: Memory that they need together.
        utilization: Sum of their utilizations alone; 1 is one GPU's worth.
    """

    count: int = 0
    used_gib: float = 0.0
    utilization: float = 0.0

    def plus(self, job: PlanJob) -> "Load":
        """The same GPU with one more job on it."""
        return Load(self.count + 1, self.used_gib + mem_gib_of(job), self.utilization + utilization_of(job))

    @staticmethod
    def of(jobs: Iterable[PlanJob]) -> "Load":
        """A GPU with these jobs on it."""
        return reduce(Load.plus, jobs, Load())

    def speed(self, slowdown: Slowdown) -> float:
        """Speed of each of the GPU's jobs by f, 1 = as fast as alone."""
        return 1.0 if self.count < 2 else 1.0 / slowdown(100 * self.utilization)


def utilization_of(job: PlanJob) -> float:
    """Share of its GPUs' time that a job computes on them alone, 0 to 1.

    Measured or predicted where the request has it, else the propagate share of the profile's iteration; 1 while
    unknown, so that no job is taken for idle.
    """
    if job.gpu_utilization is not None:
        return job.gpu_utilization
    if job.profile is None or job.profile.iteration_s <= 0:
        return 1.0
    return min(1.0, job.profile.propagate_s / job.profile.iteration_s)


def gpu_type_of(job: PlanJob) -> str:
    """The type of GPU that a job's profile is for; empty while it has none."""
    return "" if job.profile is None else job.profile.key.gpu_type


def knows_utilization(job: PlanJob) -> bool:
    """Whether a job's utilization is measured, predicted or follows from its profile."""
    return job.gpu_utilization is not None or job.profile is not None


def raised_gib(asked_gib: float, raises: int, capacity_gib: float) -> float | None:
    """The memory per GPU to ask for after an out-of-memory error; None where asking for more is useless.

    The first raise corrects a prediction that fell short by up to a third; the last one asks for all memory, so that
    the job has its GPUs to itself, and a further error is its own. A capacity of 0 is unknown.

    Raises:
        UsageError: A figure is negative.
    """
    if min(asked_gib, raises, capacity_gib) < 0:
        raise UsageError(f"memory {asked_gib} GiB of {capacity_gib} GiB, raised {raises} times: none can be negative")
    if raises >= MAX_RAISES or (capacity_gib and asked_gib >= capacity_gib):
        return None
    if not capacity_gib:
        return asked_gib * RAISED_BY or None
    if raises == MAX_RAISES - 1 or not asked_gib:
        return capacity_gib
    return min(capacity_gib, asked_gib * RAISED_BY)


# Price of a GPU from its load without and with a job, its memory in GiB and its f; None: not for this job.
Price = Callable[[Load, Load, float, Slowdown], float | None]


Priced = tuple[tuple[float, PackedGpu], ...]  # GPUs with their cost to a job, the cheapest first


class Place(NamedTuple):
    """GPUs for a job.

    Attributes:
        price: Mean price of the GPUs.
        node_count: Number of their nodes.
        idle_left: Idle GPUs that their nodes are left with.
        gpus: The GPUs.
    """

    price: float
    node_count: int
    idle_left: int
    gpus: Gpus


class Places:
    """The GPUs of one plan, and the cost of putting a job on them; `most_sharers`: most jobs on one GPU."""

    def __init__(self, packed: PackedGpus, request: PlanRequest, price: Price, most_sharers: int) -> None:
        self.packed, self.price = packed, price
        self.same_user, self.whole_sets_only = request.same_user, request.whole_sets_only
        self.across_nodes = request.larger_than_a_node == "whole-nodes"
        self._most, self._slowdowns = most_sharers, request.slowdowns
        self._loads: dict[tuple[int, ...], Load] = {}
        self._changes: Counter[str] = Counter()
        self._on_node: dict[tuple[str, Kind], tuple[int, Priced]] = {}

    def changed(self, holding: Holding) -> None:
        """Note that a job came to these GPUs, or left them: their nodes' prices must be looked up again."""
        self._changes.update({gpu.node for gpu in holding.gpus})

    def on_node(self, node: str, kind: Kind, find: Callable[[], Priced]) -> Priced:
        """The GPUs of a node that a kind of jobs may have, looked up by `find` once until something changes there."""
        changes, name = self._changes[node], (node, kind)
        known = self._on_node.get(name)
        if known is None or known[0] != changes:
            known = self._on_node[name] = (changes, find())
        return known[1]

    def best(self, job: PlanJob, *, idle_only: bool = False) -> Place | None:
        """The cheapest place; of equal ones that on the fewest nodes which leaves the fewest idle GPUs there."""
        offers = _Offers(self, job, self.kind(job, idle_only=idle_only), idle_only=idle_only)
        return min(offers.all(), key=lambda place: place[:3], default=None)

    def kind(self, job: PlanJob, *, idle_only: bool) -> Kind:
        """Common properties of jobs that find the same places."""
        owner = job.user if self.same_user else ""
        company = (owner, job.domain, min(self._most, job.largest_group))
        needs = (job.gpu_count, job.node_count, mem_gib_of(job), utilization_of(job), gpu_type_of(job), job.min_speed)
        return job.partition, *company, *needs, job.may_share and not idle_only and knows_utilization(job)

    def slowdown(self, job: PlanJob) -> Slowdown:
        """F of the type of GPU that a job is planned for."""
        return slowdown_of(gpu_type_of(job), self._slowdowns)

    def load(self, gpu: PackedGpu) -> Load:
        """The present load of a GPU."""
        tenants = tuple(gpu.tenants)
        if tenants not in self._loads:
            self._loads[tenants] = Load.of(gpu.tenants.values())
        return self._loads[tenants]

    def may_join(self, job: PlanJob, gpu: PackedGpu) -> bool:
        """Whether a job may share with those on a GPU, memory and price aside."""
        others = gpu.tenants.values()
        if not others:
            return True
        if not job.may_share or not knows_utilization(job):
            return False
        fits = len(others) < self._most and may_share_gpus([job, *others])
        return fits and all(
            other.may_share
            and knows_utilization(other)
            and other.partition == job.partition
            and (other.user == job.user or not self.same_user)
            for other in others
        )

    def place(self, priced: Iterable[tuple[float, PackedGpu]]) -> Place:
        """GPUs with their prices as one place."""
        prices, gpus = zip(*priced, strict=True)
        nodes = {gpu.node for gpu in gpus}
        idle = sum(self.packed.free.on_node(node) for node in nodes)
        taken = sum(not gpu.tenants for gpu in gpus)
        return Place(sum(prices) / len(prices), len(nodes), idle - taken, gpus)


class _Offers:
    """The places that one job can have."""

    def __init__(self, places: Places, job: PlanJob, kind: Kind, *, idle_only: bool) -> None:
        self._places, self._job, self._kind, self._idle_only = places, job, kind, idle_only
        self._mem_gib, self._slowdown = mem_gib_of(job), places.slowdown(job)
        self._prices: dict[tuple[tuple[int, ...], float], float | None] = {}
        # Where no GPU is large enough by its profile, the job still gets one to itself, as it would without a plan.
        gpus = places.packed.of_partition(job.partition)
        self._too_large = not any(gpu.capacity_gib >= self._mem_gib for gpu in gpus)

    def all(self) -> Iterator[Place]:
        """A place on each node, and one on several nodes where the job may or must have these; and whole sets."""
        job, by_node = self._job, self._places.packed.by_node(self._job.partition)
        find = self._places.on_node
        offers = (find(node, self._kind, partial(self._priced, gpus)) for node, gpus in by_node.items())
        on_nodes = [priced for priced in offers if priced]
        if job.node_count > 1:
            yield from self._on_as_many_nodes(on_nodes)
        else:
            yield from (
                self._places.place(priced[: job.gpu_count]) for priced in on_nodes if len(priced) >= job.gpu_count
            )
            if self._places.across_nodes:
                yield from self._on_any_nodes(on_nodes)
        if self._places.whole_sets_only and not self._idle_only:
            yield from self._whole_sets()

    def _on_any_nodes(self, on_nodes: Sequence[Priced]) -> Iterator[Place]:
        """The job's λ cheapest GPUs, λ being its GPU count; of equal ones those of which a node has most.

        Source: Horus (TPDS 2021), algorithm 1, lines 9 to 16.
        """
        if sum(map(len, on_nodes)) < self._job.gpu_count:
            return
        like = [
            (price, -len(same), index, same)
            for index, priced in enumerate(on_nodes)
            for price, group in groupby(priced, key=itemgetter(0))
            if (same := tuple(group))
        ]
        cheapest = chain.from_iterable(same for *_, same in sorted(like, key=itemgetter(0, 1, 2)))
        yield self._places.place(islice(cheapest, self._job.gpu_count))

    def _on_as_many_nodes(self, on_nodes: Sequence[Priced]) -> Iterator[Place]:
        """The cheapest nodes for a job that must have equal parts of this number of nodes, if there are enough."""
        count, part = self._job.node_count, self._job.gpu_count // self._job.node_count
        places = [self._places.place(priced[:part]) for priced in on_nodes if len(priced) >= part]
        if len(places) >= count:
            chosen = {gpu for place in sorted(places, key=lambda place: place[:3])[:count] for gpu in place.gpus}
            yield self._places.place(pair for priced in on_nodes for pair in priced if pair[1] in chosen)

    def _priced(self, gpus: Gpus) -> Priced:
        """The GPUs of a node that may be combined with any other, with their prices."""
        idle_only = self._idle_only or self._places.whole_sets_only
        usable = [gpu for gpu in gpus if not (gpu.tenants and idle_only)]
        priced = [(price, gpu) for gpu in usable if (price := self._price(gpu)) is not None]
        return tuple(sorted(priced, key=lambda pair: (pair[0], pair[1].gpu_id)))

    def _price(self, gpu: PackedGpu) -> float | None:
        like = (tuple(gpu.tenants), gpu.capacity_gib)
        if like not in self._prices:
            self._prices[like] = self._new_price(gpu)
        return self._prices[like]

    def _new_price(self, gpu: PackedGpu) -> float | None:
        fits = gpu.left_gib >= self._mem_gib or (self._too_large and not gpu.tenants)
        if not fits or not self._places.may_join(self._job, gpu):
            return None
        before = self._places.load(gpu)
        after = before.plus(self._job)
        speed = after.speed(self._slowdown)
        if gpu.tenants and not all(keeps_promise(job, speed) for job in (self._job, *gpu.tenants.values())):
            return None
        return self._places.price(before, after, gpu.capacity_gib, self._slowdown)

    def _whole_sets(self) -> Iterator[Place]:
        """Places where the others hold exactly the same GPUs."""
        count, nodes = self._job.gpu_count, self._job.node_count
        for gpus in self._places.packed.whole_sets(self._job.partition):
            on_node = Counter(gpu.node for gpu in gpus)
            alike = nodes == 1 or (len(on_node) == nodes and set(on_node.values()) == {count // nodes})
            if len(gpus) == count and alike:
                priced = [(price, gpu) for gpu in gpus if (price := self._price(gpu)) is not None]
                if len(priced) == len(gpus):
                    yield self._places.place(priced)
