"""The gate's license on a real Slurm: no user's job may take what keeps all others waiting."""

import pytest

from sandbox.driver import Driver

ALL = "muri_gate:1000000"


def waiting(driver: Driver, licenses: str, user: str) -> int:
    job = driver.submit("--output=/dev/null", f"--licenses={licenses}", "--wrap=exec sleep 600", user=user)
    driver.wait_until(lambda: driver.job(job)["Reason"] == "Licenses", f"the gate of job {job}")
    return job


@pytest.mark.parametrize("asked", [ALL, "muri_gate:600000,matlab:1,muri_gate:400000"])
def test_a_user_who_asks_for_the_whole_gate_keeps_nobody_waiting_when_the_lease_ends(gated: Driver, asked: str) -> None:
    greedy, other = waiting(gated, asked, "bob"), waiting(gated, "muri_gate:1", "alice")
    assert gated.job(greedy)["Licenses"] == ("muri_gate:1,matlab:1" if "matlab" in asked else "muri_gate:1")
    gated.run("scontrol", "delete", "reservationname=muri_gate", user="root")
    for job in (greedy, other):
        gated.wait_state(job, "RUNNING")


def test_nor_by_changing_the_job_afterwards_and_the_gate_may_be_taken_off(gated: Driver) -> None:
    greedy, other = waiting(gated, "muri_gate:1", "bob"), waiting(gated, "matlab:1,muri_gate:1", "alice")
    gated.run("scontrol", "update", f"JobId={greedy}", f"Licenses={ALL}", user="bob")
    assert gated.job(greedy)["Licenses"] == "muri_gate:1"
    gated.run("scontrol", "update", f"JobId={other}", "Licenses=matlab:1", user="alice")
    gated.wait_state(other, "RUNNING")
    gated.run("scontrol", "update", f"JobId={greedy}", "Licenses=", user="bob")
    gated.wait_state(greedy, "RUNNING")


def test_an_administrator_may_ask_for_the_whole_gate(gated: Driver) -> None:
    assert gated.job(waiting(gated, ALL, "root"))["Licenses"] == ALL
