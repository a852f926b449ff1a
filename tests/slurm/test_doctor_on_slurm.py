"""`muri doctor` takes a job's real way, and says which step of it is missing."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import emptied

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


def findings(driver: Driver, *options: str, user: str = "root") -> dict[str, dict[str, Any]]:
    done = driver.run("muri", "doctor", "--json", *options, user=user, check=False)
    assert "Traceback" not in done.stderr
    return {each["name"]: each for each in json.loads(done.stdout)["findings"]}


def test_a_tiny_group_and_the_nodes(driver: Driver) -> None:
    found = findings(driver, "--nodes", "n1", "--try", "alice")
    names = ("SPANK plugin", "members' GPUs", "node n1", "a tiny group")
    assert {name: found[name]["level"] for name in names} == dict.fromkeys(names, "ok"), found
    assert "with their own exit codes" in found["a tiny group"]["text"]
    assert not driver.run("squeue", "-h", "-t", "PENDING,RUNNING", user="root").stdout.strip()
    assert "muri_gate" not in driver.run("scontrol", "show", "reservation", user="root").stdout


def test_a_cluster_whose_job_submit_does_not_know_muri(driver: Driver) -> None:
    lua = "/etc/slurm/job_submit.lua"
    own = driver.read(lua)
    driver.write(lua, PLAIN_LUA, user="root", mode="0644")
    try:
        found = findings(driver, "--try", "alice")
    finally:
        driver.write(lua, own, user="root", mode="0644")
    assert found["job_submit"]["level"] == "problem"
    assert "job_submit.lua does not call muri.submit" in found["a tiny group"]["text"]
    assert not driver.run("squeue", "-h", "-t", "PENDING", user="root").stdout.strip()


@pytest.mark.thorough
def test_a_job_that_the_users_sbatch_lies_about_is_left_alone(driver: Driver) -> None:
    bobs = driver.submit("--wrap=sleep 600", user="bob")
    lie = f'#!/bin/sh\n[ "$(id -un)" = alice ] && exec echo {bobs}\nexec /usr/bin/sbatch "$@"\n'
    folder = driver.write("/usr/local/lib/lie/sbatch", lie, user="root").removesuffix("/sbatch")
    path = driver.run("printenv", "PATH", user="root").stdout.strip()
    asked = ("env", f"PATH={folder}:{path}", "muri", "doctor", "--json", "--try", "alice")
    printed = driver.run(*asked, user="root", check=False).stdout
    driver.run("rm", "-r", folder, user="root")
    assert "which sbatch named, is another one (of bob)" in printed
    assert driver.job(bobs)["JobState"] == "RUNNING"


def test_an_ordinary_user_gets_findings_and_no_traceback(driver: Driver) -> None:
    found = findings(driver, user="alice")
    assert found["SPANK plugin"]["level"] == "ok"
    assert found["members' GPUs"]["level"] == "warning"
    refused = driver.run("muri", "doctor", "--try", "bob", user="alice", check=False)
    assert refused.returncode == 2
    assert "run them as root" in refused.stderr
