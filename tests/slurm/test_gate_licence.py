"""The gate's licence on a real Slurm: no user's job may take what keeps all others waiting."""

from collections.abc import Iterator

import pytest
from muri_cluster import keep_gate

from sandbox.driver import Driver

ALL = "muri_gate:1000000"


@pytest.fixture(params=["sandbox", "trixie_sandbox", "old_sandbox"])
def slurm(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A sandbox whose controller died just now: the lease runs on."""
    driver: Driver = request.getfixturevalue(request.param)
    driver.cancel_all()
    keep_gate(driver)
    yield driver
    driver.cancel_all()
    end_lease(driver)


def end_lease(driver: Driver) -> None:
    driver.run("scontrol", "delete", "reservationname=muri_gate", user="root", check=False)


def waiting(driver: Driver, licenses: str, user: str) -> int:
    job = driver.submit("--output=/dev/null", f"--licenses={licenses}", "--wrap=exec sleep 600", user=user)
    driver.wait_until(lambda: driver.job(job)["Reason"] == "Licenses", f"the gate of job {job}")
    return job


@pytest.mark.parametrize("asked", [ALL, "muri_gate:600000,matlab:1,muri_gate:400000"])
def test_a_user_who_asks_for_the_whole_gate_keeps_nobody_waiting_when_the_lease_ends(slurm: Driver, asked: str) -> None:
    greedy, other = waiting(slurm, asked, "bob"), waiting(slurm, "muri_gate:1", "alice")
    assert slurm.job(greedy)["Licenses"] == ("muri_gate:1,matlab:1" if "matlab" in asked else "muri_gate:1")
    end_lease(slurm)
    for job in (greedy, other):
        slurm.wait_state(job, "RUNNING")


def test_nor_by_changing_the_job_afterwards_and_the_gate_may_be_taken_off(slurm: Driver) -> None:
    greedy, other = waiting(slurm, "muri_gate:1", "bob"), waiting(slurm, "matlab:1,muri_gate:1", "alice")
    slurm.run("scontrol", "update", f"JobId={greedy}", f"Licenses={ALL}", user="bob")
    assert slurm.job(greedy)["Licenses"] == "muri_gate:1"
    slurm.run("scontrol", "update", f"JobId={other}", "Licenses=matlab:1", user="alice")
    slurm.wait_state(other, "RUNNING")
    slurm.run("scontrol", "update", f"JobId={greedy}", "Licenses=", user="bob")
    slurm.wait_state(greedy, "RUNNING")


def test_an_administrator_may_ask_for_the_whole_gate(slurm: Driver) -> None:
    assert slurm.job(waiting(slurm, ALL, "root"))["Licenses"] == ALL
