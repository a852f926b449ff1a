"""Synergy-GREEDY: first fit with the whole demand, in order of priority; what doesn't fit is skipped."""

from collections.abc import Sequence
from dataclasses import replace

from muri.policies.allocation.demand import saturating_wish
from muri.policies.allocation.seats import Round, Seat, Seating, spread
from muri.policies.cycle.queue import Contender
from muri.policies.types import NodeShare


def greedy(round_: Round) -> Seating:
    """Seat jobs in order of priority on the first node by name where their demand fits.

    A running job keeps its place (lease renewal) until a more urgent one needs it: then the least urgent leave the node
    where that takes the fewest GPUs, and are seated anew when their turn comes, if they fit.

    Source: Synergy (Mohan et al., OSDI 2022), section 4.1: Synergy-GREEDY.
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
        bucket = contender.bucket
        size = (bucket.partition, bucket.gpu_count, bucket.node_count, contender.job.sensitivity)
        if size in self._hopeless and contender.unit is None:
            return
        seat = self._own_place(contender) or self._first_fit(contender) or self._instead_of_others(contender)
        if seat is None:
            self._hopeless.add(size)
        else:
            self._take(seat)
            self.seating.seats[contender.rank] = seat

    def _own_place(self, contender: Contender) -> Seat | None:
        """Where a job that had to leave ran, if that is free after all."""
        seat = self._round.seat_of(contender)
        return seat if seat is not None and self._servers.fits(seat.gpus, seat.host) else None

    def _first_fit(self, contender: Contender) -> Seat | None:
        job = contender.job
        for name in self._servers.with_gpus(job, job.gpu_count) if job.node_count == 1 else ():
            seat = self._seat_on(contender, name)
            if self._servers.fits(seat.gpus, seat.host):
                return seat
        gpus = self._servers.gpus.copy().take(job.partition, job.gpu_count, node_count=job.node_count)
        if gpus is None or len(gpus) < 2:
            return None
        host = spread(self._servers, job, gpus, saturating_wish)
        return Seat(contender, gpus, host) if self._servers.fits(gpus, host) else None

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
            trial.gpus.give_back(_counted(seat))
            trial.give_back_host(seat.host)
            if trial.fits(wanted.gpus, wanted.host):
                return running[:count]
        return ()

    def _seat_on(self, contender: Contender, name: str) -> Seat:
        job, node = contender.job, self._servers.nodes[name]
        gpus = (NodeShare(name, job.gpu_count),)
        return Seat(contender, gpus, self._servers.host_of(gpus, saturating_wish(job, node, job.gpu_count)))

    def _take(self, seat: Seat) -> None:
        self._servers.gpus.take_exactly(_counted(seat))
        self._servers.take_host(seat.host)

    def _leave(self, seat: Seat) -> None:
        self._servers.gpus.give_back(_counted(seat))
        self._servers.give_back_host(seat.host)
        del self._running[seat.rank]
        self._hopeless.clear()


def _counted(seat: Seat) -> tuple[NodeShare, ...]:
    return tuple(replace(share, gpu_ids=()) for share in seat.gpus)
