"""A site's decisions hold for Muri's jobs, too: whole stories on a real Slurm with accounts, QOS and priorities."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from accounting_records import (
    Payer,
    Record,
    complete_records,
    gpu_seconds,
    most_gpus_at_once,
    most_runs_at_once,
    records,
)
from muri_cluster import STAGES
from sandboxes import GATEWAY, SECOND_GATEWAY
from site_cluster import SiteCluster

from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.cluster import parse_snapshot
from muri.slurm_plugin.records.limits import Association, Tres, is_limit_reason, is_limit_refusal
from muri.slurm_plugin.records.roles import View, view_of
from sandbox.driver import CommandError, Driver

both_gateways = pytest.mark.parametrize("gateway", ["pyslurm", pytest.param("command", marks=SECOND_GATEWAY)])

TWO_DAYS_MIN = 2 * 24 * 60


@pytest.fixture
def site(accounted: Driver, gateway: str) -> SiteCluster:
    return SiteCluster(accounted, gateway)


def outcome(site: SiteCluster, *jobs: int) -> tuple[dict[int, int | None], dict[int, Record]]:
    """Each job's pilot job, None where it was in no group, and the last run of every job; all have completed."""
    pilots = {job: site.pilot(job) for job in jobs}
    runs = site.runs(*jobs, *{pilot for pilot in pilots.values() if pilot is not None})
    assert {run.state for run in runs.values()} == {"COMPLETED"}, runs
    assert site.barred() == {}
    return pilots, runs


@both_gateways
def test_accounts_stay_apart_and_limits_on_gpus_and_time_hold_for_groups(site: SiteCluster) -> None:
    """Two accounts on n1, a QOS with two GPUs for each user on n2 and n3, a longest time of two days on n4."""
    hep, astro = (site.pair("-p", "on1", f"--account={account}") for account in ("hep", "astro"))
    small = [job for _ in range(4) for job in site.pair("-p", "middle", "--qos=small")]
    bobs = site.submit("load", "-p", "middle", "--qos=small", user="bob")
    with site.partition_setting("on4", "maxtime=2-0", afterwards="maxtime=infinite"):
        long = site.submit("load", "-p", "on4", "--time=36:00:00")
        short = [job for _ in range(2) for job in site.pair("-p", "on4", "--time=20")]
        jobs = [*hep, *astro, *small, bobs, long, *short]
        site.cycles_until_ended(*jobs)
    pilots, runs = outcome(site, *jobs)

    def payers(*members: int) -> set[Payer]:
        return {runs[pilot].payer for pilot in {pilots[job] for job in members} if pilot is not None}

    assert (payers(*hep), payers(*astro)) == ({Payer("hep", "normal")}, {Payer("astro", "normal")})
    assert payers(*small) == {Payer("hep", "small")}
    assert most_gpus_at_once(run for run in runs.values() if run.payer.qos == "small" and run.user == "alice") == 2
    assert runs[bobs].start_s < max(runs[job].end_s for job in small), "the limit is each user's own"
    assert pilots[long] is None
    assert any(pilots[job] is not None for job in short)
    assert max(run.limit_min for run in runs.values()) <= TWO_DAYS_MIN


@both_gateways
def test_limits_on_jobs_maintenance_and_exclusive_nodes_hold(site: SiteCluster) -> None:
    """Two running jobs on n1, three submitted jobs on n2, maintenance in six hours on n3, an exclusive job on n4."""
    maintenance = ("nodes=n3", "starttime=now+6hours", "duration=60", "flags=maint", "user=root")
    with (
        site.qos("two", MaxJobsPerUser="2"),
        site.qos("few", MaxSubmitJobsPerUser="3"),
        site.reservation("service", *maintenance),
    ):
        two = [site.submit(kind, "-p", "on1", "--qos=two") for kind in STAGES[:3]]
        few = [site.submit(kind, "-p", "on2", "--qos=few") for kind in STAGES[:3]]
        long = site.submit("load", "-p", "on3", "--time=36:00:00")
        short = [site.submit(kind, "-p", "on3", "--time=20") for kind in STAGES]
        exclusive = site.submit("load", "-p", "on4", "--exclusive")
        beside = site.pair("-p", "on4")
        jobs = [*two, *few, *short, exclusive, *beside]
        site.cycles_until_ended(*jobs)
        waiting = site.driver.job(long)
        pilots, runs = outcome(site, *jobs)
    assert most_runs_at_once(runs[job] for job in two) == 2
    assert not any(pilots[job] for job in (*two, *few, exclusive))
    assert any(pilots[job] for job in short), "short jobs are grouped before the maintenance"
    assert waiting["JobState"] == "PENDING"
    assert not waiting["Licenses"].startswith("muri_gate")
    assert waiting["Reason"].startswith(("ReqNodeNotAvail", "Reservation", "Resources")), waiting["Reason"]
    assert site.controller_log().count(f"job {long}: released alone") == 1
    others = [run for run in runs.values() if run.nodes == "n4" and run.job_id != exclusive]
    assert all(run.end_s <= runs[exclusive].start_s or run.start_s >= runs[exclusive].end_s for run in others)


@both_gateways
def test_jobs_run_where_they_ask_to_and_no_gpu_is_promised_twice(site: SiteCluster) -> None:
    """Constraints, a reservation on n4, and a job that names n1 beside a group that wants the same GPU."""
    options = ("-p", "train", "--gres=gpu:1", "--constraint=h100", "--wrap=true")
    refusals = [site.driver.run("sbatch", *words, check=False) for words in (options, ("--muri", *options))]
    plain, marked = (refused.stderr.strip().splitlines()[-1] for refused in refusals)
    assert [refused.returncode for refused in refusals] == [1, 1]
    assert marked == plain == "sbatch: error: Batch job submission failed: Invalid feature specification"
    with site.reservation("res1", "nodes=n4", "users=alice", "starttime=now", "duration=60"):
        blocker = site.block("on1", gpus=1)
        named = site.submit("load", "-p", "on1", "--nodelist=n1")
        group = site.pair("-p", "on1")
        site.cycle()
        named_is_promised = "muri_gate" not in site.driver.job(named)["Licenses"]
        assert named_is_promised + len(site.pilots()) == 1
        reserved = [site.submit(kind, "--reservation=res1") for kind in STAGES[:3]]
        v100 = site.submit("load", "--constraint=v100")
        a100 = [site.submit("load", "--constraint=a100") for _ in range(2)]
        jobs = [named, *group, *reserved, v100, *a100]
        with site.controller():
            site.driver.wait_state(v100)
            site.driver.run("scancel", str(blocker), user="bob")
            for job in jobs:
                site.driver.wait_state(job)
        pilots, runs = outcome(site, *jobs)
    groups = {pilots[job] for job in reserved} - {None}
    assert {runs[job].nodes for job in (*reserved, *groups)} == {"n4"}
    assert groups
    assert runs[v100].nodes == "n3"
    assert {runs[job].nodes for job in a100} <= {"n1", "n2"}
    assert {runs[job].nodes for job in (named, *group)} == {"n1"}


def member_status(site: SiteCluster, pilot: int, job: int) -> dict[str, Any]:
    """Return the runtime's status of a member."""
    status = json.loads(site.driver.read(f"/run/muri/1001/pilot-{pilot}.json"))
    return dict(status["members"][str(job)])


def assert_asks_for_its_own(fields: dict[str, str]) -> None:
    assert "muri-state" not in fields["AdminComment"]
    assert "gres/gpu:1" in fields["TresPerNode"]


@both_gateways
def test_who_suspends_holds_or_cancels_the_jobs_of_a_group_is_obeyed(site: SiteCluster) -> None:
    driver = site.driver
    blocker = site.block("on1", gpus=1)
    kept = ("-p", "on1", "--open-mode=append")  # else a second run would empty the output of the first
    first, held, third, gone = group = [site.until_go(kind, *kept) for kind in STAGES]
    waiting = site.until_go("load", "-p", "on2")
    site.root("scontrol", "hold", str(waiting))
    with site.controller():
        site.wait_grouped(*group)
        pilots = {site.pilot(job) for job in group}
        (pilot,) = pilots
        assert pilot is not None

        def advances(job: int, iterations: int) -> None:
            wanted = member_status(site, pilot, job)["iterations"] + iterations
            driver.wait_until(lambda: member_status(site, pilot, job)["iterations"] >= wanted, f"training of {job}")

        for job in (first, gone):
            site.root("scontrol", "suspend", str(job))
            driver.wait_until(lambda job=job: member_status(site, pilot, job)["paused"], f"the pause of {job}")
        driver.run("scancel", str(gone), user="alice")
        assert driver.wait_state(gone)["JobState"] == "CANCELLED"
        group.remove(gone)
        before = member_status(site, pilot, first)["iterations"]
        advances(third, 20)
        assert member_status(site, pilot, first)["iterations"] <= before + 1
        site.root("scontrol", "resume", str(first))
        advances(first, 5)

        site.root("scontrol", "hold", str(held))
        advances(held, 5)
        driver.run("scancel", str(pilot), user="alice")
        driver.run("scancel", str(blocker), user="bob")
        driver.wait_until(lambda: "muri-state" not in driver.job(held)["AdminComment"], "the held job's own request")
        for job in group:
            said = site.output(job)
            assert f"pilot job {pilot}, which held the GPUs of its group, was cancelled" in said
            assert f"scancel {job}" in said
        for job in (first, third):
            driver.wait_state(job, "RUNNING")
        site.go()
        for job in (first, third):
            assert driver.wait_state(job)["JobState"] == "COMPLETED"
        for job in (held, waiting):
            fields = driver.job(job)
            assert (fields["JobState"], fields["Reason"]) == ("PENDING", "JobHeldAdmin")
            assert_asks_for_its_own(fields)
        for job in (held, waiting):
            site.root("scontrol", "release", str(job))
        assert {driver.wait_state(job)["JobState"] for job in (held, waiting)} == {"COMPLETED"}


DRAIN_WITHOUT_READER = """
from muri.slurm_plugin.controller.assemble import open_gateway, read_config
from muri.slurm_plugin.execute.gate import drain

def read():
    raise SystemExit(7)

drain(open_gateway(read_config(None).gateway), read)
"""


@pytest.mark.parametrize("gateway", ["command"])
def test_a_drain_ends_the_lease_before_it_looks_at_the_queue(site: SiteCluster) -> None:
    blocker = site.block("on1", gpus=2)
    jobs = site.pair("-p", "on1")
    site.cycle()
    assert site.python(DRAIN_WITHOUT_READER, check=False).returncode == 7
    assert "muri_gate" not in site.root("scontrol", "show", "reservation")
    assert all("muri_gate" in site.driver.job(job)["Licenses"] for job in jobs)
    site.driver.run("scancel", str(blocker), user="bob")
    assert {site.driver.wait_state(job)["JobState"] for job in jobs} == {"COMPLETED"}


@pytest.mark.parametrize("gateway", ["command"])
def test_jobs_of_a_killed_controller_start_when_the_lease_ends(site: SiteCluster) -> None:
    """Priorities hold while they wait; members get their --signal later, as docs/security.md says."""
    driver = site.driver
    site.configure(lease_s=30)
    signal = ("--time=2", "--signal=B:USR1@119")
    blocker, one_gpu = site.block("on1", gpus=2), site.block("on2", gpus=1)
    waiting = site.pair("-p", "on1")
    ordinary = driver.submit("-p", "on1", "--gres=gpu:2", "--wrap=true")
    group = [site.until_go(kind, "-p", "on2", *signal) for kind in STAGES]
    alone = driver.submit(
        "-p", "on3", "--gres=gpu:1", "--muri=model=load,batch-size=8,alone", *signal, "/home/alice/until_go.sh", "load"
    )

    def signalled(job: int) -> bool:
        return driver.run("test", "-e", f"usr1.{job}", check=False).returncode == 0

    with site.controller():
        site.wait_grouped(*group, alone)
        status = json.loads(driver.read(f"{site.state_dir}/status.json"))
        assert status["policy"] == "muri-slurm"
        fields = {job: driver.job(job) for job in (*waiting, ordinary)}
        assert all(each["AccrueTime"] == each["SubmitTime"] for each in fields.values())
        assert all(int(each["Priority"]) >= int(fields[ordinary]["Priority"]) for each in fields.values())
        site.root("sh", "-c", f"kill -9 $(cat {site.state_dir}/controller.lock)")
    assert [driver.job(job)["TimeLimit"] for job in group] == ["00:08:00"] * 4
    site.root("scontrol", "update", f"jobid={group[0]}", "timelimit=2")
    site.root("scontrol", "update", "reservationname=muri_gate", "endtime=now+5")  # half a minute is over sooner
    (lease_end,) = re.findall(r"EndTime=(\S+)", site.root("scontrol", "show", "reservation", "muri_gate"))
    for job in (blocker, ordinary):
        site.root("scancel", str(job))
    assert all("muri_gate" in driver.job(job)["Licenses"] for job in waiting)
    for job in waiting:
        fields = driver.wait_state(job)
        assert fields["JobState"] == "COMPLETED"
        assert fields["StartTime"] >= lease_end
    driver.wait_until(lambda: signalled(alone) and signalled(group[0]), "the signals before limits of two minutes")
    assert not any(map(signalled, group[1:])), "where the limit has grown, the signal comes later"
    site.go()
    assert {driver.wait_state(job)["JobState"] for job in (*group, alone)} == {"COMPLETED"}
    driver.run("scancel", str(one_gpu), user="bob")


@pytest.mark.parametrize("gateway", [GATEWAY])
def test_every_gpu_second_is_billed_to_the_account_and_qos_of_who_asked_for_it(site: SiteCluster) -> None:
    """Groups of two accounts and two QOS, jobs alone, one requeued, and members whose pilot job was cancelled."""
    driver = site.driver
    with site.qos("urgent", Priority="1000"):
        blockers = [site.block("on1", gpus=1), site.block("on1", gpus=1), site.block("on3", gpus=1)]
        astro, normal = "--account=astro", [*site.pair("-p", "on1"), *site.pair("-p", "on1")]
        urgent = site.pair("-p", "on1", "--qos=urgent")
        broken = [site.until_go(kind, "-p", "on3", astro) for kind in ("load", "propagate")]
        alone_mark = "--muri=model=load,batch-size=8,duration=60s,alone"  # else a pilot job would have its GPU at first
        requeued = site.until_go("load", "-p", "on4", alone_mark)
        astros = [job for qos in ("normal", "urgent") for job in site.pair("-p", "on2", astro, f"--qos={qos}")]
        ordinary = driver.submit("-p", "on4", "--gres=gpu:1", astro, "--wrap=sleep 1", user="bob")
        jobs = [*normal, *urgent, *broken, requeued, *astros, ordinary]
        with site.controller():
            site.wait_grouped(*broken, requeued)
            pilot = site.pilot(broken[0])
            driver.run("scancel", str(pilot), user="alice")
            site.root("scontrol", "requeue", str(requeued))
            for blocker in blockers[1:]:  # one GPU of n1 remains theirs: who goes first there?
                driver.run("scancel", str(blocker), user="bob")
            for job in (*broken, requeued):
                driver.wait_until(lambda job=job: driver.job(job)["Restarts"] == "1", "the second run")
            site.go()
            for job in jobs:
                driver.wait_state(job)
        driver.run("scancel", str(blockers[0]), user="bob")
        pilots = {job: group for job in jobs if (group := site.pilot(job)) is not None} | dict.fromkeys(broken, pilot)
        found = complete_records(driver, *jobs, *blockers, *set(pilots.values()))
        everything = {run.job_id for run in records(driver) if run.job_id >= min(blockers)}
    assert everything == {run.job_id for run in found}
    payers = {job: Payer("hep", "normal") for job in (*normal, requeued, *blockers)}
    payers |= dict.fromkeys(urgent, Payer("hep", "urgent")) | dict.fromkeys(astros[2:], Payer("astro", "urgent"))
    payers |= dict.fromkeys((*broken, *astros[:2], ordinary), Payer("astro", "normal"))
    payers |= {group: payers[job] for job, group in pilots.items()}
    assert {run.job_id: run.payer for run in found} == payers
    groups = [run for run in found if run.job_id in pilots.values()]
    alone = [run for run in found if run.job_id not in pilots.values() and run.gpus]
    assert gpu_seconds(found) == gpu_seconds(groups) + gpu_seconds(alone)
    assert all(gpu_seconds(groups)[payer] for payer in set(payers.values()))
    assert Counter(run.job_id for run in alone)[requeued] == 2
    for run in found:
        if not run.gpus and run.job_id not in broken:  # a member: its GPU is billed, all the time
            group = next(each for each in groups if each.job_id == pilots[run.job_id])
            assert group.start_s <= run.start_s
            assert run.end_s <= group.end_s
    for node in ("n1", "n2", "n3", "n4"):
        assert most_gpus_at_once(run for run in found if run.nodes == node) <= 2, "no GPU is billed twice"
    first, second = (min(run.start_s for run in groups if run.job_id == pilots[job[0]]) for job in (urgent, normal))
    assert first < second, "the higher QOS goes first, though it was submitted later"


def seen(driver: Driver, gateway: str = "auto") -> View:
    """The queue and the limits as Muri reads them."""
    driver.write("/root/muri.yaml", f"gateway: {gateway}\n", user="root")
    taken = driver.run("muri", "plan", "--save=-", "--config=/root/muri.yaml", user="root")
    return view_of(parse_snapshot(taken.stdout))


@contextmanager
def setting(driver: Driver, qos: str, name: str, value: str) -> Iterator[None]:
    """Within, a QOS has a limit."""

    def change(to: str) -> None:
        driver.run("sacctmgr", "--immediate", "modify", "qos", qos, "set", f"{name}={to}", user="root")

    change(value)
    try:
        yield
    finally:
        change("-1")


@pytest.mark.parametrize(
    ("fixture", "gateway"),
    [("accounting_sandbox", "command"), ("accounting_sandbox", "pyslurm"), ("old_accounting_sandbox", "command")],
)
def test_limits_are_read(fixture: str, gateway: str, request: pytest.FixtureRequest) -> None:
    limits = seen(request.getfixturevalue(fixture), gateway).snapshot.limits
    qos = {each.name: each.limits for each in limits.qos}
    assert (limits.enforced, limits.why_unknown) == (True, "")
    assert qos["short"].max_wall_s == 3600
    assert qos["small"].max_tres_per_user == (Tres("gres/gpu", 2),)
    assert {"main", "train"} <= {each.name for each in limits.partitions}
    assert Association("hep", parent="root") in limits.associations
    assert Association("hep", "alice") in limits.associations


def test_slurm_and_muri_agree_who_has_no_room(accounted: Driver) -> None:
    """Both see the same jobs wait for a limit of their QOS, and others not."""
    with setting(accounted, "short", "MaxJobsPerUser", "1"):
        jobs = [accounted.submit("--qos=small", "--gres=gpu:1", "--wrap=sleep 600") for _ in range(3)]
        jobs += [accounted.submit("--qos=short", "--time=5", "--wrap=sleep 600") for _ in range(2)]
        jobs += [accounted.submit("--qos=small", "--gres=gpu:1", "--wrap=sleep 600", user="bob")]
        accounted.wait_until(lambda: is_limit_reason(accounted.job(jobs[2])["Reason"]), "the limit on GPUs")
        accounted.wait_until(lambda: is_limit_reason(accounted.job(jobs[4])["Reason"]), "the limit on jobs")
        accounted.wait_state(jobs[5], "RUNNING")
        view = seen(accounted)
        room = SiteRoom(view)
        waiting = {job_id for job_id in jobs if view.jobs[job_id].state == "PENDING"}
        assert waiting == {jobs[2], jobs[4]}
        assert room.why_no_room(view.jobs[jobs[2]]) == (
            "QOS small allows 2 GPUs for each user (MaxTRESPerUser), alice would have 3"
        )
        assert room.why_no_room(view.jobs[jobs[4]]) == (
            "QOS short allows 1 running jobs for each user (MaxJobsPerUser), alice would have 2"
        )


def test_slurms_refusal_for_a_limit_is_known_as_one(accounted: Driver) -> None:
    with setting(accounted, "small", "MaxSubmitJobsPerUser", "1"):
        accounted.submit("--qos=small", "--hold", "--wrap=true")
        with pytest.raises(CommandError) as refused:
            accounted.submit("--qos=small", "--hold", "--wrap=true")
    assert "QOSMaxSubmitJobPerUserLimit" in str(refused.value)
    assert is_limit_refusal(str(refused.value))
