"""Units: what GPUs are given to, one job or several that share."""

from dataclasses import dataclass

from muri.policies.cycle.forecast import Members
from muri.policies.cycle.placement import Shares
from muri.policies.reason import Reason
from muri.policies.types import Running


@dataclass(frozen=True, slots=True)
class Unit:
    """One job, or several that will share GPUs.

    Attributes:
        members: The jobs by rank.
        gpu_mem_gib: GPU memory that placement must find: of a group only, a job alone asked Slurm for it.
        stays_on: The GPUs that exactly this unit runs on already; empty for a new unit.
        notes: Reasons beside the usual ones.
    """

    members: Members
    gpu_mem_gib: float = 0.0
    stays_on: Shares = ()
    notes: tuple[Reason, ...] = ()

    @property
    def rank(self) -> int:
        """Place in the queue: that of the most urgent member."""
        return self.members[0].rank

    @property
    def gpu_count(self) -> int:
        """GPUs that it holds."""
        return self.members[0].bucket.gpu_count

    @property
    def node_count(self) -> int:
        """Nodes that it must have."""
        return self.members[0].bucket.node_count

    @property
    def partition(self) -> str:
        """Partition of its members."""
        return self.members[0].bucket.partition


def running_unit(members: Members) -> Running | None:
    """The running unit that consists of just these jobs."""
    unit = members[0].unit
    if unit is None or len(unit.members) != len(members):
        return None
    return unit if all(member.unit is unit for member in members) else None


def unit_of(members: Members, gpu_mem_gib: float = 0.0, notes: tuple[Reason, ...] = ()) -> Unit:
    """A unit of these jobs, which stays where it runs if it does."""
    running = running_unit(members)
    return Unit(members, gpu_mem_gib, () if running is None else running.gpus, notes)
