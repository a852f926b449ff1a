"""One cycle of a policy that packs GPUs by memory and use: who gets which GPUs, by which rule, who waits and why."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Final, Protocol

from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import SlurmQueue
from muri.policies.cycle.free_gpus import Shares
from muri.policies.cycle.packed import Holding, PackedGpus, mem_gib_of
from muri.policies.cycle.queue import pools
from muri.policies.cycle.reasons import blanks
from muri.policies.horus.cost import CostModel, Kind, Load, Places, knows_utilization, pays, utilization_of
from muri.policies.options import PolicyOptions
from muri.policies.types import Plan, PlanJob, PlanRequest, Reason, Sharer, Solo, Waiting
from muri.profiler.interference.slowdown import Slowdown
from muri.profiler.records import ESTIMATES

_AGED_FIRST: Final = Reason("a job that has waited longer than max_wait_s goes first and has no place yet")
_STOPPED_ONCE: Final = Reason("it ran before and is back in the queue, so it waits for GPUs of its own")
_ALONE: Final = Reason("no other job is on its GPUs")


class Rule(Protocol):
    """One way of choosing among GPUs that have the memory."""

    def price(self, before: Load, after: Load, capacity_gib: float, slowdown: Slowdown) -> float | None:
        """Price of a GPU, the lower the better; None where the job must not come.

        Args:
            before: The GPU's jobs without the new one.
            after: And with it.
            capacity_gib: Memory of the GPU; infinite when unknown.
            slowdown: f of the GPU.
        """
        ...

    def why(self, price: float, load: Load, capacity_gib: float, slowdown: Slowdown) -> Reason:
        """Why a place was taken, with the load of its fullest GPU."""
        ...

    def why_no_partner(self, mem_gib: float) -> Reason:
        """Why a job that may share, and needs this memory, finds no GPU to join."""
        ...


@dataclass(frozen=True, slots=True)
class ByCost:
    """Horus's cost, where sharing gets at least as much done as waiting.

    Attributes:
        cost: The cost.
        min_speedup: How many times as much a GPU's jobs must get done with a newcomer as without it.
    """

    cost: CostModel
    min_speedup: float

    def price(self, before: Load, after: Load, capacity_gib: float, slowdown: Slowdown) -> float | None:
        """See `Rule`."""
        if not pays(before, after, self.min_speedup, slowdown):
            return None
        return self.cost.of(after, capacity_gib, slowdown)

    def why(self, price: float, load: Load, capacity_gib: float, slowdown: Slowdown) -> Reason:
        """See `Rule`."""
        return Reason(
            "the cheapest place: cost {:.2f} with {}, and {:.0f} % use (f = {:.2f})",
            (price, needed_memory(load, capacity_gib), 100 * load.utilization, 1 / load.speed(slowdown)),
        )

    def why_no_partner(self, mem_gib: float) -> Reason:
        """See `Rule`."""
        return Reason(
            "beside jobs that may share with it, no GPU has {:.1f} GiB left and gets more done with it than without",
            (mem_gib,),
        )


class PackingCycle:
    """What is decided so far. Whatever runs stays where it is, unless `stop` says otherwise.

    Args:
        request: Jobs, nodes and what sharing may do; `check_request(request, packed=True)` let it pass.
        options: The policy's options.
        rule: What a GPU costs a job.
    """

    def __init__(self, request: PlanRequest, options: PolicyOptions, rule: Rule) -> None:
        self.packed = PackedGpus(request)
        self._request = request
        self._rule = rule
        self._most = min(options.max_group_size, request.max_group_size)
        self._places = Places(self.packed, request, rule.price, self._most)
        self._why: dict[int, Reason] = {}
        self._released: list[Solo] = []
        self._slurm = SlurmQueue(request, self.packed.free, options.max_wait_s, self._released, self.packed.set_aside)
        self._waiting: list[tuple[PlanJob, tuple[Reason, ...], bool]] = []
        self._closed: set[str] = set()
        self._refused: set[Kind] = set()

    def sort_out(self, jobs: Iterable[PlanJob]) -> tuple[list[PlanJob], list[PlanJob]]:
        """Give Slurm what is its own, hold what nothing is known of, and put the aged ahead of the others.

        Returns:
            The jobs that go ahead because they waited too long, and the others that GPUs can be given to.
        """
        aged, ready = [], []
        for job in sorted(jobs, key=lambda job: (job.submit_s, job.job_id)):
            if self._slurm.takes_larger(job):
                continue
            if not self._slurm.is_there and self._slurm.is_overdue(job):
                aged.append(job)
            elif self._most > 1 and job.may_share and not knows_utilization(job):
                self.wait(job, reasons.NEEDS_PROFILE)
            else:
                ready.append(job)
        return aged, ready

    def seat_aged(self, jobs: Iterable[PlanJob]) -> None:
        """Place jobs that have waited too long; until one of them has a place, nobody else of its nodes starts."""
        pool_of = {partition: pool for pool in pools(self._request) for partition in pool}
        for job in jobs:
            if not self.seat(job):
                self._closed |= pool_of[job.partition]

    def seat(self, job: PlanJob, *, idle_only: bool = False) -> bool:
        """Put a job on the GPUs that cost it least; without any, let it wait.

        Args:
            job: A waiting job.
            idle_only: Whether it may only have idle GPUs.
        """
        if job.partition in self._closed:
            self.wait(job, _AGED_FIRST)
            return False
        kind = self._places.kind(job, idle_only=idle_only)
        if kind in self._refused or not self._put(job, idle_only=idle_only):
            self._refused.add(kind)  # no job leaves within a plan, so the next of its kind need not look
            self.wait(job, *self._no_sharing(job, idle_only=idle_only), no_gpus=True)
            return False
        return True

    def _put(self, job: PlanJob, *, idle_only: bool) -> bool:
        place = self._places.best(job, idle_only=idle_only)
        if place is None:
            return False
        self._places.changed(self.packed.put(job, place.gpus))
        fullest = max(place.gpus, key=lambda gpu: (self._places.load(gpu).utilization, gpu.mem_gib))
        load = self._places.load(fullest)
        self._why[job.job_id] = self._rule.why(place.price, load, fullest.capacity_gib, self._places.slowdown(job))
        return True

    def wait(self, job: PlanJob, *notes: Reason, no_gpus: bool = False) -> None:
        """Keep a job held, or give it to Slurm's own queue if it has waited too long."""
        if not self._slurm.takes_overdue(job):
            self._waiting.append((job, notes, no_gpus))

    def stop(self, job_id: int, reason: Reason) -> Waiting:
        """Take a running job off its GPUs."""
        self._places.changed(self.packed.take(job_id))
        return Waiting(job_id, (reason,), preempted=True)

    def speed(self, holding: Holding) -> float:
        """Predicted speed of a job: that on its slowest GPU."""
        slowdown = self._places.slowdown(holding.job)
        return min(self._places.load(gpu).speed(slowdown) for gpu in holding.gpus)

    def result(self, name: str, stopped: tuple[Waiting, ...] = ()) -> Plan:
        """The plan."""
        sharers = tuple(self._sharer(holding) for holding in self.packed.holdings.values())
        waiting = (*stopped, *self._explained())
        return Plan(name, solo=tuple(self._released), waiting=waiting, sharers=sharers)

    def _sharer(self, holding: Holding) -> Sharer:
        job, speed = holding.job, self.speed(holding)
        company = _company(holding.partners, speed)
        if holding.kept:
            notes = (reasons.kept(len(holding.gpus), holding.shares), company)
        else:
            chosen = (self._why[job.job_id],) if job.job_id in self._why else ()
            notes = (_placed(holding.shares), *chosen, company, *_prediction(job))
        return Sharer(job.job_id, holding.shares, speed, holding.accumulate_steps, notes, holding.kept)

    def _explained(self) -> Iterator[Waiting]:
        no_gpus = reasons.WaitingReasons(self.packed.free, whole_nodes=not self._slurm.is_there)
        for job, notes, needs_gpus in self._waiting:
            first = (no_gpus.of(job),) if needs_gpus else ()
            yield Waiting(job.job_id, (*first, *notes))
            no_gpus.count(job)

    def _no_sharing(self, job: PlanJob, *, idle_only: bool) -> tuple[Reason, ...]:
        if self._most < 2:
            return ()
        if not job.may_share:
            return (reasons.must_run_alone(job),)
        if not knows_utilization(job):
            return (reasons.NEEDS_PROFILE_TO_SHARE,)
        return (_STOPPED_ONCE,) if idle_only else (self._rule.why_no_partner(mem_gib_of(job)),)


def needed_memory(load: Load, capacity_gib: float) -> str:
    """Return what a GPU's jobs need of its memory, for a reason."""
    of = "" if isinf(capacity_gib) else f" of {capacity_gib:.1f}"
    return f"{load.used_gib:.1f}{of} GiB needed"


def _company(partners: Sequence[PlanJob], speed: float) -> Reason:
    """Who is on a job's GPUs as well, and how fast it is there."""
    if not partners:
        return _ALONE
    ids = tuple(job.job_id for job in partners)
    return Reason(f"it shares GPUs with {blanks(len(ids))} at an expected {{:.2f}} of its speed alone", (*ids, speed))


_KNOWN_FROM: Final = {
    "scaled": "runs with another number of GPUs",
    "predicted": "its model's graph",
    "average": "this site's other models",
    "guess": "nothing but a guess",
}
"""What an estimated profile rests on, by its source."""


def _prediction(job: PlanJob) -> tuple[Reason, ...]:
    """What a job's utilization is known from, where it was not measured."""
    if job.profile is None or job.profile.source not in ESTIMATES:
        return ()
    return (
        Reason(
            "its model was never measured here: {:.0f} % use and {:.1f} GiB are predicted from {}",
            (100 * utilization_of(job), job.gpu_mem_gib, _KNOWN_FROM[job.profile.source]),
        ),
    )


def _placed(gpus: Shares) -> Reason:
    """Where a job goes."""
    names = tuple(f"{', '.join(str(gpu_id) for gpu_id in share.gpu_ids)} of {share.node}" for share in gpus)
    word = "GPU" if sum(share.gpu_count for share in gpus) == 1 else "GPUs"
    return Reason(f"it gets {word} {blanks(len(names))}", names)
