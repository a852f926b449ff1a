"""Muri for the average job completion time, with CPUs and memory by demand and plain sharing where faster."""

from typing import ClassVar

from muri.policies.hybrid.cycle import plan_hybrid
from muri.policies.schedulers.muri_jct import MuriJct
from muri.policies.types import Plan, PlanRequest


class MuriHybrid(MuriJct):
    """`muri-jct` that shares CPUs and memory out, and decides per group how to share.

    Each new group interleaves (Muri), shares plainly (SJF-BSBF, where the speeds of its pairs are known) or leaves its
    GPUs to one member, by the highest predicted Σ worth × speed. CPUs and memory go to whom they make faster, and
    nobody is predicted slower than with the GPU-proportional share (Synergy). Where nothing is known of either, it
    plans as `muri-jct` does.
    """

    name = "muri-hybrid"
    order = "as muri-jct"
    plain_groups: ClassVar[bool] = True
    gives_cpus: ClassVar[bool] = True

    def plan(self, request: PlanRequest) -> Plan:
        """Decide on every job; see `muri.policies.types.Policy`."""
        return plan_hybrid(request, self.name, self.key(request), self.rules)
