"""Tenants of nodes: jobs and groups with their GPUs, and what they get or hold of CPUs and memory."""

from dataclasses import dataclass

from muri.policies.allocation.servers import Host, Servers
from muri.policies.cycle.placement import Shares
from muri.policies.hybrid.prediction import Mode, Predictor, Speeds, weighted
from muri.policies.reason import Reason
from muri.policies.traits import Demand
from muri.policies.types import HostShare, HostShares, PlanJob, Running


@dataclass(slots=True, eq=False)
class Tenant:
    """One job, or several that share GPUs, while CPUs and memory are given out.

    Attributes:
        jobs: The members.
        gpus: What they get.
        mode: How they share it.
        running: The running unit that it is; None for one that starts.
        movable: Whether it may be restarted, now and later: what is given to it can be taken back.
        kept: Whether it goes on as it is.
        host: CPUs and memory of its nodes; None: nothing is said, so the GPU-proportional share.
        reasons: Why it gets that.
    """

    jobs: tuple[PlanJob, ...]
    gpus: Shares
    mode: Mode = "interleave"
    running: Running | None = None
    movable: bool = True
    kept: bool = False
    host: Host | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def node(self) -> str:
        """Name of its node; empty when it spans several or none is known."""
        return self.gpus[0].node if len(self.gpus) == 1 else ""

    @property
    def gpu_count(self) -> int:
        """GPUs on its first node."""
        return self.gpus[0].gpu_count

    @property
    def is_known(self) -> bool:
        """Whether it is known of every member what CPUs and memory do to it, and all are on one node."""
        return bool(self.node) and all(job.sensitivity is not None for job in self.jobs)

    def value(self, speeds: Speeds) -> float:
        """Σ worth × speed."""
        return weighted(self.jobs, speeds)

    def holds(self, servers: Servers) -> Host:
        """CPUs and memory by node, the proportional share where nothing is said."""
        return servers.host_of(self.gpus) if self.host is None else self.host

    def amount(self, servers: Servers) -> Demand:
        """CPUs and memory of a tenant of one node."""
        share = self.holds(servers)[0]
        return Demand(share.cpus, share.mem_gib)

    def shares(self, speeds: Speeds) -> HostShares:
        """What each member has of it: nothing but the last one to end, so that nothing is lost when others leave."""
        if self.kept and self.running is not None:
            return self.running.host_shares
        if self.host is None:
            return {}
        last = max(zip(self.jobs, speeds, strict=True), key=lambda item: (*_length(*item), item[0].job_id))[0]
        nothing = tuple(HostShare(share.node, 0.0, 0.0) for share in self.host)
        return {job.job_id: self.host if job is last else nothing for job in self.jobs}


def speeds_of(tenant: Tenant, predictor: Predictor, fair: Demand) -> Speeds:
    """Predicted speeds with what it has, on its slowest node."""
    if tenant.host is None or not all(job.sensitivity is not None for job in tenant.jobs):
        return predictor.usual(tenant.jobs, tenant.mode)
    per_gpu = [
        Demand(share.cpus / gpus.gpu_count, share.mem_gib / gpus.gpu_count)
        for share, gpus in zip(tenant.host, tenant.gpus, strict=True)
    ]
    least = Demand(min(share.cpus for share in per_gpu), min(share.mem_gib for share in per_gpu))
    return predictor.speeds(tenant.jobs, tenant.mode, (least,), fair)[0]


def _length(job: PlanJob, speed: float) -> tuple[float, ...]:
    """How long a member will probably run: what has run long goes on long, where nothing better is known."""
    if job.remaining_s is None:
        return (1.0, job.attained_gpu_s)
    return (0.0, job.remaining_s / speed if speed > 0 else job.remaining_s)
