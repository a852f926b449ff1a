"""What a tenant can do with CPUs and memory of its node: the least that it needs, and what more would gain."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muri.policies.allocation.demand import SLACK, enough, fair_share, more
from muri.policies.allocation.effect import throughput_ratio
from muri.policies.cycle.bucket import worth_of
from muri.policies.hybrid.prediction import Predictor, Speeds
from muri.policies.hybrid.tenants import Tenant
from muri.policies.traits import Demand, Sensitivity
from muri.policies.types import FreeNode, PlanJob


class Step(NamedTuple):
    """A larger share.

    Attributes:
        rate: What it gains of Σ worth × speed for each GPU-proportional share of CPUs and of memory.
        amount: CPUs and memory of the tenant.
    """

    rate: float
    amount: Demand


class Needs:
    """Shares of one tenant of a node of which CPUs or memory are known.

    Args:
        tenant: The tenant, known in all its members.
        node: Its node.
        predictor: Speeds.
    """

    def __init__(self, tenant: Tenant, node: FreeNode, predictor: Predictor) -> None:
        self.tenant = tenant
        self._node, self._predictor = node, predictor
        self._each = fair_share(node)
        self._gpus = tenant.gpu_count
        self.fair = Demand(self._each.cpus * self._gpus, self._each.mem_gib * self._gpus)
        self._usual = predictor.usual(tenant.jobs, tenant.mode)
        self.least = self._least()
        """The least with which no member is slower than with the GPU-proportional share, alone and as they share."""

    def is_enough(self, amount: Demand) -> bool:
        """Whether no member is slower than with the GPU-proportional share."""
        speeds = self._speeds([amount])[0]
        return not _slower(speeds, self._usual) and all(self._ratio(job, amount) >= 1 - SLACK for job in self._jobs)

    def best_step(self, amount: Demand, free: Demand) -> Step | None:
        """The larger share with the highest gain for what it takes; None where none gains anything.

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
        """Memory without which a job would be slower; of one that memory does not make faster, what it uses."""
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
        """What a step takes, in GPU-proportional shares of one GPU."""
        parts = ((larger.cpus - amount.cpus, self._each.cpus), (larger.mem_gib - amount.mem_gib, self._each.mem_gib))
        return sum(taken / each for taken, each in parts if each)

    def _speeds(self, amounts: Sequence[Demand]) -> tuple[Speeds, ...]:
        shares = [Demand(amount.cpus / self._gpus, amount.mem_gib / self._gpus) for amount in amounts]
        return self._predictor.speeds(self._jobs, self.tenant.mode, shares, self._each)

    def _ratio(self, job: PlanJob, amount: Demand) -> float:
        per_gpu = Demand(amount.cpus / self._gpus, amount.mem_gib / self._gpus)
        return throughput_ratio(job.sensitivity, enough(per_gpu, self._each), enough(self._each, self._each))


def _slower(speeds: Speeds, usual: Speeds) -> bool:
    return any(more(before, now) for now, before in zip(speeds, usual, strict=True))


def _known(job: PlanJob) -> Sensitivity:
    assert job.sensitivity is not None
    return job.sensitivity


def _points(sensitivity: Sensitivity) -> set[float]:
    return {*sensitivity.mem_gib, sensitivity.demand.mem_gib}
