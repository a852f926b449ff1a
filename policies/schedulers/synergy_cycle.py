"""The cycle of policies that give out CPUs and memory beside GPUs: set aside, seat, explain."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from muri.policies.allocation import reasons as host_reasons
from muri.policies.allocation.demand import Wish, exceeds, fair_share, proportional_wish, speed
from muri.policies.allocation.seats import Round, Seat, Seating
from muri.policies.allocation.servers import Servers
from muri.policies.cycle import reasons
from muri.policies.cycle.collector import collector_paused
from muri.policies.cycle.decisions import Clerk
from muri.policies.cycle.forecast import Forecasts
from muri.policies.cycle.placement import FreeGpus, Shares
from muri.policies.cycle.queue import Contender, Queue, line_up
from muri.policies.cycle.slurms_queue import SlurmsQueue
from muri.policies.cycle.units import running_unit
from muri.policies.cycle.validation import check_request
from muri.policies.options import PolicyOptions
from muri.policies.priority import PriorityKey
from muri.policies.reason import Reason
from muri.policies.speed.registry import speed_model
from muri.policies.types import HostShare, NodeShare, Plan, PlanRequest, Running, Waiting

Mechanism = Callable[[Round], Seating]
"""A way to give out GPUs, CPUs and memory."""


def plan_allocation(
    request: PlanRequest, policy: str, key: PriorityKey, options: PolicyOptions, mechanism: Mechanism, wish: Wish
) -> Plan:
    """Decide on every job of a request; nobody shares GPUs.

    Args:
        request: Jobs, nodes, what runs, and time.
        policy: Name to put on the plan.
        key: Order of priority.
        options: Whether running jobs compete, and the aging bound.
        mechanism: Who gets what.
        wish: What jobs ask for under the mechanism, to explain.

    Raises:
        RequestError: The request contradicts itself.
    """
    check_request(request)
    with collector_paused():
        queue = line_up(request, key, options)
        cycle = _Cycle(request, options, queue, wish)
        seating = mechanism(cycle.round())
        return cycle.plan(policy, seating)


class _Cycle:
    def __init__(self, request: PlanRequest, options: PolicyOptions, queue: Queue, wish: Wish) -> None:
        self._request, self._queue, self._wish = request, queue, wish
        self._free = FreeGpus(request.nodes, whole_nodes=request.larger_than_a_node != "slurm")
        self._servers = Servers(request.nodes, self._free)
        model = speed_model(options.speed_model, ordering=options.ordering, table=request.interference)
        self._clerk = Clerk(Forecasts(model, queue.shapes), queue.shapes, Counter(), sharing=False)
        released = self._clerk.decisions.solo
        self._slurm = SlurmsQueue(request, self._free, options.max_wait_s, released, self._free.set_aside)
        self._contenders: tuple[Contender, ...] = ()

    def round(self) -> Round:
        """What the mechanism decides from: nothing is held by jobs that may be stopped."""
        for members in self._queue.fixed:
            self._clerk.keep_fixed(members)
        self._contenders = tuple(
            contender
            for contender in self._queue.contenders
            if contender.unit is not None or not self._slurm.takes_larger(contender.job)
        )
        for unit in _units(self._contenders):
            self._free.give_back(unit.gpus)
            self._servers.give_back_host(self._servers.held(unit))
        return Round(self._contenders, self._servers, self._request.interval_s)

    def plan(self, policy: str, seating: Seating) -> Plan:
        """Name single GPUs, and say why."""
        shares = dict(self._fixed_shares())
        seats = seating.by_rank()
        for seat in seats:
            if seat.stays:
                self._free.take_exactly(seat.gpus)
        for seat in seats:
            gpus = seat.gpus if seat.stays else self._named(seat)
            self._stays_after_all(seat, gpus)
            self._servers.take_host(seat.host)
            self._clerk.start_alone(seat.contender, gpus, notes=self._why(seat), kept=seat.kept)
            if not seat.kept or _is_told(seat.contender):
                shares[seat.contender.job.job_id] = tuple(item for item in seat.host if self._is_given_out(item))
        self._keep_waiting(seating)
        decided = self._clerk.decisions
        return Plan(
            policy=policy,
            groups=tuple(decided.groups),
            solo=tuple(decided.solo),
            waiting=tuple(decided.waiting),
            certificate=seating.certificate,
            host_shares={job_id: shares[job_id] for job_id in sorted(shares) if shares[job_id]},
        )

    def _fixed_shares(self) -> Iterator[tuple[int, tuple[HostShare, ...]]]:
        for members in self._queue.fixed:
            unit = members[0].unit
            assert unit is not None
            yield from unit.host_shares.items()

    def _is_given_out(self, share: HostShare) -> bool:
        """A share of nothing is one, too, where the node tells what its GPUs' shares are."""
        return bool(share.cpus or share.mem_gib) or any(fair_share(self._servers.nodes[share.node]))

    def _named(self, seat: Seat) -> Shares:
        return tuple([self._free.take_on(share.node, share.gpu_count) for share in seat.gpus])

    def _stays_after_all(self, seat: Seat, gpus: Shares) -> None:
        """A job that had to leave may have found just its own GPUs again."""
        unit = running_unit((seat.contender,))
        if unit is not None and unit.gpus == gpus:
            seat.stays, seat.held = True, self._servers.held(unit)

    def _why(self, seat: Seat) -> tuple[Reason, ...]:
        contender, job, node = seat.contender, seat.contender.job, self._servers.nodes[seat.node]
        why = []
        if contender.unit is not None and not seat.stays:
            why.append(reasons.SPLIT_UP if len(contender.unit.members) > 1 else host_reasons.MOVED)
        elif seat.stays and not seat.kept:
            why.append(host_reasons.restarted(seat.held, seat.host))
        if not any(self._is_given_out(item) for item in seat.host):
            return (*why, host_reasons.NOT_ALLOCATED)
        why.append(host_reasons.share(seat.host))
        wanted = self._wish(job, node, seat.gpus[0].gpu_count)
        if self._wish is proportional_wish:
            why.append(host_reasons.PROPORTIONAL)
        elif job.sensitivity is None:
            why.append(host_reasons.UNKNOWN)
        elif exceeds(wanted, seat.share):
            why.append(host_reasons.below_demand(wanted, speed(job, wanted, node)))
        else:
            why.append(host_reasons.saturated(speed(job, seat.share, node)))
        return (*why, *seat.notes)

    def _keep_waiting(self, seating: Seating) -> None:
        """Give reasons, and to Slurm whatever has waited too long."""
        why_waiting = reasons.WaitingReasons(self._free, whole_nodes=not self._slurm.is_there)
        ahead: Counter[str] = Counter()
        for contender in self._contenders:
            job = contender.job
            if contender.rank in seating.seats or (contender.unit is None and self._slurm.takes_overdue(job)):
                continue
            why: tuple[Reason, ...] = (self._why_waiting(contender, why_waiting, ahead[job.partition]),)
            if contender.unit is not None:
                why = (reasons.preempted(job), *why)
            self._clerk.decisions.waiting.append(Waiting(job.job_id, why, contender.unit is not None))
            ahead[job.partition] += 1

    def _why_waiting(self, contender: Contender, why_waiting: reasons.WaitingReasons, ahead: int) -> Reason:
        """GPUs are missing, or only CPUs or memory beside them."""
        job = contender.job
        if job.node_count == 1 and self._free.most_on_one_node(job.partition) >= job.gpu_count:
            name = self._servers.with_gpus(job, job.gpu_count)[0]
            wanted = self._wish(job, self._servers.nodes[name], job.gpu_count)
            needed = self._servers.host_of((NodeShare(name, job.gpu_count),), wanted)
            return host_reasons.no_host_room(job, ahead, needed)
        return why_waiting.of(job, ahead)


def _units(contenders: Iterable[Contender]) -> Iterable[Running]:
    return {id(item.unit): item.unit for item in contenders if item.unit is not None}.values()


def _is_told(contender: Contender) -> bool:
    """Whether a running job's share is known, or only taken to be proportional."""
    return contender.unit is not None and contender.job.job_id in contender.unit.host_shares
