"""Pollux: elastic jobs, as many GPUs for each as their goodput pays for."""

from muri.policies.cycle.validation import check_request
from muri.policies.pollux.applicants import weight
from muri.policies.pollux.cycle import PolluxCycle
from muri.policies.priority import PriorityKey
from muri.policies.schedulers.base import EXCLUSIVE, QueuePolicy
from muri.policies.types import Plan, PlanRequest


class Pollux(QueuePolicy):
    """As many GPUs for each job as its goodput pays for.

    GPUs are exclusive and go to jobs so that the power mean of their speed-ups over a fair share is greatest, whatever
    they asked for. Jobs without a checkpoint or a profile get what they asked for. Slurm cannot resize a job that
    runs a user's script, so the policy exists for comparisons in the simulator.

    Source: Pollux (Qiao et al., OSDI 2021); docs/pollux.md says what is simplified.
    """

    name = "pollux"
    order = "service received"
    fixed = EXCLUSIVE
    packs = True
    elastic = True
    simulated_only = True

    def key(self, request: PlanRequest) -> PriorityKey:
        """Those who have received little first; only while there are fewer GPUs than jobs."""
        return lambda job: (-weight(job),)

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packs=True, elastic=True)
        cycle = PolluxCycle(request, self.rules)
        cycle.decide()
        return cycle.result(self.name)
