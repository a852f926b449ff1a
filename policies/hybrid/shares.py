"""CPUs and host memory of each node: everybody's least first, what is left to those who gain most by it."""

from collections.abc import Iterable, Sequence

from muri.policies.allocation.demand import SLACK, exceeds, fair_share, more
from muri.policies.allocation.servers import Servers
from muri.policies.hybrid import reasons
from muri.policies.hybrid.needs import Needs, Step
from muri.policies.hybrid.prediction import Predictor
from muri.policies.hybrid.tenants import Tenant
from muri.policies.reason import Reason
from muri.policies.traits import Demand
from muri.policies.types import FreeNode, HostShare


def give_out(tenants: Sequence[Tenant], servers: Servers, predictor: Predictor, horizon_s: float | None) -> None:
    """Give CPUs and memory to tenants that start; what runs keeps its own.

    Nobody is predicted slower than with the GPU-proportional share. A tenant that is known gives up what makes no
    difference to it. What that leaves goes step by step to whoever gains most of Σ worth × speed for it, and only to
    those who can be made to give it back: where a newcomer lacks its least, running ones are restarted without what
    they have above their share, those who lose least by it first. So is one that others left with too little, and one
    that gains more by what is left, until the next plan, than its restart loses.

    Args:
        tenants: All of the plan; their `host`, `kept` and `reasons` are set.
        servers: What is free beside the tenants that are kept; free GPUs are those that nobody gets.
        predictor: Speeds.
        horizon_s: Seconds until the next plan; None: running tenants are not restarted. Then the shares of idle GPUs
            are left for those who come next, and where a newcomer lacks its least nobody on the node is told a share.
    """
    on_node: dict[str, list[Tenant]] = {}
    for tenant in tenants:
        for share in tenant.gpus:
            on_node.setdefault(share.node, []).append(tenant)
    for name in sorted(on_node):
        node = servers.nodes[name]
        if node.gpu_count and (node.cpu_count or node.mem_gib):
            _Room(node, servers, predictor, horizon_s).give_out(on_node[name])


class _Room:
    """One node while its CPUs and memory are given out."""

    def __init__(self, node: FreeNode, servers: Servers, predictor: Predictor, horizon_s: float | None) -> None:
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
            return  # Others hold the node's CPUs or memory: it stays with the shares that everybody has anyway.
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
            self._open_up(Needs(tenant, self._node, self._predictor))
        elif tenant.movable and self._horizon_s is not None:
            needs = Needs(tenant, self._node, self._predictor)
            if needs.is_enough(self._held(needs)):
                self._kept.append(needs)
            else:
                self._restart(needs, reasons.TOO_LITTLE)

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
        """What there is too little of for everybody's least."""
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
        needs = min(rich, key=lambda item: (self._loss(item), item.tenant.jobs[0].job_id))
        self._kept.remove(needs)
        self._restart(needs, reasons.GIVES_BACK)
        return True

    def _restart(self, needs: Needs, why: Reason) -> None:
        held = self._held(needs)
        self._take(Demand(-held.cpus, -held.mem_gib))
        needs.tenant.kept, needs.tenant.reasons = False, (why,)
        self._open_up(needs)

    def _held(self, needs: Needs) -> Demand:
        return needs.tenant.amount(self._servers)

    def _loss(self, needs: Needs) -> float:
        return needs.gain(needs.least, self._held(needs))

    def _grow(self) -> None:
        """Give what is left, step by step, to whoever gains most for it."""
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
        self._restart(best[1], reasons.GETS_MORE)
        return True

    def _gain_of_upgrade(self, needs: Needs) -> float:
        """What a larger share gains until the next plan, less what the restart loses, in objective × seconds."""
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
            tenant.host = None
            return
        tenant.host = (HostShare(self._node.name, amount.cpus, amount.mem_gib),)
        tenant.reasons = (*tenant.reasons, *reasons.share(tenant.host, *needs.total_speed(amount)))


def _rate(step: Step | None) -> float:
    return -1.0 if step is None else step.rate
