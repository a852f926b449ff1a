"""CPUs and host memory of each node: every tenant's least first, what is left to those that gain most by it."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from muri.policies.cycle.free_gpus import Shares
from muri.policies.cycle.queue import worth_of
from muri.policies.siblings.shares import (
    SLACK,
    JobShares,
    Servers,
    enough,
    exceeds,
    fair_share,
    more,
    share_reason,
    throughput_ratio,
)
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import CpuMemShare, CpuMemShares, FreeNode, PlanJob, Reason, Running
from muri_lab.policies.hybrid.prediction import Mode, Predictor, Speeds, weighted

_GIVES_BACK: Final = Reason("restarts on the GPUs that it has: a newcomer needs the surplus above its share")
_TOO_LITTLE: Final = Reason("restarts on the GPUs that it has: it holds too little and is slower than with its share")
_GETS_MORE: Final = Reason("restarts on the GPUs that it has: what is left there gains more than that costs")


@dataclass(slots=True, eq=False)
class Tenant:
    """One job, or several that share GPUs, while CPUs and memory are given out."""

    jobs: tuple[PlanJob, ...]  # The members
    gpus: Shares
    mode: Mode = "interleave"  # How they share it
    running: Running | None = None  # The running unit that it is; None for one that starts
    movable: bool = True  # Whether it may be restarted, now and later: what is given to it can be taken back
    kept: bool = False  # Whether it goes on as it is
    cpu_mem: JobShares | None = None  # of its nodes; None: the GPU-proportional share
    reasons: tuple[Reason, ...] = ()  # Why it gets that

    @property
    def node(self) -> str:
        """Name of its node; empty when it spans several or none is known."""
        return self.gpus[0].node if len(self.gpus) == 1 else ""

    @property
    def gpu_count(self) -> int:
        """GPUs on its first node."""
        return self.gpus[0].gpu_count

    @property
    def is_known(self) -> bool:
        """Whether it is known of every member what CPUs and memory do to it, and all are on one node."""
        return bool(self.node) and all(job.sensitivity is not None for job in self.jobs)

    def value(self, speeds: Speeds) -> float:
        """Σ worth × speed."""
        return weighted(self.jobs, speeds)

    def holds(self, servers: Servers) -> JobShares:
        """CPUs and memory by node, the proportional share where nothing is said."""
        return servers.shares_on(self.gpus) if self.cpu_mem is None else self.cpu_mem

    def amount(self, servers: Servers) -> Demand:
        """CPUs and memory of a tenant of one node."""
        share = self.holds(servers)[0]
        return Demand(share.cpus, share.mem_gib)

    def shares(self, speeds: Speeds) -> CpuMemShares:
        """What each member has of it: nothing but the last one to end, so that nothing is lost when others leave."""
        if self.kept and self.running is not None and len(self.jobs) == len(self.running.members):
            return self.running.cpu_mem_shares  # with those that join, the last one to end may be another
        if self.cpu_mem is None:
            return {}
        last = max(zip(self.jobs, speeds, strict=True), key=lambda item: (*_length(*item), item[0].job_id))[0]
        nothing = tuple(CpuMemShare(share.node, 0.0, 0.0) for share in self.cpu_mem)
        return {job.job_id: self.cpu_mem if job is last else nothing for job in self.jobs}


def speeds_of(tenant: Tenant, predictor: Predictor, fair: Demand) -> Speeds:
    """Return predicted speeds with a tenant's shares, on its slowest node."""
    if tenant.cpu_mem is None or not all(job.sensitivity is not None for job in tenant.jobs):
        return predictor.usual(tenant.jobs, tenant.mode)
    per_gpu = [
        Demand(share.cpus / gpus.gpu_count, share.mem_gib / gpus.gpu_count)
        for share, gpus in zip(tenant.cpu_mem, tenant.gpus, strict=True)
    ]
    least = Demand(min(share.cpus for share in per_gpu), min(share.mem_gib for share in per_gpu))
    return predictor.speeds(tenant.jobs, tenant.mode, (least,), fair)[0]


class Step(NamedTuple):
    """A larger share."""

    rate: float  # gain of Σ worth × speed per GPU-proportional share of CPUs and of memory
    amount: Demand  # CPUs and memory of the tenant


LeastShares = dict[Hashable, Demand]
"""The least shares of tenants, cached: many of a plan are alike, and the search takes long."""


class Needs:
    """Shares of one tenant of a node of which CPUs or memory are known."""

    def __init__(self, tenant: Tenant, node: FreeNode, predictor: Predictor, least: LeastShares) -> None:
        self.tenant = tenant
        self._node, self._predictor = node, predictor
        self._each = fair_share(node)
        self._gpus = tenant.gpu_count
        self.fair = Demand(self._each.cpus * self._gpus, self._each.mem_gib * self._gpus)
        self._usual = predictor.usual(tenant.jobs, tenant.mode)
        alike = (predictor.alike(tenant.jobs, tenant.mode), self._gpus, self._each)
        found = least.get(alike)
        if found is None:
            found = least[alike] = self._least()
        self.least = found
        """The least with which no member is slower than with the GPU-proportional share, alone and as they share."""

    def is_enough(self, amount: Demand) -> bool:
        """Whether no member is slower than with the GPU-proportional share."""
        # What each needs alone is cheap to find out and mostly decides.
        if any(self._ratio(job, amount) < 1 - SLACK for job in self._jobs):
            return False
        return not _slower(self._speeds([amount])[0], self._usual)

    def best_step(self, amount: Demand, free: Demand) -> Step | None:
        """Return the larger share with the highest gain for its cost, or None.

        Looks further than one CPU: more memory may only help with more CPUs, or the other way round.
        """
        steps = self._larger(amount, free)
        if not steps:
            return None
        now, *reached = self._speeds([amount, *steps])
        value = self.tenant.value(now)
        found = [
            Step((self.tenant.value(speeds) - value) / self._cost(amount, step), step)
            for speeds, step in zip(reached, steps, strict=True)
            if not _slower(speeds, self._usual)
        ]
        best = max(found, key=lambda step: (step.rate, -step.amount.cpus, -step.amount.mem_gib), default=None)
        return best if best is not None and best.rate > SLACK * value else None

    def gain(self, before: Demand, after: Demand) -> float:
        """What one share adds to Σ worth × speed over another."""
        less, greater = self._speeds([before, after])
        return self.tenant.value(greater) - self.tenant.value(less)

    def restart_loss(self, amount: Demand) -> float:
        """Σ worth × speed × seconds that a restart would lose."""
        return sum(
            worth_of(job) * speed * job.restart_s
            for job, speed in zip(self._jobs, self._speeds([amount])[0], strict=True)
        )

    def total_speed(self, amount: Demand) -> tuple[float, float]:
        """Total speed of the members with a share, and with the GPU-proportional one."""
        return sum(self._speeds([amount])[0]), sum(self._usual)

    @property
    def _jobs(self) -> tuple[PlanJob, ...]:
        return self.tenant.jobs

    def _least(self) -> Demand:
        fewest = next((cpus for cpus in self._whole(1.0, self.fair.cpus) if self._is_fast(cpus)), self.fair.cpus)
        mem_gib = min(self.fair.mem_gib, sum(self._least_mem_gib(job) for job in self._jobs))
        lean = Demand(fewest, mem_gib)
        return lean if self.is_enough(lean) else self.fair

    def _is_fast(self, cpus: float) -> bool:
        return self.is_enough(Demand(cpus, self.fair.mem_gib))

    def _least_mem_gib(self, job: PlanJob) -> float:
        """Return the memory without which a job would be slower, or its use if memory does not make it faster."""
        sensitivity = _known(job)
        if len(sensitivity.mem_gib) == 1:
            return sensitivity.demand.mem_gib * self._gpus
        points = (point * self._gpus for point in _points(sensitivity))
        fitting = (point for point in points if point <= self.fair.mem_gib)
        usable = (point for point in fitting if self._ratio(job, Demand(self.fair.cpus, point)) >= 1 - SLACK)
        return min(usable, default=self.fair.mem_gib)

    def _larger(self, amount: Demand, free: Demand) -> list[Demand]:
        cpus = [amount.cpus, *self._whole(math.floor(amount.cpus + 1), amount.cpus + free.cpus)]
        most = amount.mem_gib + free.mem_gib
        points = (
            {point * self._gpus for job in self._jobs for point in _points(_known(job))} if self.fair.mem_gib else ()
        )
        mem_gib = [amount.mem_gib, *sorted(point for point in points if amount.mem_gib < point <= most)]
        return [Demand(*pair) for pair in ((c, m) for c in cpus for m in mem_gib) if pair != tuple(amount)]

    def _whole(self, first: float, last: float) -> Iterable[float]:
        """Whole CPUs from one number to another; none where the node doesn't tell them."""
        return map(float, range(math.ceil(first), math.floor(last + SLACK) + 1)) if self.fair.cpus else ()

    def _cost(self, amount: Demand, larger: Demand) -> float:
        """Return the cost of a step, in GPU-proportional shares of one GPU."""
        parts = ((larger.cpus - amount.cpus, self._each.cpus), (larger.mem_gib - amount.mem_gib, self._each.mem_gib))
        return sum(taken / each for taken, each in parts if each)

    def _speeds(self, amounts: Sequence[Demand]) -> tuple[Speeds, ...]:
        shares = [Demand(amount.cpus / self._gpus, amount.mem_gib / self._gpus) for amount in amounts]
        return self._predictor.speeds(self._jobs, self.tenant.mode, shares, self._each)

    def _ratio(self, job: PlanJob, amount: Demand) -> float:
        per_gpu = Demand(amount.cpus / self._gpus, amount.mem_gib / self._gpus)
        return throughput_ratio(job.sensitivity, enough(per_gpu, self._each), enough(self._each, self._each))


def give_out(tenants: Sequence[Tenant], servers: Servers, predictor: Predictor, horizon_s: float | None) -> None:
    """Give CPUs and memory to tenants that start; running ones keep their own.

    No member is predicted slower than with the GPU-proportional share. A known tenant gives up what makes no difference
    to it. The rest goes step by step to the tenant that gains most Σ worth × speed, and only to tenants that can be
    made to give it back: where a new tenant lacks its least, running ones are restarted without their surplus, those
    that lose least first. A running tenant is also restarted if it has too little left, or gains more than its restart
    loses.
    """
    least: LeastShares = {}
    on_node: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        for share in tenant.gpus:
            on_node.setdefault(share.node, []).append(tenant)
    for name in sorted(on_node):
        node = servers.nodes[name]
        if node.gpu_count and (node.cpu_count or node.mem_gib):
            _Room(node, servers, predictor, horizon_s, least).give_out(on_node[name])


class _Room:
    """One node while its CPUs and memory are given out."""

    def __init__(
        self, node: FreeNode, servers: Servers, predictor: Predictor, horizon_s: float | None, least: LeastShares
    ) -> None:
        self._least = least
        self._node, self._servers, self._predictor = node, servers, predictor
        self._horizon_s = horizon_s
        self._kept: list[Needs] = []
        self._open: list[Needs] = []
        self._amount: dict[int, Demand] = {}
        self._free = servers.free(node.name)

    def give_out(self, tenants: Iterable[Tenant]) -> None:
        """Set every open tenant's share."""
        if self._horizon_s is None:
            self._take(self._proportional(self._servers.gpus.on_node(self._node.name)))
        for tenant in tenants:
            self._admit(tenant)
        while (short := self._short()) and self._reclaim(short):
            pass
        if self._short():
            return  # Jobs of others hold the node's CPUs or memory: every tenant keeps its GPU-proportional share.
        self._grow()
        while self._upgrade():
            self._grow()
        for needs in self._open:
            self._settle(needs, self._amount[id(needs)])

    def _admit(self, tenant: Tenant) -> None:
        if not tenant.is_known:
            if not tenant.kept:
                here = (share.gpu_count for share in tenant.gpus if share.node == self._node.name)
                self._take(self._proportional(sum(here)))
            return
        if not tenant.kept:
            self._open_up(Needs(tenant, self._node, self._predictor, self._least))
        elif tenant.movable and self._horizon_s is not None:
            needs = Needs(tenant, self._node, self._predictor, self._least)
            if needs.is_enough(self._held(needs)):
                self._kept.append(needs)
            else:
                self._restart(needs, _TOO_LITTLE)

    def _proportional(self, gpus: int) -> Demand:
        each = fair_share(self._node)
        return Demand(each.cpus * gpus, each.mem_gib * gpus)

    def _take(self, amount: Demand) -> None:
        self._free = Demand(self._free.cpus - amount.cpus, self._free.mem_gib - amount.mem_gib)

    def _open_up(self, needs: Needs) -> None:
        self._open.append(needs)
        self._amount[id(needs)] = needs.least
        self._take(needs.least)

    def _short(self) -> str:
        """The resource of which there is too little for every tenant's least; empty if there is none."""
        if self._node.cpu_count and more(0.0, self._free.cpus / self._node.cpu_count):
            return "cpus"
        if self._node.mem_gib and more(0.0, self._free.mem_gib / self._node.mem_gib):
            return "mem_gib"
        return ""

    def _reclaim(self, short: str) -> bool:
        """Restart a tenant that has more than its share; False if there is none."""
        rich = [needs for needs in self._kept if more(*(getattr(d, short) for d in (self._held(needs), needs.fair)))]
        if not rich:
            return False
        needs = min(rich, key=lambda item: (item.gain(item.least, self._held(item)), item.tenant.jobs[0].job_id))
        self._kept.remove(needs)
        self._restart(needs, _GIVES_BACK)
        return True

    def _restart(self, needs: Needs, why: Reason) -> None:
        held = self._held(needs)
        self._take(Demand(-held.cpus, -held.mem_gib))
        needs.tenant.kept, needs.tenant.reasons = False, (why,)
        self._open_up(needs)

    def _held(self, needs: Needs) -> Demand:
        return needs.tenant.amount(self._servers)

    def _grow(self) -> None:
        """Give what is left, step by step, to the tenant that gains most by it."""
        growing = [needs for needs in self._open if needs.tenant.movable]
        steps = {id(needs): self._step(needs) for needs in growing}
        while growing:
            best = max(growing, key=lambda needs: _rate(steps[id(needs)]))
            step = steps[id(best)]
            if step is None:
                return
            if not self._fits(best, step.amount):
                steps[id(best)] = self._step(best)
                continue
            before = self._amount[id(best)]
            self._take(Demand(step.amount.cpus - before.cpus, step.amount.mem_gib - before.mem_gib))
            self._amount[id(best)] = step.amount
            steps[id(best)] = self._step(best)

    def _upgrade(self) -> bool:
        """Restart the running tenant that gains most by what is left; False if that pays for none."""
        best: tuple[float, Needs] | None = None
        for needs in self._kept:
            pays = self._gain_of_upgrade(needs)
            if pays > 0 and (best is None or pays > best[0]):
                best = (pays, needs)
        if best is None:
            return False
        self._kept.remove(best[1])
        self._restart(best[1], _GETS_MORE)
        return True

    def _gain_of_upgrade(self, needs: Needs) -> float:
        """Return the gain of a larger share until the next plan, less the restart's loss, in objective × seconds."""
        assert self._horizon_s is not None
        held = self._held(needs)
        step = needs.best_step(held, self._left())
        if step is None:
            return 0.0
        lost = needs.restart_loss(held)
        return needs.gain(held, step.amount) * self._horizon_s - lost

    def _left(self) -> Demand:
        return Demand(max(0.0, self._free.cpus), max(0.0, self._free.mem_gib))

    def _step(self, needs: Needs) -> Step | None:
        return needs.best_step(self._amount[id(needs)], self._left())

    def _fits(self, needs: Needs, amount: Demand) -> bool:
        before = self._amount[id(needs)]
        known = ((amount.cpus - before.cpus, self._free.cpus), (amount.mem_gib - before.mem_gib, self._free.mem_gib))
        return all(wanted <= SLACK or not more(wanted, free) for wanted, free in known)

    def _settle(self, needs: Needs, amount: Demand) -> None:
        tenant = needs.tenant
        if not (exceeds(amount, needs.fair) or exceeds(needs.fair, amount)):
            tenant.cpu_mem = None
            return
        tenant.cpu_mem = (CpuMemShare(self._node.name, amount.cpus, amount.mem_gib),)
        tenant.reasons = (*tenant.reasons, *_share_reasons(tenant.cpu_mem, *needs.total_speed(amount)))


def _rate(step: Step | None) -> float:
    return -1.0 if step is None else step.rate


def _length(job: PlanJob, speed: float) -> tuple[float, ...]:
    """How long a member will probably run: what has run long goes on long, where nothing better is known."""
    if job.remaining_s is None:
        return (1.0, job.attained_gpu_s)
    return (0.0, job.remaining_s / speed if speed > 0 else job.remaining_s)


def _slower(speeds: Speeds, usual: Speeds) -> bool:
    return any(more(before, now) for now, before in zip(speeds, usual, strict=True))


def _known(job: PlanJob) -> Sensitivity:
    assert job.sensitivity is not None
    return job.sensitivity


def _points(sensitivity: Sensitivity) -> set[float]:
    return {*sensitivity.mem_gib, sensitivity.demand.mem_gib}


def _share_reasons(cpu_mem: JobShares, speed: float, usual: float) -> tuple[Reason, Reason]:
    """Describe a unit's part of its node and the resulting speed."""
    effect = Reason("total speed {:.2f}, where the GPU-proportional share gives {:.2f}", (speed, usual))
    return share_reason(cpu_mem), effect
