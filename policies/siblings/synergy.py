"""Policies that give out CPUs and memory in addition to GPUs: Synergy's, and the cycle that others share with it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from muri.inherited import garbage_collector_paused
from muri.policies.cycle import reasons
from muri.policies.cycle.decisions import DecisionWriter, SlurmQueue
from muri.policies.cycle.free_gpus import FreeGpus, Shares
from muri.policies.cycle.placing import running_unit
from muri.policies.cycle.queue import Contender, Queue, line_up
from muri.policies.cycle.reasons import plural
from muri.policies.cycle.regrouping import Forecasts
from muri.policies.cycle.validation import check_request
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import EXCLUSIVE, QueuePolicy, fifo, las, srtf, worst_fairness_first
from muri.policies.siblings.mechanisms import greedy, proportional, tune
from muri.policies.siblings.shares import (
    JobShares,
    Round,
    Seat,
    Seating,
    Servers,
    Wish,
    amounts_text,
    exceeds,
    fair_share,
    proportional_wish,
    saturating_wish,
    share_reason,
    speed,
)
from muri.policies.types import CpuMemShare, NodeShare, Plan, PlanJob, PlanRequest, PriorityKey, Reason, Waiting

_ORDERS: Final[Mapping[str, Callable[[PlanRequest], PriorityKey]]] = {
    "fifo": lambda _: fifo,
    "srtf": lambda _: srtf,
    "las": lambda _: las,
    "ftf": worst_fairness_first,
}

Mechanism = Callable[[Round], Seating]  # A way to give out GPUs, CPUs and memory
_UNKNOWN: Final = Reason("nothing is known of what CPUs and memory do for it: it gets its GPU-proportional share")
_PROPORTIONAL: Final = Reason("CPUs and memory follow the GPUs")
_NOT_ALLOCATED: Final = Reason("its node tells neither CPUs nor memory: they are not given out")
_MOVED: Final = Reason("moved: the place where it ran goes to more urgent jobs")


class Way(NamedTuple):
    """A mechanism, and the jobs' wishes under it."""

    mechanism: Mechanism
    wish: Wish = saturating_wish


_WAYS: Final[Mapping[str, Way]] = {
    "tune": Way(tune),
    "proportional": Way(proportional, proportional_wish),
    "greedy": Way(greedy),
}


class AllocationPolicy(QueuePolicy):
    """A policy that gives out CPUs and host memory in addition to GPUs; no jobs share a GPU."""

    allocates_cpus = True

    @property
    @abstractmethod
    def way(self) -> Way:
        """How CPUs and memory are shared out."""

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request)
        return plan_allocation(request, self.name, self.key(request), self.rules, self.way)


class Synergy(AllocationPolicy):
    """CPUs and memory by demand, no job below its GPUs' share.

    The options `mechanism` and `order` choose another way to share out, and who goes first. Every job has its GPUs to
    itself. A running job keeps its nodes, CPUs and memory from round to round (lease renewal). FTF serves the worst ρ
    first, as Themis and the paper do; the key of the paper's public simulator is the reverse.

    Source: Synergy (Mohan et al., OSDI 2022).
    """

    name = "synergy"
    order = "submit time (option)"
    fixed = EXCLUSIVE

    @property
    def way(self) -> Way:
        """As the option `mechanism` says."""
        return _WAYS[self.rules.mechanism]

    def key(self, request: PlanRequest) -> PriorityKey:
        """As the option `order` says."""
        return _ORDERS[self.rules.order](request)


def plan_allocation(request: PlanRequest, policy: str, key: PriorityKey, options: PolicyOptions, way: Way) -> Plan:
    """Decide on every job of a request that `check_request` accepted; no jobs share GPUs."""
    with garbage_collector_paused():
        queue = line_up(request, key, options)
        cycle = _Cycle(request, options, queue, way.wish)
        seating = way.mechanism(cycle.round())
        return cycle.plan(policy, seating)


class _Cycle:
    def __init__(self, request: PlanRequest, options: PolicyOptions, queue: Queue, wish: Wish) -> None:
        self._request, self._queue, self._wish = request, queue, wish
        self._free = FreeGpus(request.nodes, whole_nodes=request.larger_than_a_node != "slurm")
        self._servers = Servers(request.nodes, self._free)
        model = speed_model(options.speed_model, ordering=options.ordering, table=request.interference)
        self._writer = DecisionWriter(
            Forecasts(model, queue.shapes), queue.shapes, sharing=False, explained=request.explained
        )
        self._slurm = SlurmQueue(request, self._free, options.max_wait_s, self._writer.solo, self._free.set_aside)
        self._contenders: tuple[Contender, ...] = ()

    def round(self) -> Round:
        """The mechanism's input: jobs that may be stopped hold nothing."""
        for members in self._queue.fixed:
            self._writer.keep_fixed(members)
        self._contenders = tuple(
            contender
            for contender in self._queue.contenders
            if contender.unit is not None or not self._slurm.takes_larger(contender.job)
        )
        for unit in {id(item.unit): item.unit for item in self._contenders if item.unit is not None}.values():
            self._free.give_back(unit.gpus)
            self._servers.give_back_shares(self._servers.held(unit))
        return Round(self._contenders, self._servers, self._request.interval_s)

    def plan(self, policy: str, seating: Seating) -> Plan:
        """Name single GPUs, and give reasons."""
        fixed = (members[0].unit for members in self._queue.fixed)
        shares = {job_id: held for unit in fixed if unit is not None for job_id, held in unit.cpu_mem_shares.items()}
        seats = seating.by_rank()
        # What stays takes its GPUs before any new job is given single ones, or these could be taken.
        for seat in seats:
            if seat.stays:
                self._free.take_exactly(seat.gpus)
        for seat in seats:
            take_on = self._free.take_on
            gpus = seat.gpus if seat.stays else tuple([take_on(share.node, share.gpu_count) for share in seat.gpus])
            self._stays_after_all(seat, gpus)
            self._servers.take_shares(seat.cpu_mem)
            self._writer.start_alone(seat.contender, gpus, notes=self._why(seat), kept=seat.kept)
            unit, job_id = seat.contender.unit, seat.contender.job.job_id
            # A running job's share is known, or only assumed to be proportional.
            if not seat.kept or (unit is not None and job_id in unit.cpu_mem_shares):
                shares[job_id] = tuple(item for item in seat.cpu_mem if self._is_given_out(item))
        self._keep_waiting(seating)
        return Plan(
            policy=policy,
            groups=tuple(self._writer.groups),
            solo=tuple(self._writer.solo),
            waiting=tuple(self._writer.waiting),
            certificate=seating.certificate,
            cpu_mem_shares={job_id: shares[job_id] for job_id in sorted(shares) if shares[job_id]},
        )

    def _is_given_out(self, share: CpuMemShare) -> bool:
        """Whether a plan names a share: also an empty one, where the node's proportional share is known."""
        return bool(share.cpus or share.mem_gib) or any(fair_share(self._servers.nodes[share.node]))

    def _stays_after_all(self, seat: Seat, gpus: Shares) -> None:
        """A job that had to leave may have found exactly its own GPUs again."""
        unit = running_unit((seat.contender,))
        if unit is not None and unit.gpus == gpus:
            seat.stays, seat.held = True, self._servers.held(unit)

    def _why(self, seat: Seat) -> tuple[Reason, ...]:
        contender, job, node = seat.contender, seat.contender.job, self._servers.nodes[seat.node]
        why = []
        if contender.unit is not None and not seat.stays:
            why.append(reasons.SPLIT_UP if len(contender.unit.members) > 1 else _MOVED)
        elif seat.stays and not seat.kept:
            (old, old_values), (new, new_values) = amounts_text(seat.held), amounts_text(seat.cpu_mem)
            text = f"restarts on the GPUs that it has, for its share changes: {old} before, {new} now"
            why.append(Reason(text, (*old_values, *new_values)))
        if not any(self._is_given_out(item) for item in seat.cpu_mem):
            return (*why, _NOT_ALLOCATED)
        why.append(share_reason(seat.cpu_mem))
        wanted = self._wish(job, node, seat.gpus[0].gpu_count)
        if self._wish is proportional_wish:
            why.append(_PROPORTIONAL)
        elif job.sensitivity is None:
            why.append(_UNKNOWN)
        elif exceeds(wanted, seat.share):
            text = "it could use {:.4g} CPUs and {:.4g} GiB, {:.2f} × as fast, "
            text += "but they are not free or not worth a restart"
            why.append(Reason(text, (*wanted, speed(job, wanted, node))))
        else:
            text = "that is all it can use: {:.2f} × its speed with the GPU-proportional share"
            why.append(Reason(text, (speed(job, seat.share, node),)))
        return (*why, *seat.notes)

    def _keep_waiting(self, seating: Seating) -> None:
        """Give reasons to the waiting jobs, and leave those to Slurm's queue that have waited too long."""
        why_waiting = reasons.WaitingReasons(self._free, whole_nodes=not self._slurm.is_there)
        for contender in self._contenders:
            job = contender.job
            if contender.rank in seating.seats or (contender.unit is None and self._slurm.takes_overdue(job)):
                continue
            why: tuple[Reason, ...] = (self._why_waiting(contender, why_waiting),)
            if contender.unit is not None:
                why = (reasons.preempted(job), *why)
            self._writer.waiting.append(Waiting(job.job_id, why, contender.unit is not None))
            why_waiting.count(job)

    def _why_waiting(self, contender: Contender, why_waiting: reasons.WaitingReasons) -> Reason:
        """GPUs are missing, or only CPUs or memory."""
        job = contender.job
        if job.node_count == 1 and self._free.most_on_one_node(job.partition) >= job.gpu_count:
            name = self._servers.with_gpus(job, job.gpu_count)[0]
            wanted = self._wish(job, self._servers.nodes[name], job.gpu_count)
            needed = self._servers.shares_on((NodeShare(name, job.gpu_count),), wanted)
            return _no_cpus_or_mem(job, why_waiting.ahead(job), needed)
        return why_waiting.of(job)


def _no_cpus_or_mem(job: PlanJob, ahead: int, needed: JobShares) -> Reason:
    """Why a job waits although GPUs are free."""
    line = "it is next in line" if not ahead else f"{plural(ahead, 'job')} {'is' if ahead == 1 else 'are'} ahead of it"
    template, values = amounts_text(needed)
    return Reason(
        f"{line}; a node of partition {{}} has {{}} free, but not with {template} beside",
        (job.partition, plural(job.gpu_count, "GPU"), *values),
    )
