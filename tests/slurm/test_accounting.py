"""Accounting in the sandbox: each job is billed to its account and QOS, and limits hold. On both releases."""

from collections.abc import Iterator

import pytest
from accounting_records import Payer, complete_records, gpu_seconds
from conftest import emptied

from sandbox.driver import CommandError, Driver

#: A job that runs until its user writes the file `go`.
UNTIL_GO = "--wrap=until [ -e go ]; do sleep 0.1; done"


@pytest.fixture(params=["accounting_sandbox", "old_accounting_sandbox"])
def either(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A sandbox with accounting of each release, with an empty queue."""
    driver = request.getfixturevalue(request.param)
    driver.run("rm", "-f", "/home/alice/go", "/home/bob/go", user="root")
    yield from emptied(driver)


def test_jobs_are_billed_to_their_account_and_qos(either: Driver) -> None:
    default = either.submit("--gres=gpu:2", "--wrap=true")
    chosen = either.submit("--gres=gpu:1", "--account=astro", "--qos=short", "--wrap=true", user="bob")
    billed = {run.job_id: (run.user, run.payer, run.gpus) for run in complete_records(either, default, chosen)}
    assert billed[default] == ("alice", Payer("hep", "normal"), 2)
    assert billed[chosen] == ("bob", Payer("astro", "short"), 1)


def test_a_qos_limits_the_gpus_of_each_user(either: Driver) -> None:
    first = either.submit("--qos=small", "--gres=gpu:2", UNTIL_GO)
    either.wait_state(first, "RUNNING")
    second = either.submit("--qos=small", "--gres=gpu:1", "--wrap=true")
    either.wait_until(lambda: either.job(second)["Reason"] == "QOSMaxGRESPerUser", "the limit")
    others = [
        either.submit("--qos=small", "--gres=gpu:2", "--wrap=true", user="bob"),
        either.submit("--gres=gpu:1", "--wrap=true"),
    ]
    for other in others:
        assert either.wait_state(other)["JobState"] == "COMPLETED"
    assert either.job(second)["JobState"] == "PENDING"
    either.write("go", "")
    assert either.wait_state(second)["JobState"] == "COMPLETED"


def test_a_qos_limits_the_run_time(either: Driver) -> None:
    job = either.submit("--qos=short", "--time=61", "--wrap=true")
    either.wait_until(lambda: either.job(job)["Reason"] == "QOSMaxWallDurationPerJobLimit", "the limit")
    either.run("sacctmgr", "--immediate", "modify", "qos", "short", "set", "MaxWall=02:00:00", user="root")
    try:
        assert either.wait_state(job)["JobState"] == "COMPLETED"
    finally:
        either.run("sacctmgr", "--immediate", "modify", "qos", "short", "set", "MaxWall=01:00:00", user="root")


def test_halves_of_the_cluster_have_features(accounted: Driver) -> None:
    job = accounted.submit("--constraint=v100", "--output=node.out", "--wrap=echo $SLURMD_NODENAME")
    assert accounted.wait_state(job)["JobState"] == "COMPLETED"
    assert accounted.read("/home/alice/node.out").strip() in {"n3", "n4"}
    with pytest.raises(CommandError, match="Invalid feature"):
        accounted.submit("--constraint=h100", "--wrap=true")


def test_a_job_may_wait_for_the_licence_of_the_site(accounted: Driver) -> None:
    accounted.run("rm", "-f", "go")
    first = accounted.submit("--licenses=matlab:2", UNTIL_GO)
    accounted.wait_state(first, "RUNNING")
    second = accounted.submit("--licenses=matlab:1", "--wrap=true")
    accounted.wait_until(lambda: accounted.job(second)["Reason"] == "Licenses", "the wait for a licence")
    accounted.write("go", "")
    assert accounted.wait_state(second)["JobState"] == "COMPLETED"


def test_gpu_seconds_count_every_run_of_a_job(accounted: Driver) -> None:
    accounted.run("rm", "-f", "go", "ran")
    job = accounted.submit("--gres=gpu:2", "--wrap=sleep 2; touch ran; until [ -e go ]; do sleep 0.1; done")
    other = accounted.submit("--account=astro", "--gres=gpu:1", "--wrap=sleep 1")
    accounted.wait_until(lambda: accounted.read("/home/alice/ran") == "", "two seconds of the first run")
    accounted.run("scontrol", "requeue", str(job), user="root")
    accounted.write("go", "")
    found = complete_records(accounted, job, other)
    runs = [run for run in found if run.job_id == job]
    assert len(runs) == 2
    assert all(run.gpu_s >= 4 for run in runs), runs
    sums = gpu_seconds(found)
    assert sums[Payer("hep", "normal")] == sum(run.gpu_s for run in runs)
    assert sums[Payer("astro", "normal")] >= 1


def test_nobody_but_root_reads_the_database(accounting_sandbox: Driver) -> None:
    query = ("mariadb", "--execute", "SHOW TABLES", "slurm_acct_db")
    assert "acct_table" in accounting_sandbox.run(*query, user="root").stdout
    assert accounting_sandbox.run(*query, user="alice", check=False).returncode != 0
    assert accounting_sandbox.run("cat", "/etc/slurm/slurmdbd.conf", user="alice", check=False).returncode != 0


def test_the_accounts_outlive_a_restart_of_the_controller(accounted: Driver) -> None:
    job = accounted.submit("--account=astro", "--wrap=true")
    complete_records(accounted, job)
    accounted.restart_controller()
    again = accounted.submit("--account=astro", "--wrap=true")
    assert {run.payer for run in complete_records(accounted, job, again)} == {Payer("astro", "normal")}
