"""SJF-BSBF: the shortest job first; who finds no free GPUs shares them where that ends both sooner on average."""

from types import MappingProxyType

from muri.policies import priority
from muri.policies.cycle.queue import line_up
from muri.policies.cycle.validation import check_request
from muri.policies.schedulers.base import QueuePolicy
from muri.policies.schedulers.sjf_bsbf_cycle import SharingCycle
from muri.policies.types import Plan, PlanRequest


class SjfFfs(QueuePolicy):
    """Shortest job first, and first-fit sharing: join the first running job whose GPUs have the memory.

    As `SjfBsbf`, without its test whether sharing pays; the batch is divided only as far as the memory asks for.

    Source: SJF-BSBF, its baseline SJF-FFS.
    """

    name = "sjf-ffs"
    order = "remaining time"
    fixed = MappingProxyType({"preemption": False})
    packs = True
    tests_pairs = False

    def key(self, request: PlanRequest) -> priority.PriorityKey:
        """By remaining seconds; jobs of unknown duration follow by attained service."""
        return priority.srtf

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        check_request(request, packs=True)
        cycle = SharingCycle(self.rules, request, tests_pairs=self.tests_pairs)
        for contender in line_up(request, self.key(request), self.rules).contenders:
            cycle.decide(contender.job)
        return cycle.result(self.name)


class SjfBsbf(SjfFfs):
    """Shortest job first; it shares a running job's GPUs if both then end sooner on average.

    Free GPUs come first. Failing these, a job joins running ones that hold their GPUs alone, at most two jobs on
    a GPU, where Theorem 1 says that joining now is better than waiting for the other to end; its batch is computed
    in as many steps as the GPUs' memory asks for. Nothing is ever stopped. Jobs share only where both durations
    and the speeds of the pair are known.

    Source: SJF-BSBF ("wise resource sharing": best sub-batch, best benefit first).
    """

    name = "sjf-bsbf"
    tests_pairs = True
