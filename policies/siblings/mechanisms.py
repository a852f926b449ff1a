"""Synergy's mechanisms without a solver: proportional shares, GREEDY (whole demands or none) and TUNE."""

from collections.abc import Iterable, Sequence

from muri.policies.cycle.free_gpus import Shares
from muri.policies.cycle.placing import Placement
from muri.policies.cycle.queue import Contender
from muri.policies.siblings.shares import (
    Round,
    Seat,
    Seating,
    Wish,
    exceeds,
    fair_share,
    per_gpu,
    proportional_wish,
    saturating_wish,
    size_of,
    speed,
    spread,
    steps,
)
from muri.policies.traits import Demand
from muri.policies.types import NodeShare, PlanJob, Reason


def greedy(round_: Round) -> Seating:
    """Seat jobs in order of priority on the first node by name where their demand fits.

    A running job keeps its place (lease renewal) until a more urgent one needs it: then the least urgent leave the node
    where that takes the fewest GPUs, and are seated again when their turn comes, if they fit.

    Source: Synergy (Mohan et al., OSDI 2022), section 3.3: Synergy-GREEDY.
    """
    cycle = _Greedy(round_)
    for contender in round_.contenders:
        cycle.decide(contender)
    return cycle.seating


class _Greedy:
    def __init__(self, round_: Round) -> None:
        self._round, self._servers = round_, round_.servers.copy()
        self._running: dict[int, Seat] = {}
        self._hopeless: set[object] = set()
        self.seating = Seating()
        for contender in round_.contenders:
            seat = round_.seat_of(contender)
            if seat is not None:
                self._take(seat)
                self._running[contender.rank] = seat

    def decide(self, contender: Contender) -> None:
        """Keep a job where it runs, else seat it where it fits, if need be in place of less urgent ones."""
        seat = self._running.pop(contender.rank, None)
        if seat is not None:
            self.seating.seats[contender.rank] = seat
            return
        size = size_of(contender)
        if size in self._hopeless and contender.unit is None:
            return
        # A job that had to leave goes back where it ran, if that is free after all.
        own = self._round.seat_of(contender)
        seat = own if own is not None and self._servers.fits(own.gpus, own.cpu_mem) else None
        seat = seat or self._first_fit(contender) or self._instead_of_others(contender)
        if seat is None:
            self._hopeless.add(size)
        else:
            self._take(seat)
            self.seating.seats[contender.rank] = seat

    def _first_fit(self, contender: Contender) -> Seat | None:
        job = contender.job
        for name in self._servers.with_gpus(job, job.gpu_count) if job.node_count == 1 else ():
            seat = self._seat_on(contender, name)
            if self._servers.fits(seat.gpus, seat.cpu_mem):
                return seat
        gpus = self._servers.gpus.copy().take(job.partition, job.gpu_count, node_count=job.node_count)
        if gpus is None or len(gpus) < 2:
            return None
        cpu_mem = spread(self._servers, job, gpus, saturating_wish)
        return Seat(contender, gpus, cpu_mem) if self._servers.fits(gpus, cpu_mem) else None

    def _instead_of_others(self, contender: Contender) -> Seat | None:
        job = contender.job
        best: tuple[int, str, Sequence[Seat]] | None = None
        on_node: dict[str, list[Seat]] = {}
        for rank in sorted(self._running, reverse=True):
            seat = self._running[rank]
            if len(seat.gpus) == 1:
                on_node.setdefault(seat.node, []).append(seat)
        for name in sorted(on_node) if job.node_count == 1 else ():
            leaving = self._enough_of(on_node[name], self._seat_on(contender, name))
            if leaving and self._servers.gpus.suits(name, job.partition, 0.0):
                cost = sum(seat.gpus[0].gpu_count for seat in leaving)
                best = min(best or (cost, name, leaving), (cost, name, leaving), key=lambda found: found[:2])
        if best is None:
            return None
        for seat in best[2]:
            self._leave(seat)
        return self._seat_on(contender, best[1])

    def _enough_of(self, running: Sequence[Seat], wanted: Seat) -> Sequence[Seat]:
        """The first of a node's running jobs whose leaving makes room; none if all of them do not."""
        trial = self._servers.copy()
        for count, seat in enumerate(running, start=1):
            trial.gpus.give_back(seat.gpus)
            trial.give_back_shares(seat.cpu_mem)
            if trial.fits(wanted.gpus, wanted.cpu_mem):
                return running[:count]
        return ()

    def _seat_on(self, contender: Contender, name: str) -> Seat:
        job, node = contender.job, self._servers.nodes[name]
        gpus = (NodeShare(name, job.gpu_count),)
        return Seat(contender, gpus, self._servers.shares_on(gpus, saturating_wish(job, node, job.gpu_count)))

    def _take(self, seat: Seat) -> None:
        self._servers.gpus.take_exactly(seat.gpus)
        self._servers.take_shares(seat.cpu_mem)

    def _leave(self, seat: Seat) -> None:
        self._servers.gpus.give_back(seat.gpus)
        self._servers.give_back_shares(seat.cpu_mem)
        del self._running[seat.rank]
        self._hopeless.clear()


def tune(round_: Round, wish: Wish = saturating_wish) -> Seating:
    """Seat the runnable jobs, the most demanding first; then the other jobs that fit.

    1. The node where the demand fits, the one with the least left.
    2. The same with the GPU-proportional share.
    3. The node with the fewest GPUs that are enough, where jobs that hold more than their proportional share go back to
    it until there is room.

    Running jobs keep node and share (lease renewal): a share only shrinks in step 3, and only grows again if that gains
    more until the next plan than the restart costs.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.2.
    """
    placements = round_.runnable()
    tuner = _Tuner(round_, wish)
    if not tuner.seat_all(placements):
        # Best fit by three resources left holes that best fit by GPUs does not.
        tuner = _Tuner(round_, wish)
        tuner.seat_all(placements, as_placed=True)
    tuner.backfill()
    tuner.grow()
    return tuner.seating


class _Tuner:
    def __init__(self, round_: Round, wish: Wish) -> None:
        self._round, self._wish = round_, wish
        self._servers = round_.servers.copy()
        self._on_node: dict[str, list[Seat]] = {name: [] for name in self._servers.nodes}
        self._known: dict[tuple[float, ...], Demand] = {}
        self.seating = Seating()

    def seat_all(self, placements: Iterable[Placement], *, as_placed: bool = False) -> bool:
        """Seat the runnable jobs (`as_placed`: on exactly these GPUs); False where one finds no node."""
        new = []
        for placement in placements:
            (contender,) = placement.unit.members
            seat = self._round.seat_of(contender) if placement.kept else None
            if seat is not None:
                self._settle(seat)
            elif len(placement.gpus) > 1:
                self._seat_at(contender, placement.gpus)
            else:
                new.append(placement)
        complete = True
        for placement in sorted(new, key=self._demand_first):
            (contender,) = placement.unit.members
            if not as_placed and self._stay(contender):
                continue
            if as_placed:
                nodes = [placement.gpus[0].node]
            else:
                nodes = self._servers.with_gpus(contender.job, contender.job.gpu_count)
            complete = complete and bool(nodes)
            self._seat_on_one(contender, nodes)
        return complete

    def backfill(self) -> None:
        """Seat, in order of priority, the other jobs that find room."""
        hopeless = set()
        for contender in self._round.contenders:
            size = size_of(contender)
            if contender.rank in self.seating.seats or self._stay(contender) or size in hopeless:
                continue
            if not self._seat_anywhere(contender):
                hopeless.add(size)

    def grow(self) -> None:
        """Let jobs on one node that have less than they demand have free resources, if that is worth a restart."""
        for seat in self.seating.by_rank():
            job, node, gpus = seat.contender.job, self._servers.nodes[seat.node], seat.gpus[0].gpu_count
            if len(seat.gpus) > 1 or not exceeds(self._wish(job, node, gpus), seat.share):
                continue
            lost_s = job.restart_s if seat.kept else 0.0
            interval_s = max(self._round.interval_s, 1.0)
            now = speed(job, seat.share, node) * interval_s * (1 + 1e-9)
            for wanted in steps(job, node, gpus):
                pays = speed(job, wanted, node) * (interval_s - lost_s) > now
                if not pays or self._resize(seat, wanted):
                    break

    def _demand_first(self, placement: Placement) -> tuple[float, ...]:
        """GPU demand, then CPU, then memory, descending."""
        (contender,) = placement.unit.members
        gpus = placement.unit.gpu_count
        wanted = self._each(contender.job, placement.gpus[0].node, proportional=False)
        return (-gpus, -wanted.cpus * gpus, -wanted.mem_gib * gpus, contender.rank)

    def _stay(self, contender: Contender) -> bool:
        """Leave a running job where it is after all, if all its resources are free."""
        seat = self._round.seat_of(contender)
        if seat is None or not self._servers.fits(seat.gpus, seat.cpu_mem):
            return False
        self._settle(seat)
        return True

    def _seat_anywhere(self, contender: Contender) -> bool:
        job = contender.job
        nodes = self._servers.with_gpus(job, job.gpu_count) if job.node_count == 1 else []
        if nodes:
            return self._seat_on_one(contender, nodes)
        gpus = self._servers.gpus.copy().take(job.partition, job.gpu_count, node_count=job.node_count)
        return gpus is not None and self._seat_at(contender, gpus)

    def _seat_on_one(self, contender: Contender, nodes: Sequence[str]) -> bool:
        """The three steps."""
        job = contender.job
        for proportional in (False, True):
            fitting = self._fitting(job, nodes, proportional=proportional)
            if fitting:
                best = min(fitting, key=lambda name: (*self._servers.tightness(name), name))
                self._settle(self._seat(contender, best, proportional=proportional))
                return True
        for name in sorted(nodes, key=lambda name: (self._servers.gpus.on_node(name), name)):
            node = self._servers.nodes[name]
            wanted = self._each(job, name, proportional=False)
            seat = self._seat(contender, name, proportional=exceeds(wanted, fair_share(node)))
            if self._make_room(seat):
                self._settle(seat)
                return True
        return False

    def _fitting(self, job: PlanJob, nodes: Sequence[str], *, proportional: bool) -> list[str]:
        """Of nodes with enough GPUs those that have the CPUs and the memory, too."""
        servers, needs = self._servers, {}
        found = []
        for name in nodes:
            kind = servers.kind[name]
            if kind not in needs:
                each = self._each(job, name, proportional=proportional)
                needs[kind] = Demand(each.cpus * job.gpu_count, each.mem_gib * job.gpu_count)
            if servers.has_cpus_and_mem(name, needs[kind]):
                found.append(name)
        return found

    def _seat(self, contender: Contender, name: str, *, proportional: bool) -> Seat:
        gpus = (NodeShare(name, contender.job.gpu_count),)
        each = self._each(contender.job, name, proportional=proportional)
        return Seat(contender, gpus, self._servers.shares_on(gpus, each))

    def _each(self, job: PlanJob, name: str, *, proportional: bool) -> Demand:
        """A job's wish for each GPU; equal jobs ask for the same of equal nodes, and there are many of both."""
        asked = (self._servers.kind[name], job.gpu_count, id(job.sensitivity), proportional)
        if asked not in self._known:
            node = self._servers.nodes[name]
            self._known[asked] = fair_share(node) if proportional else self._wish(job, node, job.gpu_count)
        return self._known[asked]

    def _make_room(self, seat: Seat) -> bool:
        """Take jobs on a seat's nodes back to their proportional share until it fits; none, if that does not help."""
        trial = self._servers.copy()
        others = {other.rank: other for share in seat.gpus for other in self._on_node[share.node]}
        reverted = []
        # New jobs before running ones, whose change would cost a restart; then those with the most.
        for other in sorted(
            others.values(), key=lambda other: (other.kept, *(-part for part in other.share), -other.rank)
        ):
            if not self._has_more_than_its_share(other):
                continue
            trial.give_back_shares(other.cpu_mem)
            trial.take_shares(trial.shares_on(other.gpus))
            reverted.append(other)
            if trial.fits(seat.gpus, seat.cpu_mem):
                for less in reverted:
                    self._resize(less, None)
                    text = "it gave up its surplus above the GPU-proportional share for job {}"
                    less.notes = (Reason(text, (seat.contender.job.job_id,)),)
                return True
        return False

    def _has_more_than_its_share(self, seat: Seat) -> bool:
        parts = zip(seat.gpus, seat.cpu_mem, strict=True)
        return any(
            exceeds(per_gpu(cpu_mem, gpus.gpu_count), fair_share(self._servers.nodes[gpus.node]))
            for gpus, cpu_mem in parts
        )

    def _seat_at(self, contender: Contender, gpus: Shares) -> bool:
        """Several nodes: the job's demand, or else its share of each node."""
        amounts = (spread(self._servers, contender.job, gpus, self._wish), self._servers.shares_on(gpus))
        seats = [Seat(contender, gpus, cpu_mem) for cpu_mem in amounts]
        seat = next((seat for seat in seats if self._servers.fits(gpus, seat.cpu_mem)), None)
        if seat is None and self._make_room(seats[-1]):
            seat = seats[-1]
        if seat is not None:
            self._settle(seat)
        return seat is not None

    def _resize(self, seat: Seat, each: Demand | None) -> bool:
        """Give a seat another share, the proportional one without a figure, if it is free."""
        self._servers.give_back_shares(seat.cpu_mem)
        cpu_mem = self._servers.shares_on(seat.gpus, each)
        fits = each is None or self._servers.fits((), cpu_mem)
        if fits:
            seat.cpu_mem = cpu_mem
        self._servers.take_shares(seat.cpu_mem)
        return fits

    def _settle(self, seat: Seat) -> None:
        self._servers.gpus.take_exactly(seat.gpus)
        self._servers.take_shares(seat.cpu_mem)
        self.seating.seats[seat.rank] = seat
        for share in seat.gpus:
            self._on_node[share.node].append(seat)


def proportional(round_: Round) -> Seating:
    """Seat the runnable jobs with the GPU-proportional share of their node."""
    return tune(round_, proportional_wish)
