"""AntMan: opportunistic jobs live on what guaranteed ones leave over."""

from types import MappingProxyType

from muri.policies.cycle.queue import line_up
from muri.policies.cycle.validation import check_request
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.antman_cycle import AntManCycle
from muri.policies.schedulers.antman_seats import Seat
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.types import Plan, PlanRequest


class AntMan(QueuePolicy):
    """Guaranteed jobs at full speed; opportunistic ones take what is left over.

    Guaranteed jobs go first, in order of submission, and nothing is ever stopped. GPUs hold at most
    one guaranteed and one opportunistic job, of one bucket. A job takes free GPUs; failing that, it
    joins one of the other class, so an opportunistic job never keeps out a guaranteed one that leaves
    it something. Jobs without a profile share with nobody.

    Source: AntMan (Xiao et al., OSDI 2020), its two classes of jobs. What an opportunistic job gets is
    computed by `antman_speed.leftover_speed`; AntMan itself measures and adjusts while jobs run.
    """

    name = "antman"
    order = "class, submit time"
    fixed = MappingProxyType({"preemption": False})

    def key(self, request: PlanRequest) -> PriorityKey:
        """Guaranteed jobs before opportunistic ones."""
        return lambda job: (float(job.opportunistic),)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request)
        cycle = AntManCycle(self.rules, request)
        for unit in sorted(request.running, key=lambda unit: min(job.job_id for job in unit.members)):
            cycle.seat(Seat(list(unit.members), unit.gpus, kept=True))
        for contender in line_up(request, self.key(request), self.rules).contenders:
            cycle.decide(contender.job)
        return cycle.result(self.name)
