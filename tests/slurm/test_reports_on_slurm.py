"""Reports and metrics of a group on a real Slurm with accounts: the current one and Debian 13's."""

import json
from collections.abc import Iterator

import pytest
from accounting_records import complete_records
from prometheus_client.parser import text_string_to_metric_families
from sandboxes import emptied
from site_cluster import SiteCluster

from muri.slurm_plugin.records.usage import SharingReport, parse_report, with_report
from sandbox.driver import Driver

METRICS = "/var/lib/muri.prom"

#: The report of a job that ended, as `Accounting` writes it.
WRITE = (
    "import sys; from muri.slurm_plugin.gateway.accounting import Accounting;"
    "Accounting().set_admin_comment(int(sys.argv[1]), sys.argv[2])"
)


@pytest.fixture(params=[("accounting_sandbox", "auto"), ("middle_sandbox", "command")], ids=["26.05", "24.11"])
def site(request: pytest.FixtureRequest) -> Iterator[SiteCluster]:
    """A cluster whose node n1 has one free GPU; its controller writes metrics."""
    sandbox, gateway = request.param
    for driver in emptied(request.getfixturevalue(sandbox)):
        site = SiteCluster(driver, gateway)
        site.configure(partitions=["on1"], metrics_file=METRICS)
        site.block("on1", 1)
        yield site


def admin_comment(driver: Driver, job: int) -> str:
    return driver.run(
        "sacct", "--allocations", "--noheader", "--parsable2", "--format=AdminComment", f"--jobs={job}", user="root"
    ).stdout.strip()  # fmt: skip


def report(driver: Driver, *arguments: str, user: str = "alice") -> list[dict[str, object]]:
    found = json.loads(driver.run("muri", "report", *arguments, "--json", user=user).stdout)
    assert isinstance(found, list)
    return found


def metrics(driver: Driver) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(driver.read(METRICS))
        for sample in family.samples
    }


def test_a_group_is_reported_in_the_accounts_and_to_prometheus(site: SiteCluster) -> None:
    driver = site.driver
    jobs = site.pair("-p", "on1", iterations=60)
    with site.controller():
        for job in jobs:
            assert driver.wait_state(job)["JobState"] == "COMPLETED"
        driver.wait_until(lambda: all("muri-report:" in admin_comment(driver, job) for job in jobs), "the reports")
    pilot = parse_report(admin_comment(driver, jobs[0])).pilot
    runs = {run.job_id: run for run in complete_records(driver, *jobs, pilot)}
    assert [runs[job].gpus for job in (*jobs, pilot)] == [0, 0, 1]

    shared_s = 0.0
    for job, partner in zip(jobs, reversed(jobs), strict=True):
        (told,) = report(driver, str(job))
        assert (told["pilot"], told["partners"], told["alone_by"]) == (pilot, [partner], "iterations")
        assert told["alone_s"] == pytest.approx(0.1 * told["iterations"])  # of the profile
        assert 0 < told["iterations"] <= 60
        assert told["elapsed_s"] == runs[job].elapsed_s
        assert told["saved_gpu_s"] == pytest.approx(told["alone_s"] - told["gpu_s"], abs=0.11)
        shared_s += told["gpu_s"]
        lines = driver.run("muri", "report", str(job)).stdout.splitlines()
        assert lines[1] == f"It shared 1 GPU with job {partner} (pilot job {pilot})."
        assert max(map(len, lines)) <= 80
    assert shared_s == pytest.approx(runs[pilot].gpu_s, abs=0.2)  # rounded to tenths

    told = metrics(driver)
    words = [parse_report(admin_comment(driver, job)) for job in jobs]
    assert told["muri_member_gpu_seconds_alone_total", ()] == pytest.approx(
        sum(word.alone_s for word in words), abs=0.2
    )
    assert told["muri_member_gpu_seconds_shared_total", ()] == pytest.approx(sum(word.gpu_s for word in words), abs=0.2)
    assert told["muri_members_ended_total", ("iterations",)] == 2
    assert told["muri_groups_ended_total", ("completed",)] == 1
    assert told["muri_slurm_requests_total", ("done", "submit")] == 1
    assert told["muri_slurm_requests_total", ("done", "set_admin_comment")] == 2
    assert told["muri_actions_total", ("StartGroup", "done")] == 1
    assert told["muri_reports_waiting", ()] == 0


def test_a_months_table_tells_each_user_what_slurm_bills(site: SiteCluster) -> None:
    driver = site.driver
    site.root("sacctmgr", "--immediate", "add", "account", "table")
    site.root("sacctmgr", "--immediate", "add", "user", "alice", "account=table")
    jobs = site.pair("-p", "on1", "--account=table", iterations=20)
    site.cycles_until_ended(*jobs)
    pilots = {run["pilot"] for run in report(driver, "--jobs") if run["job_id"] in jobs}
    assert len(pilots) == 1
    others = driver.submit("-p", "on1", "--gres=gpu:1", "--wrap=sleep 1", user="bob")
    complete_records(driver, *jobs, *pilots, others)
    (table,) = (line for line in report(driver) if line["account"] == "table")
    assert table["grouped"] == 2
    assert table["credited_gpu_s"] == pytest.approx(table["billed_gpu_s"], abs=2)
    assert {"alice", "bob"} <= {line["user"] for line in report(driver, user="root")}
    assert {line["user"] for line in report(driver)} == {"alice"}
    text = driver.run("muri", "report", "--month", driver.run("date", "+%Y-%m").stdout.strip()).stdout
    assert text.splitlines()[0].split() == [
        "USER", "ACCOUNT", "QOS", "JOBS", "GROUPED", "BILLED", "HAD", "ALONE", "SAVED"
    ]  # fmt: skip


def test_a_share_can_be_billed(site: SiteCluster) -> None:
    driver = site.driver
    weights = "TRESBillingWeights=CPU=0.0,GRES/gpu=8.0,GRES/muri=2.0"
    with site.partition_setting("on1", weights, "TRESBillingWeights="):
        jobs = {driver.submit("-p", "on1", f"--gres={gres}", "--wrap=true"): bill
                for gres, bill in (("gpu:1", 8), ("muri:1", 2), ("gpu:1,muri:1", 10))}  # fmt: skip
        complete_records(driver, *jobs)
    text = driver.run(
        "sacct", "--allocations", "--noheader", "--parsable2", "--format=JobIDRaw,AllocTRES",
        f"--jobs={','.join(map(str, jobs))}",
    ).stdout  # fmt: skip
    billed = {}
    for job, _, tres in (line.partition("|") for line in text.splitlines()):
        billed[int(job)] = int(dict(part.split("=") for part in tres.split(",")).get("billing", 0))
    assert billed == jobs


@pytest.mark.parametrize("sandbox", ["accounting_sandbox", "middle_sandbox", "old_accounting_sandbox"])
def test_an_ended_jobs_record_takes_the_report(sandbox: str, request: pytest.FixtureRequest) -> None:
    for driver in emptied(request.getfixturevalue(sandbox)):
        job = driver.submit("--wrap=true")
        complete_records(driver, job)
        refused = driver.run("scontrol", "update", f"jobid={job}", "admincomment=x", user="root", check=False)
        assert "already finished" in refused.stderr
        comment = with_report("site:mine muri:model=m1,batch-size=8", SharingReport(9, 1, 3.5, 7.0, "plan"))
        driver.run("python", "-c", WRITE, str(job), comment, user="root")
        assert admin_comment(driver, job) == comment
        again = driver.run("python", "-c", WRITE, "999999", comment, user="root", check=False)
        assert "the accounts do not have job 999999 yet" in again.stderr


def test_without_accounts_a_report_says_so(cluster: Driver) -> None:
    done = cluster.run("muri", "report", "1", check=False)
    assert done.returncode == 1
    assert "Slurm keeps no accounts here" in done.stderr
    assert "Traceback" not in done.stderr
