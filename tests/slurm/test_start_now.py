"""A job that gets its request back starts soon, though Slurm keeps a requeued job for two minutes.

Slurm lets a requeued job begin when the credentials of its last run have expired. The other sandboxes shorten that
time; this one has Slurm's own.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

import pytest
from conftest import ONE_GPU, emptied, start
from gateway_inside import GatewayInside
from muri_cluster import MuriCluster

from muri.slurm_plugin.records.cluster import JobChange
from sandbox.cluster import SLURM_CRED_EXPIRE_S
from sandbox.driver import Driver

TRAIN_PY = """\
import time
import muri

begun = muri.checkpoint(lambda path: path.write_text("state"), lambda path: None)
print("started at", begun.iteration, flush=True)
for _ in muri.batches(range(10_000)):
    if begun.resumed:
        break
    with muri.stage("propagate"):
        time.sleep(0.05)
print("finished", flush=True)
"""


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
    job = driver.submit("--requeue", "--wrap=sleep 600")
    driver.wait_state(job, "RUNNING")
    before = now(driver)
    driver.run("scontrol", "requeue", str(job), user="root")
    driver.wait_state(job, "PENDING")
    eligible = datetime.fromisoformat(driver.job(job)["EligibleTime"])
    assert (eligible - before).total_seconds() >= SLURM_CRED_EXPIRE_S


@pytest.mark.parametrize("kind", ["pyslurm", "command"])
def test_a_gateway_lets_a_job_start_at_once(driver: Driver, kind: str) -> None:
    job = driver.submit("--requeue", "--wrap=sleep 600")
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
    driver.write("patient.py", TRAIN_PY)
    driver.write("patient.sh", "#!/bin/sh\nmuri run /home/alice/patient.py\n")
    mark = "--muri=model=propagate,batch-size=8,duration=60s,checkpoint=1"
    job = driver.submit("-p", "train", "--gres=gpu:1", mark, "--open-mode=append", "/home/alice/patient.sh")
    muri.cycle()
    muri.wait_grouped(job)
    driver.wait_until(lambda: "muri-checkpoint:" in driver.job(job).get("Comment", ""), "the checkpoint's comment")
    before = now(driver)
    driver.run("muri", "preempt", str(job), "--yes", user="root")
    fields = muri.cycles_until_ended(job)
    assert fields[job]["JobState"] == "COMPLETED"
    assert "resumed at iteration" in muri.output(job)
    assert waited_s(driver, job, before) < SLURM_CRED_EXPIRE_S


def test_members_of_a_dead_host_start_again_before_slurm_would_let_them(driver: Driver) -> None:
    muri = MuriCluster(driver)
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=30) for kind in ("load", "propagate")]
    muri.cycle()
    muri.wait_grouped(*jobs)
    (host,) = muri.hosts()
    before = now(driver)
    driver.run("scancel", "--signal=KILL", str(host), user="root")
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    # One GPU: the second may start when the first has ended.
    assert min(waited_s(driver, job, before) for job in jobs) < SLURM_CRED_EXPIRE_S
