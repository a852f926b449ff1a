"""AntMan's seats: GPUs with one guaranteed job on them, one opportunistic, or one of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from muri.policies.cycle.bucket import Bucket
from muri.policies.schedulers.antman_speed import leftover_speed, shape_to_share
from muri.policies.speed.model import Shape
from muri.policies.types import NodeShare, PlanJob


@dataclass(slots=True)
class Seat:
    """GPUs, and who is on them.

    Attributes:
        jobs: One job, or a guaranteed and an opportunistic one.
        gpus: What they hold.
        kept: Whether just these jobs run there already.
    """

    jobs: list[PlanJob]
    gpus: tuple[NodeShare, ...]
    kept: bool = False

    @property
    def gpu_count(self) -> int:
        """How many GPUs these are."""
        return self.jobs[0].gpu_count

    def join(self, job: PlanJob) -> None:
        """Put a second job on it."""
        self.jobs = sorted([*self.jobs, job], key=lambda member: member.opportunistic)
        self.kept = False


@dataclass(slots=True)
class OpenSeats:
    """Seats that one job of the other class may join.

    Attributes:
        same_user: Whether both must have one owner.
        min_speedup: Least sum of both speeds.
        gpu_mem_gib: Memory of a GPU by node; 0 when unknown.
    """

    same_user: bool
    min_speedup: float
    gpu_mem_gib: Mapping[str, float]
    _open: dict[tuple[Bucket, bool], dict[Shape, list[Seat]]] = field(default_factory=dict)
    _leftover: dict[tuple[Shape, Shape], float] = field(default_factory=dict)

    def offer(self, seat: Seat) -> None:
        """Let others join the one job of a seat, if enough is known of it."""
        job = seat.jobs[0]
        shape = shape_to_share(job)
        if len(seat.jobs) == 1 and shape is not None:
            seats = self._open.setdefault((self._bucket(job), job.opportunistic), {})
            seats.setdefault(shape, []).append(seat)

    def take(self, job: PlanJob) -> Seat | None:
        """Give the seat on which the opportunistic one of the two gets on fastest; the first offered on a tie."""
        shape = shape_to_share(job)
        if shape is None:
            return None
        seats = self._open.get((self._bucket(job), not job.opportunistic), {})
        best: tuple[float, list[Seat], Seat] | None = None
        for other, offered in seats.items():
            speed = self._speed(other, shape) if job.opportunistic else self._speed(shape, other)
            if speed <= 0 or 1 + speed < self.min_speedup or (best is not None and speed <= best[0]):
                continue
            needed_gib = shape.gpu_mem_gib + other.gpu_mem_gib
            seat = next((seat for seat in offered if self._has_memory(seat, needed_gib)), None)
            best = best if seat is None else (speed, offered, seat)
        if best is None:
            return None
        best[1].remove(best[2])
        return best[2]

    def _speed(self, guaranteed: Shape, opportunistic: Shape) -> float:
        pair = (guaranteed, opportunistic)
        if pair not in self._leftover:
            self._leftover[pair] = leftover_speed(*pair)
        return self._leftover[pair]

    def _bucket(self, job: PlanJob) -> Bucket:
        return Bucket(job.user if self.same_user else "", job.partition, job.gpu_count, job.node_count)

    def _has_memory(self, seat: Seat, needed_gib: float) -> bool:
        known = [self.gpu_mem_gib[share.node] for share in seat.gpus if self.gpu_mem_gib[share.node]]
        return all(needed_gib <= capacity_gib for capacity_gib in known)
