"""A job that gets its request back starts soon, though Slurm keeps a requeued job for two minutes.

Slurm lets a requeued job begin when the credentials of its last run have expired. The other sandboxes shorten that
time; this one has Slurm's own.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

import pytest
from gateway_inside import GatewayInside
from muri_cluster import MuriCluster
from sandboxes import ONE_GPU, emptied, start
from test_life_cycle import CURVE_PY, submit, wait_at_work

from muri.slurm_plugin.records.cluster import JobChange
from sandbox.cluster import SLURM_CRED_EXPIRE_S
from sandbox.driver import Driver


@pytest.fixture(scope="module")
def patient_sandbox() -> Iterator[Driver]:
    yield from start("forky", replace(ONE_GPU, cred_expire_s=SLURM_CRED_EXPIRE_S), "cred")


@pytest.fixture
def driver(patient_sandbox: Driver) -> Iterator[Driver]:
    yield from emptied(patient_sandbox)


def now(driver: Driver) -> datetime:
    """The time on the cluster, as Slurm writes it."""
    return datetime.fromisoformat(driver.run("date", "+%Y-%m-%dT%H:%M:%S").stdout.strip())


def waited_s(driver: Driver, job: int, since: datetime) -> float:
    """How long after a moment before its requeue a job has started again."""
    fields = driver.job(job)
    assert fields["Restarts"] == "1"
    return (datetime.fromisoformat(fields["StartTime"]) - since).total_seconds()


def test_slurm_itself_lets_a_requeued_job_wait(driver: Driver) -> None:
    job = driver.submit("--requeue", "--wrap=sleep infinity")
    driver.wait_state(job, "RUNNING")
    before = now(driver)
    driver.run("scontrol", "requeue", str(job), user="root")
    driver.wait_state(job, "PENDING")
    eligible = datetime.fromisoformat(driver.job(job)["EligibleTime"])
    assert (eligible - before).total_seconds() >= SLURM_CRED_EXPIRE_S


@pytest.mark.parametrize("kind", ["pyslurm", "command"])
def test_a_gateway_lets_a_job_start_at_once(driver: Driver, kind: str) -> None:
    job = driver.submit("--requeue", "--wrap=sleep infinity")
    driver.wait_state(job, "RUNNING")
    before = now(driver)
    inside = GatewayInside(driver, kind)
    inside.call(("requeue_hold", job))
    driver.wait_state(job, "PENDING")
    inside.modify(job, JobChange(start_now=True))
    inside.call(("release", job))
    driver.wait_state(job, "RUNNING")
    assert waited_s(driver, job, before) < SLURM_CRED_EXPIRE_S


def test_a_preempted_job_resumes_before_slurm_would_let_it(driver: Driver) -> None:
    muri = MuriCluster(driver)
    muri.know_profiles()
    muri.script("curve", CURVE_PY)
    job = submit(muri)
    muri.cycle()
    wait_at_work(muri, job)
    before = now(driver)
    driver.run("muri", "preempt", str(job), "--yes", user="root")
    fields = muri.cycles_until_ended(job)
    assert fields[job]["JobState"] == "COMPLETED"
    assert "resumed at iteration" in muri.output(job)
    assert waited_s(driver, job, before) < SLURM_CRED_EXPIRE_S
