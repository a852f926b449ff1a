"""What no plan may do, whatever the policy: put jobs on the same GPUs whose own limits forbid it."""

from collections.abc import Iterator
from typing import NamedTuple

from muri.policies.priority import all_jobs
from muri.policies.types import Plan, PlanJob, PlanRequest, may_share_gpus


class BrokenLaw(NamedTuple):
    """Jobs that a plan puts on the same GPUs although it must not.

    Attributes:
        job_ids: The jobs, ascending.
        why: Which law forbids it, for people.
    """

    job_ids: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        """The sentence."""
        return f"jobs {', '.join(map(str, self.job_ids))} must not share GPUs: {self.why}"


def broken_laws(request: PlanRequest, plan: Plan) -> tuple[BrokenLaw, ...]:
    """Whom a plan puts together although their domains or their largest groups forbid it.

    What runs together already and stays as it is breaks no law: a plan did not put it there. A policy of a site may not
    know these limits, so who carries out its plans should look here first.

    Args:
        request: What was asked.
        plan: The answer.
    """
    jobs = {job.job_id: job for job in all_jobs(request)}
    found = []
    for job_ids in sorted(set(_put_together(plan))):
        members = [jobs[job_id] for job_id in job_ids if job_id in jobs]
        if not may_share_gpus(members):
            found.append(BrokenLaw(job_ids, _why(members)))
    return tuple(found)


def _put_together(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The jobs that share GPUs, where at least one of them comes to the others."""
    for group in plan.groups:
        if not group.kept:
            yield tuple(sorted(group.members))
    tenants: dict[tuple[str, int], list[int]] = {}
    comes = {sharer.job_id for sharer in plan.sharers if not sharer.kept}
    for sharer in plan.sharers:
        for share in sharer.gpus:
            for gpu_id in share.gpu_ids:
                tenants.setdefault((share.node, gpu_id), []).append(sharer.job_id)
    for job_ids in tenants.values():
        if len(job_ids) > 1 and not comes.isdisjoint(job_ids):
            yield tuple(sorted(job_ids))


def _why(members: list[PlanJob]) -> str:
    domains = sorted({job.domain for job in members})
    if len(domains) > 1:
        return f"they are of different domains ({'; '.join(repr(domain) for domain in domains)})"
    least = min(members, key=lambda job: (job.largest_group, job.job_id))
    return f"they are {len(members)}, and job {least.job_id} may be in groups of {least.largest_group} at most"
