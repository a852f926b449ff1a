"""Whether a waiting job's GPUs can be taken away is found out by trying, on each release of Slurm."""

import json

import pytest
from accounting_records import complete_records
from site_cluster import SiteCluster

from sandbox.driver import Driver

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
