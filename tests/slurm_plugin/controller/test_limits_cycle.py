"""Whole cycles under a site's limits: smaller groups or none, no job barred, none beyond the site's limits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_license, make_job, make_node, one_cycle, one_gpu, pilots

from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError, SubmissionTimeoutError
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.cluster import Job, JobState, Node
from muri.slurm_plugin.records.journal import EXCLUSION, Journal
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


@pytest.fixture(autouse=True)
def nobody_is_barred(tmp_path: Path) -> Iterator[None]:
    """Whatever a limit refuses, no job is kept from groups for good."""
    yield
    with Journal(tmp_path / "journal.db") as journal:
        assert journal.facts(EXCLUSION) == {}


def limited(limits: SiteLimits, jobs: list[Job] | None = None, nodes: list[Node] | None = None) -> FakeSlurm:
    """Four jobs for one GPU, or others, under a site's limits."""
    slurm = FakeSlurm(waiting() if jobs is None else jobs, nodes or one_gpu(), gate_license=True)
    slurm.limits = limits
    return slurm


def waiting(count: int = 4, **changes: object) -> list[Job]:
    """Jobs behind the license, of four kinds in turn."""
    own = {"account": "hep", "qos": "normal", **changes}
    return [
        behind_license(make_job(n, admin_comment=f"muri:model=m{(n - 1) % 4 + 1},batch-size=8,duration=100", **own))
        for n in range(1, count + 1)
    ]


def submitting_nothing(error: Exception, count: int = 4) -> FakeSlurm:
    """Jobs for one GPU; each submission ends with the error."""
    slurm = FakeSlurm(waiting(count), one_gpu(), gate_license=True)

    slurm.submit = Mock(side_effect=error)
    return slurm


def members(slurm: FakeSlurm) -> list[int]:
    return [job.job_id for job in slurm.jobs.values() if read_job(job).membership is not None]


def test_no_group_outlives_the_partitions_limit(make_controller):
    """Two days are allowed: 36 h twice are too long, 20 min twice are not (SITE row J)."""
    first, *others = waiting(3, time_limit_s=1200)
    slurm = limited(site(max_time_s=48 * HOUR_S), [replace(first, time_limit_s=36 * HOUR_S), *others])
    one_cycle(make_controller, slurm)
    assert 1 not in members(slurm)
    assert all(job.time_limit_s <= 48 * HOUR_S for job in slurm.jobs.values())


@pytest.mark.parametrize(("most", "together"), [(2, 0), (3, 2), (4, 3), (5, 4)])
def test_a_group_counts_as_a_pilot_and_its_members(make_controller, most, together):
    """MaxJobs: the pilot is a job, too (row H)."""
    slurm = limited(site(association=Limits(max_jobs_per_user=most)))
    one_cycle(make_controller, slurm)
    assert len(members(slurm)) == together


def test_a_qos_limit_on_gpus_holds(make_controller):
    """Two GPUs for each user: a third waits although it is free (row G)."""
    limits = site(qos=Limits(max_tres_per_user=(Tres("gres/gpu", 2),)))
    slurm = limited(limits, nodes=[make_node("n1", gpu_count=8)])
    told = one_cycle(make_controller, slurm)
    assert 0 < sum(slurm.jobs[job_id].gpu_count for job_id in starting(slurm)) <= 2
    kept = [job for job in told.values() if job.state == "waiting"]
    assert not kept or any("MaxTRESPerUser" in reason for job in kept for reason in job.reasons)


def test_where_a_limit_refuses_a_pilot_the_oldest_job_starts_alone_at_once_and_nobody_is_barred(make_controller):
    """MaxSubmitJobs that Muri does not know of (row I)."""
    error = GatewayError("cannot submit job 'muri:1+2': Job violates accounting/QOS policy (job submit limit, …)")
    slurm = submitting_nothing(error, count=5)
    with make_controller(slurm) as controller:
        (group,) = controller.decision().plan.groups
        controller.cycle()
        slurm.tick()
        assert [job.job_id for job in slurm.jobs.values() if job.state is JobState.RUNNING] == [min(group.members)]
        slurm.end(min(group.members))
        slurm.now_s += 60
        # Fewer may be within the limit.
        assert [len(group.members) for group in controller.decision().plan.groups] == [3]
    assert not pilots(slurm)


def test_a_pilot_that_could_not_be_submitted_bars_nobody_for_good(make_controller):
    """Its user's process was stopped, or did not end; the GPUs go to others meanwhile."""
    slurm = submitting_nothing(SubmissionTimeoutError("cannot submit job 'muri:1+2': sbatch did not end within 20 s"))
    with make_controller(slurm) as controller:
        controller.cycle()
        assert controller.decision().plan.groups == ()
    del slurm.submit
    slurm.tick()
    (oldest,) = [job.job_id for job in slurm.jobs.values() if job.state is JobState.RUNNING]
    slurm.end(oldest)
    slurm.now_s += 2 * HOUR_S
    slurm.extend_lease(slurm.now_s + 600)
    one_cycle(make_controller, slurm)
    assert len(members(slurm)) == 3


def test_a_process_that_cannot_be_started_ends_the_cycle_and_bars_nobody(make_controller):
    slurm = submitting_nothing(SlurmUnreachableError("cannot submit job 'muri:1+2': `setpriv` cannot be started"))
    with pytest.raises(SlurmUnreachableError):
        one_cycle(make_controller, slurm)


def starting(slurm: FakeSlurm) -> list[int]:
    """Jobs that Slurm may start now."""
    return [job.job_id for job in slurm.jobs.values() if "muri_gate" not in job.licenses]


@pytest.mark.parametrize("policy", ["muri-l", "muri-slurm", "sjf-bsbf"])
@pytest.mark.parametrize(
    "limits",
    [
        site(qos=Limits(max_tres_per_user=(Tres("mem", 65536),))),
        site(qos=Limits(grp_tres=(Tres("mem", 65536),))),
        site(association=Limits(grp_tres=(Tres("mem", 65536),))),
    ],
    ids=["qos, each user", "qos", "association"],
)
def test_jobs_that_would_have_too_much_memory_together_run_alone_and_hold_nobody_up(make_controller, policy, limits):
    """They and the job of another user behind them get the only GPU one after the other."""
    bob = behind_license(make_job(9, user="bob", uid=1002, admin_comment="muri:alone=1", submit_s=NOW_S))
    nodes = [make_node("n1", gpu_count=1, cpu_count=64, mem_mib=500_000)]
    limits = replace(limits, associations=(*limits.associations, Association("", "bob")))
    slurm = limited(limits, [*waiting(2, mem_per_node_mib=40_000), bob], nodes)
    options = {"policy": policy, "gpu_mem_gib": {"gpu": 80.0}, "profiling": {"at_once": 0}}
    started = []
    with make_controller(slurm, **options) as controller:
        for _ in range(3):
            controller.cycle()
            slurm.tick()
            (running,) = (job for job in slurm.jobs.values() if job.state is JobState.RUNNING)
            started.append(running.job_id)
            slurm.end(running.job_id)
    assert started == [1, 2, 9]


@pytest.mark.parametrize(
    "limits",
    [
        site(qos=Limits(max_tres_per_job=(Tres("mem", 40_000), Tres("cpu", 4)))),
        site(association=Limits(max_tres_per_job=(Tres("mem", 40_000),))),
        replace(site(), partitions=(PartitionLimits("main", max_mem_per_node_mib=40_000),)),
    ],
    ids=["qos", "association", "partition"],
)
def test_what_each_job_may_have_keeps_nobody_from_sharing(make_controller, limits):
    """The pilot is small, and its members keep their own."""
    slurm = limited(limits, waiting(2, mem_per_node_mib=40_000), [make_node("n1", gpu_count=1, mem_mib=500_000)])
    one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    assert [(job.cpu_count, job.mem_per_node_mib) for job in (pilot, slurm.jobs[1], slurm.jobs[2])] == [
        (1, 512),
        (4, 40_000),
        (4, 40_000),
    ]
    assert members(slurm) == [1, 2]


def test_of_a_group_that_is_refused_although_it_was_planned_the_oldest_job_starts_alone(make_controller, monkeypatch):
    """Whatever the reason: planned again in each cycle, its GPUs would stay idle for ever."""
    monkeypatch.setattr(SiteRoom, "largest_group", lambda room, job, most: (most, ""))
    limits = site(qos=Limits(max_tres_per_user=(Tres("mem", 65536),)))
    slurm = limited(limits, waiting(3, mem_per_node_mib=40_000), [make_node("n1", gpu_count=1, mem_mib=500_000)])
    told = one_cycle(make_controller, slurm)
    assert starting(slurm) == [1]
    reasons = {job_id: " ".join(job.reasons) for job_id, job in told.items()}
    assert "it starts alone: QOS normal allows 65536 MiB of memory for each user" in reasons[1]
    assert "QOS normal allows 65536 MiB" in reasons[2]
