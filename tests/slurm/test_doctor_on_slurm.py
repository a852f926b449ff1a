"""`muri doctor` takes a job's real way, and says which step of it is missing."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sandboxes import emptied

from sandbox.driver import Driver

PLAIN_LUA = """\
function slurm_job_submit() return slurm.SUCCESS end
function slurm_job_modify() return slurm.SUCCESS end
return slurm.SUCCESS
"""


@pytest.fixture(params=["middle_sandbox", "accounting_sandbox"], ids=["trixie", "forky"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    for each in emptied(request.getfixturevalue(request.param)):
        each.run("rm", "-rf", "/etc/muri", user="root")
        each.run("scontrol", "delete", "reservationname=muri_gate", user="root", check=False)
        yield each


def findings(driver: Driver, user: str = "root") -> dict[str, dict[str, Any]]:
    done = driver.run("muri", "doctor", "--json", user=user, check=False)
    assert "Traceback" not in done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["findings"]}


def test_a_jobs_real_way(driver: Driver) -> None:
    found = findings(driver)
    names = ("SPANK plugin", "members' GPUs")
    assert {name: found[name]["level"] for name in names} == dict.fromkeys(names, "ok"), found
    assert not driver.run("squeue", "-h", "-t", "PENDING,RUNNING", user="root").stdout.strip()
    assert "muri_gate" not in driver.run("scontrol", "show", "reservation", user="root").stdout


def test_a_cluster_whose_job_submit_does_not_know_muri(driver: Driver) -> None:
    lua = "/etc/slurm/job_submit.lua"
    own = driver.read(lua)
    driver.write(lua, PLAIN_LUA, user="root", mode="0644")
    try:
        found = findings(driver)
    finally:
        driver.write(lua, own, user="root", mode="0644")
    assert found["job_submit"]["level"] == "problem"
    assert "muri/job_submit/job_submit.lua" in found["job_submit"]["lines"][0]
    assert not driver.run("squeue", "-h", "-t", "PENDING", user="root").stdout.strip()


def test_an_ordinary_user_gets_findings_and_no_traceback(driver: Driver) -> None:
    found = findings(driver, user="alice")
    assert found["SPANK plugin"]["level"] == "ok"
    assert found["members' GPUs"]["level"] == "warning"
