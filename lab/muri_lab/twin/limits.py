"""The limits of partitions, QOS and associations that the virtual Slurm enforces."""

from collections.abc import Iterable, Iterator

from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.limits import Limits, SiteLimits


def why_refused(job: Job, jobs: Iterable[Job], limits: SiteLimits, task_count: int = 1) -> str:
    """Return Slurm's words where a job is not accepted, "" where it is."""
    for partition in limits.partitions:
        if partition.name == job.partition and partition.state in {"DRAIN", "INACTIVE"}:
            return "Required partition not available (inactive or drain)"
    if not limits.enforced:
        return ""
    active = [each for each in jobs if each.state.is_active]
    for kind, limit, mine in _limits_of(job, limits):
        count = sum(map(mine, active))
        if limit.max_submit_per_user is not None and count + task_count > limit.max_submit_per_user:
            return f"{kind}MaxSubmitJobLimit: Job violates accounting/QOS policy (job submit limit)"
    return ""


def why_over_limits(job: Job, running: Iterable[Job], limits: SiteLimits) -> str:
    """Return Slurm's reason why a job waits for a limit, "" where none is in the way."""
    for partition in limits.partitions:
        if partition.name != job.partition:
            continue
        if partition.state in {"DOWN", "INACTIVE"}:
            return "PartitionDown"
        if partition.max_time_s is not None and not 0 < job.time_limit_s <= partition.max_time_s:
            return "PartitionTimeLimit"
    at_work = list(running) if limits.enforced else []
    reasons = (_why_over(job, kind, limit, mine, at_work) for kind, limit, mine in _limits_of(job, limits))
    return next(filter(None, reasons), "") if limits.enforced else ""


def _why_over(job: Job, kind: str, limit: Limits, mine: "_Mine", at_work: list[Job]) -> str:
    """Slurm's reason where one limit is in the way."""
    own = [each for each in at_work if mine(each)]
    if limit.max_jobs_per_user is not None and len(own) >= limit.max_jobs_per_user:
        return f"{kind}MaxJobsLimit" if kind == "Assoc" else "QOSMaxJobsPerUserLimit"
    most = next((each.amount for each in limit.max_tres_per_user if each.name == "gres/gpu"), None)
    if most is not None and job.gpu_count and sum(each.gpu_count for each in own) + job.gpu_count > most:
        return "QOSMaxGRESPerUser"
    if limit.max_wall_s is not None and not 0 < job.time_limit_s <= limit.max_wall_s:
        return f"{kind}MaxWallDurationPerJobLimit"
    account = [each for each in at_work if each.account == job.account]
    group = next((each.amount for each in limit.grp_tres if each.name == "gres/gpu"), None)
    if group is not None and job.gpu_count and sum(each.gpu_count for each in account) + job.gpu_count > group:
        return "AssocGrpGRES"
    return ""


class _Mine:
    """Tells which jobs count for the same limit."""

    def __init__(self, **same: str) -> None:
        self._same = same

    def __call__(self, job: Job) -> bool:
        return all(getattr(job, name) == value for name, value in self._same.items())


def _limits_of(job: Job, limits: SiteLimits) -> Iterator[tuple[str, Limits, _Mine]]:
    """What binds a job: its QOS, and the association of its user in its account."""
    for qos in limits.qos:
        if qos.name == job.qos:
            yield "QOS", qos.limits, _Mine(qos=job.qos, user=job.user)
    for each in limits.associations:
        if each.account == job.account and each.user in {"", job.user}:
            own = _Mine(account=job.account, user=job.user) if each.user else _Mine(account=job.account)
            yield "Assoc", each.limits, own
