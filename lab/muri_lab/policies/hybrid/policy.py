"""The hybrid: plan as Muri does, decide how each group shares, then give out CPUs and memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final, Literal, NamedTuple

from muri.policies.cycle import reasons
from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.cycle.planner import plan_queue
from muri.policies.cycle.queue import full_key, is_movable, worth_of
from muri.policies.cycle.reasons import blanks
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.schedulers import MuriJct
from muri.policies.siblings.packed import keeps_promise, with_promises
from muri.policies.siblings.shares import Servers, exceeds, fair_share
from muri.policies.traits import Demand
from muri.policies.types import (
    CpuMemShare,
    Group,
    Plan,
    PlanJob,
    PlanRequest,
    PriorityKey,
    Reason,
    Running,
    Solo,
    Waiting,
    waited_s,
)
from muri_lab.policies.hybrid.prediction import BetterOfBoth, Mode, Predictor, weighted
from muri_lab.policies.hybrid.shares import Tenant, give_out, speeds_of

_GAIN: Final = 1e-9  # Relative gain below which another way than interleaving is only a rounding error
_STARTS_ELSEWHERE: Final = Reason("GPUs of its own are free")
_DONE: Final = {"interleave": "they interleave", "plain": "they share without turns", "alone": "it runs alone"}


class MuriHybrid(MuriJct):
    """`muri-jct` that shares CPUs and memory out, and decides per group how to share.

    Each new group interleaves (Muri), shares plainly (SJF-BSBF, where the speeds of its pairs are known) or leaves its
    GPUs to one member, by the highest predicted Σ worth × speed. CPUs and memory go to the jobs that they speed up, and
    none is predicted slower than with the GPU-proportional share (Synergy). Without measurements it plans as
    `muri-jct`.
    """

    name = "muri-hybrid"
    order = "as muri-jct"
    plain_groups = True
    allocates_cpus = True

    def plan_by(self, request: PlanRequest, key: PriorityKey) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        return plan_hybrid(request, self.name, key, self.rules)


def plan_hybrid(request: PlanRequest, policy: str, key: PriorityKey, options: PolicyOptions) -> Plan:
    """Plan a request: first how groups share, at GPU-proportional shares, then CPUs and memory."""
    request = with_promises(_with_rich_units_closed(_with_pairs_of_one_gpu(request)), options.min_speed)
    table = request.interference
    model = speed_model(options.speed_model, ordering=options.ordering, table=table)
    # Groups are chosen as if each could share in its better way, which is decided by worth afterwards.
    plan = plan_queue(request, policy, key, options, model if table is None else BetterOfBoth(model, table))
    return _Refinement(request, plan, options, Predictor(model, table)).result(key)


def _with_pairs_of_one_gpu(request: PlanRequest) -> PlanRequest:
    """Return the request with other model names for jobs on several GPUs, so that no measured pair applies to them.

    Pairs are measured on one GPU; on Slurm the ranks of a group on several GPUs always take turns.
    """
    if request.interference is None or request.larger_than_a_node != "slurm":
        return request
    running = tuple(replace(unit, members=tuple(map(_named_by_size, unit.members))) for unit in request.running)
    return replace(request, jobs=tuple(map(_named_by_size, request.jobs)), running=running)


def _with_rich_units_closed(request: PlanRequest) -> PlanRequest:
    """Return the request without joins to units that may have to give back what is above their proportional share.

    A join disturbs no running member, so a unit that is joined keeps it.
    """
    if request.larger_than_a_node == "slurm":  # where no running unit gives anything back
        return request
    servers = Servers(request.nodes, FreeGpus(request.nodes))

    def is_rich(unit: Running) -> bool:
        both = zip(_by_node(unit, servers), servers.shares_on(unit.gpus), strict=True)
        return any(exceeds(Demand(own.cpus, own.mem_gib), Demand(fair.cpus, fair.mem_gib)) for own, fair in both)

    closed = (replace(unit, joinable=False) if is_rich(unit) else unit for unit in request.running)
    return replace(request, running=tuple(closed))


def _named_by_size(job: PlanJob) -> PlanJob:
    if job.gpu_count == 1 or job.profile is None:
        return job
    key = job.profile.key
    named = replace(key, model=f"{key.model} on {job.gpu_count} GPUs")
    return replace(job, profile=replace(job.profile, key=named))


@dataclass(slots=True)
class _Entry:
    """A group or single job of the plan as it is refined."""

    source: Group | Solo
    tenant: Tenant


class _Refinement:
    def __init__(self, request: PlanRequest, plan: Plan, options: PolicyOptions, predictor: Predictor) -> None:
        self._request, self._plan, self._options, self._predictor = request, plan, options, predictor
        self._runs_in = {job.job_id: unit for unit in request.running for job in unit.members}
        self._jobs = {job.job_id: job for job in request.jobs}
        self._jobs |= {job.job_id: job for unit in request.running for job in unit.members}
        self._left_out: list[tuple[PlanJob, Choice]] = []
        self._waiting = list(plan.waiting)
        self._to_slurm = request.larger_than_a_node == "slurm"

    def result(self, key: PriorityKey) -> Plan:
        """The refined plan."""
        entries = [self._decided(group) for group in self._plan.groups]
        entries += [self._alone(solo) for solo in self._plan.solo]
        servers = self._servers(entries)
        entries += self._elsewhere(servers.gpus)
        give_out(
            [entry.tenant for entry in entries if entry.tenant.gpus],
            servers,
            self._predictor,
            None if self._to_slurm else self._request.interval_s,
        )
        return self._written(entries, servers, key)

    def _decided(self, group: Group) -> _Entry:
        jobs = tuple(self._jobs[job_id] for job_id in group.members)
        if group.kept:
            return _Entry(group, self._kept(jobs, self._runs_in[group.members[0]]))
        if group.joining:
            # No member is disturbed by a join, so what runs keeps its CPUs and memory, and how it shares.
            unit = next(self._runs_in[job_id] for job_id in group.members if job_id not in group.joining)
            return _Entry(group, Tenant(jobs, unit.gpus, unit.mode, running=unit, movable=False, kept=True))
        choice = ways_of(jobs, self._predictor)
        if choice.best.members != jobs and any(self._is_overdue(job) for job in jobs):
            # A job that has waited too long is never left out.
            choice = ways_of(jobs, self._predictor, may_leave_out=False)
        way = choice.best
        chosen = {job.job_id for job in way.members}
        self._left_out += [(job, choice) for job in jobs if job.job_id not in chosen]
        notes = (_decided_reason(choice),)
        mode: Mode = "plain" if way.name == "plain" else "interleave"
        tenant = Tenant(way.members, group.gpus, mode, movable=self._may_move(way.members, group.gpus), reasons=notes)
        return _Entry(group, tenant)

    def _alone(self, solo: Solo) -> _Entry:
        jobs = (self._jobs[solo.job_id],)
        if solo.kept:
            return _Entry(solo, self._kept(jobs, self._runs_in[solo.job_id]))
        return _Entry(solo, Tenant(jobs, solo.gpus, movable=self._may_move(jobs, solo.gpus)))

    def _kept(self, jobs: tuple[PlanJob, ...], unit: Running) -> Tenant:
        movable = is_movable(unit, self._request, self._options)
        return Tenant(jobs, unit.gpus, unit.mode, running=unit, movable=movable, kept=True)

    def _may_move(self, jobs: Iterable[PlanJob], gpus: tuple[object, ...]) -> bool:
        """Whether it may be restarted once it runs."""
        spans = len(gpus) > 1 and self._to_slurm
        return self._options.preemption and all(job.preemptible for job in jobs) and not spans

    def _is_overdue(self, job: PlanJob) -> bool:
        return waited_s(job, self._request.now_s) > self._options.max_wait_s

    def _servers(self, entries: Iterable[_Entry]) -> Servers:
        """Return the free resources once the plan's GPUs are given out, without those of kept units."""
        free = FreeGpus(self._request.nodes, whole_nodes=not self._to_slurm)
        servers = Servers(self._request.nodes, free)
        kept = {id(entry.tenant.running) for entry in entries if entry.tenant.kept}
        for unit in self._request.running:
            if id(unit) not in kept:
                free.give_back(unit.gpus)
                servers.give_back_shares(servers.held(unit))
        for entry in entries:
            tenant = entry.tenant
            if not tenant.kept and tenant.gpus:
                free.take_exactly(tenant.gpus)
            elif tenant.running is not None and any(tenant.running.cpu_mem_shares.values()):
                tenant.cpu_mem = _by_node(tenant.running, servers)
        return servers

    def _elsewhere(self, free: FreeGpus) -> Iterator[_Entry]:
        """Start alone the jobs that were left out and fit; the others wait."""
        for job, choice in self._left_out:
            gpus = free.take(job.partition, job.gpu_count, node_count=job.node_count)
            why = (_left_out_reason(choice),)
            if gpus is None:
                runs = job.job_id in self._runs_in
                stopped = (reasons.preempted(job),) if runs else ()
                self._waiting.append(Waiting(job.job_id, (*stopped, *why, _no_gpus_alone(job)), runs))
            else:
                solo = Solo(job.job_id, (_STARTS_ELSEWHERE, *why), gpus)
                yield _Entry(solo, Tenant((job,), gpus, movable=self._may_move((job,), gpus)))

    def _written(self, entries: Iterable[_Entry], servers: Servers, key: PriorityKey) -> Plan:
        groups, solo = [], []
        shares: dict[int, tuple[CpuMemShare, ...]] = {}
        for entry in entries:
            tenant = entry.tenant
            fair = fair_share(servers.nodes[tenant.gpus[0].node]) if tenant.cpu_mem else Demand(0.0, 0.0)
            speeds = speeds_of(tenant, self._predictor, fair)
            shares |= tenant.shares(speeds)
            if len(tenant.jobs) > 1 and isinstance(entry.source, Group):
                groups.append(_group(entry.source, tenant, speeds))
            else:
                solo.append(_solo(entry.source, tenant))
        waiting = self._waiting
        if self._left_out:
            waiting.sort(key=lambda item: full_key(key, self._jobs[item.job_id]))
            solo.sort(key=lambda item: full_key(key, self._jobs[item.job_id]))
        return replace(
            self._plan,
            groups=tuple(groups),
            solo=tuple(solo),
            waiting=tuple(waiting),
            cpu_mem_shares=dict(sorted(shares.items())),
        )


def _by_node(unit: Running, servers: Servers) -> tuple[CpuMemShare, ...]:
    """What the members of a unit hold together, in the order of its GPUs."""
    total = {share.node: (0.0, 0.0) for share in unit.gpus}
    for share in servers.held(unit):
        cpus, mem_gib = total.get(share.node, (0.0, 0.0))
        total[share.node] = (cpus + share.cpus, mem_gib + share.mem_gib)
    return tuple(CpuMemShare(node, *amounts) for node, amounts in total.items())


def _group(group: Group, tenant: Tenant, speeds: tuple[float, ...]) -> Group:
    ids = [job.job_id for job in tenant.jobs]
    return replace(
        group,
        members=tuple(ids),
        speed=dict(sorted(zip(ids, speeds, strict=True))),
        reasons=(*group.reasons, *tenant.reasons),
        kept=tenant.kept and not group.joining,
        mode=tenant.mode,
    )


def _solo(source: Group | Solo, tenant: Tenant) -> Solo:
    job_id = tenant.jobs[0].job_id
    if isinstance(source, Solo):
        return replace(source, reasons=(*source.reasons, *tenant.reasons), kept=tenant.kept)
    return Solo(job_id, tenant.reasons, source.gpus)


class Way(NamedTuple):
    """One way of using a group's GPUs."""

    name: Literal["interleave", "plain", "alone"]  # "interleave", "plain" or "alone"
    members: tuple[PlanJob, ...]  # The jobs that run; those left out count nothing
    speeds: tuple[float, ...]  # Speed of each, 1 = as fast as alone
    value: float  # Σ worth × speed

    @property
    def keeps_promises(self) -> bool:
        """Whether each gets the speed that it was promised."""
        return all(map(keeps_promise, self.members, self.speeds))


class Choice(NamedTuple):
    """The three ways of a group."""

    interleave: Way  # All members take turns
    plain: Way | None  # All of them, or the best two, side by side without turns; None where no pair's speeds are known
    alone: Way  # The most worthwhile one
    may_leave_out: bool = True  # Whether running one alone may be chosen

    @property
    def best(self) -> Way:
        """The most valuable way that keeps all promises; on a tie interleaving, then plain: it changes least."""
        together = [way for way in (self.interleave, self.plain) if way is not None and way.keeps_promises]
        ways = [*together, self.alone] if self.may_leave_out or not together else together
        chosen = ways[0]
        for way in ways[1:]:
            if way.value > chosen.value * (1 + _GAIN):
                chosen = way
        return chosen


def ways_of(jobs: Sequence[PlanJob], predictor: Predictor, *, may_leave_out: bool = True) -> Choice:
    """Return a group's ways to share, each with its weighted speed at the GPU-proportional share."""
    members = tuple(jobs)
    speeds = predictor.usual(members, "interleave")
    first = min(members, key=lambda job: (-worth_of(job), job.submit_s, job.job_id))
    return Choice(
        Way("interleave", members, speeds, weighted(members, speeds)),
        _plain(members, predictor, may_leave_out=may_leave_out),
        Way("alone", (first,), (1.0,), worth_of(first)),
        may_leave_out,
    )


def _plain(members: tuple[PlanJob, ...], predictor: Predictor, *, may_leave_out: bool) -> Way | None:
    pairs = combinations(members, 2) if may_leave_out and len(members) > 2 else ()
    ways = []
    for jobs in (members, *pairs):
        speeds = predictor.plain(jobs)
        if speeds is not None:
            ways.append(Way("plain", jobs, speeds, weighted(jobs, speeds)))
    # Of equal ones the first, which leaves no member out.
    return max(ways, key=lambda way: way.value, default=None)


def _decided_reason(choice: Choice) -> Reason:
    """What became of a group, with the weighted speeds of the three ways."""
    plain = "unknown" if choice.plain is None else f"{choice.plain.value:.3g}"
    return Reason(
        "weighted speed: interleaved {:.3g}, plainly shared {}, alone {:.3g}: {}",
        (choice.interleave.value, plain, choice.alone.value, _DONE[choice.best.name]),
    )


def _left_out_reason(choice: Choice) -> Reason:
    """Why a job of a group doesn't run on its GPUs."""
    ids = tuple(job.job_id for job in choice.best.members)
    verb = "gets" if len(ids) == 1 else "get"
    return Reason(f"{blanks(len(ids))} {verb} the GPUs that it was to share: more weighted speed without it", ids)


def _no_gpus_alone(job: PlanJob) -> Reason:
    """Why a job that was left out of its group waits."""
    return Reason("no {} GPUs are free for it alone", (job.gpu_count,))
