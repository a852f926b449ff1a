"""Whole cycles under a site's limits: smaller groups or none, nobody barred, nobody beyond what the site allows."""

from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm, behind_licence, make_job, make_node, one_gpu, pilots

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.planning import decision as decision_module
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.journal import EXCLUSION
from muri.slurm_plugin.records.limits import Association, Limits, PartitionLimits, Qos, SiteLimits, Tres
from muri.slurm_plugin.records.roles import read_job

HOUR_S = 3600


def site(max_time_s: int | None = None, qos: Limits | None = None, association: Limits | None = None) -> SiteLimits:
    """A site with one account, QOS and partition."""
    return SiteLimits(
        (PartitionLimits("main", max_time_s=max_time_s),),
        True,
        (Qos("normal", qos or Limits()),),
        (Association("root"), Association("hep", parent="root", limits=association or Limits()),
         Association("hep", "alice", limits=association or Limits())),
    )  # fmt: skip


def waiting(count: int = 4, **changes: object) -> list[Job]:
    """Jobs of different kinds behind the licence."""
    own = {"account": "hep", "qos": "normal", **changes}
    return [
        behind_licence(make_job(n, admin_comment=f"muri:model=m{n},batch-size=8,duration=100", **own))
        for n in range(1, count + 1)
    ]


def members(slurm: FakeSlurm) -> list[int]:
    return [job.job_id for job in slurm.jobs.values() if read_job(job).membership is not None]


def test_no_group_outlives_the_partitions_limit(make_controller):
    """Two days are allowed: 36 h twice are too long, 20 min twice are not (SITE row J)."""
    first, *others = waiting(3, time_limit_s=1200)
    slurm = FakeSlurm([replace(first, time_limit_s=36 * HOUR_S), *others], one_gpu(), gate_license=True)
    slurm.limits = site(max_time_s=48 * HOUR_S)
    with make_controller(slurm) as controller:
        controller.cycle()
        assert 1 not in members(slurm)
        for job in slurm.jobs.values():
            assert job.time_limit_s <= 48 * HOUR_S
        assert controller._journal.facts(EXCLUSION) == {}


@pytest.mark.parametrize(("most", "together"), [(2, 0), (3, 2), (4, 3), (5, 4)])
def test_a_group_counts_as_a_pilot_and_its_members(make_controller, most, together):
    """MaxJobs: the pilot is a job, too (row H)."""
    slurm = FakeSlurm(waiting(), one_gpu(), gate_license=True)
    slurm.limits = site(association=Limits(max_jobs_per_user=most))
    with make_controller(slurm) as controller:
        controller.cycle()
        assert len(members(slurm)) == together
        slurm.tick()
        assert controller._journal.facts(EXCLUSION) == {}


def test_a_qos_limit_on_gpus_holds(make_controller):
    """Two GPUs for each user: a third waits although it is free (row G)."""
    slurm = FakeSlurm(waiting(), [make_node("n1", gpu_count=8)], gate_license=True)
    slurm.limits = site(qos=Limits(max_tres_per_user=(Tres("gres/gpu", 2),)))
    with make_controller(slurm) as controller:
        status = controller.cycle()
        asked = [job.gpu_count for job in slurm.jobs.values() if "muri_gate" not in job.licenses]
        assert 0 < sum(asked) <= 2
        kept = [job for job in status.jobs if job.state == "waiting"]
        assert controller._journal.facts(EXCLUSION) == {}
    assert not kept or any("MaxTRESPerUser" in reason for job in kept for reason in job.reasons)


def test_a_pilot_that_a_limit_refuses_is_tried_with_fewer_members_and_bars_nobody(make_controller):
    """MaxSubmitJobs that Muri does not know of (row I)."""
    slurm = FakeSlurm(waiting(), one_gpu(), gate_license=True)

    def refuse(job):
        raise GatewayError("cannot submit job 'muri-host': Job violates accounting/QOS policy (job submit limit, …)")

    slurm.submit = refuse
    with make_controller(slurm) as controller:
        sizes = []
        for _ in range(5):
            decision = controller.decision()
            sizes.append(max((len(group.members) for group in decision.plan.groups), default=1))
            controller.cycle()
            slurm.now_s += 60
        assert sizes == [4, 3, 2, 1, 1]
        assert controller._journal.facts(EXCLUSION) == {}
    slurm.tick()
    assert not pilots(slurm)
    assert any("muri_gate" not in job.licenses for job in slurm.jobs.values())


def test_a_pilot_that_could_not_be_submitted_bars_nobody_for_good(make_controller, monkeypatch):
    slurm = FakeSlurm(waiting(), one_gpu(), gate_license=True)

    def fail(_job):
        raise GatewayError("cannot submit job 'muri-host': the user's sbatch did not end")

    with monkeypatch.context() as patched, make_controller(slurm) as controller:
        patched.setattr(slurm, "submit", fail)
        controller.cycle()
        assert controller.decision().plan.groups == ()
        assert controller._journal.facts(EXCLUSION) == {}
    slurm.now_s += 2 * HOUR_S
    slurm.extend_lease(slurm.now_s + 600)
    with make_controller(slurm) as controller:
        controller.cycle()
    assert len(members(slurm)) == 4


def test_a_site_policy_that_ignores_the_domains_starts_no_such_group(make_controller, monkeypatch):
    """A policy of a site's own may not know whom Slurm counts apart."""
    rich, poor = waiting(2)
    slurm = FakeSlurm([rich, replace(poor, account="astro")], one_gpu(), gate_license=True)
    real = decision_module.prepare

    def blind(cycle, use):
        found = real(cycle, use)
        jobs = tuple(replace(job, domain="") for job in found.request.jobs)
        return replace(found, request=replace(found.request, jobs=jobs))

    seen = decision_module.broken_laws

    def knowing(request, plan):
        jobs = tuple(replace(job, domain=str(job.job_id)) for job in request.jobs)
        return seen(replace(request, jobs=jobs), plan)

    monkeypatch.setattr(decision_module, "prepare", blind)
    monkeypatch.setattr(decision_module, "broken_laws", knowing)
    with make_controller(slurm) as controller:
        decision = controller.decision()
        assert decision.plan.groups
        status = controller.cycle()
    assert not pilots(slurm)
    assert any("different domains" in reason for job in status.jobs for reason in job.reasons)
