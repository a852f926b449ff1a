"""Whether a waiting job's GPUs can be taken away is found out by trying, on each release of Slurm."""

import json
from collections.abc import Iterator

import pytest
from accounting_records import complete_records
from conftest import emptied
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
    """With accounting the counted TRES tell it, without it what a job is given; nothing is left in the queue."""
    driver: Driver = request.getfixturevalue(fixture)
    driver.cancel_all()
    told = driver.run("python", "-c", TRY, user="root").stdout
    assert json.loads(told) == found
    driver.wait_until(lambda: not driver.run("squeue", "-h", user="root").stdout.strip(), "an empty queue")


def test_the_form_that_takes_gpus_away_is_worth_believing(middle_sandbox: Driver) -> None:
    """The witness is not the text that Slurm shows: 24.11 shows gres/gpu:0 and hands out the GPU."""
    job = middle_sandbox.submit("--hold", "--gres=gpu:1", "--wrap=sleep 600")
    middle_sandbox.run("scontrol", "update", f"JobId={job}", "TresPerNode=gres/gpu:0", user="root")
    middle_sandbox.run("scontrol", "release", str(job), user="root")
    fields = middle_sandbox.wait_state(job, "RUNNING")
    assert fields["TresPerNode"] == "gres/gpu:0"
    assert "gres/gpu=1" in fields["AllocTRES"]
    middle_sandbox.cancel_all()


@pytest.fixture
def site(middle_sandbox: Driver) -> Iterator[SiteCluster]:
    for driver in emptied(middle_sandbox):
        yield SiteCluster(driver, "auto")


def test_groups_form_on_slurm_24_11(site: SiteCluster) -> None:
    """Members give up their GPUs, are counted by the GRES muri, and end with their own exit codes."""
    site.block("on1", 1)
    jobs = [site.submit(kind, "-p", "on1", iterations=20, code=code) for kind, code in (("load", 0), ("propagate", 3))]
    ended = site.cycles_until_ended(*jobs)
    assert [ended[job]["ExitCode"] for job in jobs] == ["0:0", "3:0"]
    assert [ended[job]["TresPerNode"] for job in jobs] == [BY_MURI] * 2
    [pilot] = {site.pilot(job) for job in jobs}
    assert pilot is not None
    records = {record.job_id: record for record in complete_records(site.driver, *jobs, pilot)}
    assert [records[job].gpus for job in (*jobs, pilot)] == [0, 0, 1]


@pytest.mark.parametrize("option", ["--gpus=1", "--gpus-per-task=1"])
def test_jobs_whose_gpus_cannot_be_taken_away_run_alone(site: SiteCluster, option: str) -> None:
    """Neither beside another nor as the first of a group: it has its own GPU, and the other job's pilot another."""
    site.block("on1", 1)
    mark = "--muri=model=load,batch-size=8,duration=2s"
    script = ("/home/alice/train.sh", "20", "0", "load")
    alone = site.driver.submit("-p", "on1", option, "--ntasks=1", mark, *script)
    other = site.submit("propagate", "-p", "on1", iterations=20)
    site.cycles_until_ended(alone, other)
    records = {record.job_id: record for record in complete_records(site.driver, alone, other)}
    assert [records[job].gpus for job in (alone, other)] == [1, 0]
    site.driver.wait_until(lambda: not site.hosts(), "the end of its pilot job")
