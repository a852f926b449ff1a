"""`muri doctor` takes a job's real way and says which step is missing; whose GPUs can be taken away is tried out."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from accounting_records import complete_records
from sandboxes import emptied
from site_cluster import SiteCluster

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
    names = ("SPANK plugin", "cli_filter", "members' GPUs")
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


def test_a_cluster_whose_cli_filter_does_not_know_muri(driver: Driver) -> None:
    path = "/etc/slurm/slurm.conf"
    own = driver.read(path)
    driver.write(path, own.replace("CliFilterPlugins=lua\n", ""), user="root", mode="0644")
    try:
        found = findings(driver)
    finally:
        driver.write(path, own, user="root", mode="0644")
    assert found["cli_filter"]["level"] == "warning"
    assert "CliFilterPlugins=lua" in found["cli_filter"]["remedy"]
    assert "muri/cli_filter/cli_filter.lua" in found["cli_filter"]["lines"][0]


def test_cpus_that_no_jobs_share_and_slurmds_that_have_not_read_the_plugin(driver: Driver) -> None:
    shared, on_nodes = "shared CPUs", "SPANK on nodes"
    before = findings(driver)
    assert [before[name]["level"] for name in (shared, on_nodes)] == ["ok", "ok"]
    assert "up to 8 on one: main" in before[shared]["text"]
    driver.write("/etc/muri/muri.yaml", "partitions: [main]\n", user="root", mode="0644")
    change = ("scontrol", "update", "PartitionName=main")
    driver.run(*change, "OverSubscribe=NO", user="root")
    try:
        assert findings(driver)[shared]["text"].startswith("main: no two jobs share a CPU (OverSubscribe=NO)")
    finally:
        driver.run(*change, "OverSubscribe=YES:8", user="root")
    driver.run("touch", "/etc/slurm/plugstack.conf", user="root")
    assert "slurmd on n[1-4] has not" in findings(driver)[on_nodes]["text"]
    driver.reconfigure()
    driver.wait_until(lambda: findings(driver)[on_nodes]["level"] == "ok", "slurmds that have read it")


def test_an_ordinary_user_gets_findings_and_no_traceback(driver: Driver) -> None:
    found = findings(driver, user="alice")
    assert found["SPANK plugin"]["level"] == "ok"
    assert found["members' GPUs"]["level"] == "warning"


TRY = """\
import json
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.gpu_removal import place_for, try_every_form
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands

place = place_for(CommandGateway().snapshot().nodes, ())
print(json.dumps({form.form: form.request for form in try_every_form(SlurmCommands(), place)}))
"""
BY_MURI = "gres/gpu:0,gres/muri:1"
PER_NODE_ALONE = {"--gres=gpu:N": BY_MURI, "--gpus-per-node=N": BY_MURI, "--gpus=N": "", "--gpus-per-task=N": ""}
NONE = dict.fromkeys(PER_NODE_ALONE, "")


@pytest.mark.parametrize(
    ("fixture", "found"),
    [
        ("sandbox", PER_NODE_ALONE),
        ("accounting_sandbox", PER_NODE_ALONE),
        ("middle_sandbox", PER_NODE_ALONE),
        ("old_sandbox", NONE),
        ("old_accounting_sandbox", NONE),
    ],
)
def test_what_can_be_taken_away_is_found_out(
    fixture: str, found: dict[str, str], request: pytest.FixtureRequest
) -> None:
    """With accounting the counted TRES tell it, without it the allocation of a job; nothing is left in the queue."""
    driver: Driver = request.getfixturevalue(fixture)
    driver.cancel_all()
    told = driver.run("python", "-c", TRY, user="root").stdout
    assert json.loads(told) == found
    driver.wait_until(lambda: not driver.run("squeue", "-h", user="root").stdout.strip(), "an empty queue")


@pytest.mark.parametrize("option", ["--gpus=1", pytest.param("--gpus-per-task=1", marks=pytest.mark.thorough)])
def test_jobs_whose_gpus_cannot_be_taken_away_run_alone(accounted: Driver, option: str) -> None:
    """Neither beside another nor as the first of a group: it has its own GPU, and the other job's pilot another."""
    site = SiteCluster(accounted, "auto")
    site.block("on1", 1)
    mark = "--muri=model=load,batch-size=8,duration=2s"
    script = ("/home/alice/train.sh", "20", "0", "load")
    alone = accounted.submit("-p", "on1", option, "--ntasks=1", mark, *script)
    other = site.submit("propagate", "-p", "on1", iterations=20)
    site.cycles_until_ended(alone, other)
    records = {record.job_id: record for record in complete_records(accounted, alone, other)}
    assert [records[job].gpus for job in (alone, other)] == [1, 0]
    accounted.wait_until(lambda: not site.pilots(), "the end of its pilot job")
