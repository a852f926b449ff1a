"""`scontrol requeuehold` on a real Slurm: an administrator's stays, Muri's own is lifted."""

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver


@pytest.fixture(params=[pytest.param("pyslurm", marks=pytest.mark.thorough), "command"])
def holding(request: pytest.FixtureRequest, cluster: Driver) -> MuriCluster:
    """A site whose gate is a hold."""
    site = MuriCluster(cluster)
    site.know_profiles()
    site.configure(gate="hold", gateway=request.param, partitions=[], grouping={"max_group_size": 1})
    return site


def running(site: MuriCluster, word: str) -> int:
    """Start an ordinary job and give it the tags of one that was submitted with --muri."""
    job = site.driver.submit("--gres=gpu:1", "--requeue", "--output=/dev/null", "--wrap=exec sleep infinity")
    site.driver.wait_state(job, "RUNNING")
    tags = f"AdminComment=muri:model=load,batch-size=8,alone=1{word}"
    site.driver.run("scontrol", "update", f"JobId={job}", tags, user="root")
    return job


@pytest.mark.parametrize("word", [pytest.param("", marks=pytest.mark.thorough), " muri-gate:open"])
def test_an_administrators_stays(holding: MuriCluster, word: str) -> None:
    driver, job = holding.driver, running(holding, word)
    holding.cycle()
    driver.run("scontrol", "requeuehold", str(job), user="root")
    driver.wait_until(lambda: driver.job(job)["Reason"] == "job_requeued_in_held_state", "the hold")
    for _ in range(2):
        holding.cycle()
    found = driver.job(job)
    assert (found["JobState"], found["Reason"], found["Priority"]) == ("PENDING", "job_requeued_in_held_state", "0")
    driver.run("scontrol", "release", str(job), user="root")
    driver.wait_state(job, "RUNNING")


def test_muris_own_is_lifted(holding: MuriCluster) -> None:
    driver, job = holding.driver, running(holding, " muri-gate:open")
    stop = (
        "import sys; from muri.slurm_plugin.controller.assemble import open_gateway;"
        "from muri.slurm_plugin.execute.gate import stop; from muri.slurm_plugin.records.roles import view_of;"
        "g = open_gateway('command'); stop(g, view_of(g.snapshot()).jobs[int(sys.argv[1])])"
    )
    holding.python(stop, str(job))
    driver.wait_until(lambda: driver.job(job)["Reason"] == "job_requeued_in_held_state", "the hold")
    holding.cycle()
    driver.wait_until(lambda: driver.job(job)["Reason"] != "job_requeued_in_held_state", "its end", 60)
