"""A login host: no state directory, no status files, no run directories, no configuration; Slurm's records suffice."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import on_sites
from muri_cluster import STAGES, MuriCluster

from muri.profiler.records import ProfileKey
from sandbox.driver import Driver

_HIDE = """
for place in /etc/muri /run/muri /var/lib; do
    if [ -d $place ]; then mount -t tmpfs -o mode=0755 none $place; fi
done
user=$1; shift
exec setpriv --reuid "$user" --regid "$user" --init-groups --inh-caps=-all "$@"
"""


def on_login_host(driver: Driver, *command: str, user: str = "alice", check: bool = True) -> Any:
    """Run a command where Muri has left nothing: in a mount namespace with empty directories in their place."""
    line = ("unshare", "--mount", "sh", "-ec", _HIDE, "sh", user, *command)
    return driver.run(*line, user="root", chdir="/", check=check)


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    muri = MuriCluster(one_gpu)
    muri.know_profiles()
    return muri


@contextmanager
def running_group(muri: MuriCluster, kinds: Sequence[str]) -> Iterator[tuple[list[int], int]]:
    """Two members at work, of which their pilot job has reported; their ids and the pilot's."""
    jobs = [muri.submit(kind, iterations=2000) for kind in kinds]
    muri.cycle()
    muri.wait_grouped(*jobs)
    (pilot,) = muri.hosts()
    muri.driver.wait_until(lambda: all(muri.queue()[job]["measured_speed"] for job in jobs), "measured speeds")
    yield jobs, pilot
    muri.driver.run("scancel", *map(str, jobs), user="alice")
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the pilot job")


def test_a_group_is_told_from_slurms_records(muri: MuriCluster) -> None:
    with running_group(muri, ("load", "propagate")) as (jobs, pilot):
        waiting = muri.submit("preprocess", "--hold")
        late = muri.submit("synchronize")
        done = on_login_host(muri.driver, "muri", "queue", "--json")
        assert done.stderr == ""
        status = json.loads(done.stdout)
        shown = {job["job_id"]: job for job in status["jobs"]}
        assert status["cycle_s"] == 0
        for job, partner in (jobs, jobs[::-1]):
            told = shown[job]
            assert (told["state"], told["group"], told["partners"]) == ("interleaved", pilot, [partner])
            assert 0 < told["predicted_speed"] <= 1
            assert told["measured_speed"]
            assert any("γ" in reason for reason in told["reasons"])
        assert shown[waiting]["state"] == "user-held"
        table = on_login_host(muri.driver, "muri", "queue").stdout
        assert "no controller has left its plans on this machine" in table
        explained = on_login_host(muri.driver, "muri", "explain", str(jobs[0])).stdout
        assert f"It shares the GPUs of pilot job {pilot} with {jobs[1]}." in explained
        assert "planned" in explained
        assert "γ" in explained
        assert "Milliseconds per iteration" in explained
        why = on_login_host(muri.driver, "muri", "explain", str(late)).stdout
        assert "Slurm's reason is" in why
        assert f"`muri explain {late}` there tells more" in why
        top = on_login_host(muri.driver, "muri", "top", "--once")
        assert top.stderr == ""
        assert "No group runs on this host" in top.stdout
        assert f"Group of pilot job {pilot} on n1: " in top.stdout
        assert max(map(len, top.stdout.splitlines())) <= 80
        (group,) = json.loads(on_login_host(muri.driver, "muri", "top", "--json").stdout)
        assert set(group["members"]) == set(map(str, jobs))
        nobody = on_login_host(muri.driver, "muri", "top", user="bob", check=False)
        assert (nobody.returncode, nobody.stdout) == (1, "")


def test_a_job_alone_says_why(muri: MuriCluster) -> None:
    job = muri.submit("load", iterations=2000)
    muri.configure(policy="fifo")
    muri.cycle()
    muri.driver.wait_state(job, "RUNNING")
    here = muri.driver.run("muri", "explain", str(job), user="root").stdout
    there = on_login_host(muri.driver, "muri", "explain", str(job)).stdout
    assert [line for line in there.splitlines() if line.startswith("- ")] == [
        line for line in here.splitlines() if line.startswith("- ")
    ]
    assert "muri-plan:" in muri.driver.run("scontrol", "show", "job", str(job)).stdout


def test_a_killed_pilot_is_no_group_and_its_successor_tidies_up(muri: MuriCluster) -> None:
    with running_group(muri, ("load", "propagate")) as (jobs, pilot):
        status = f"/run/muri/1001/host-{pilot}.json"
        runtime = json.loads(muri.driver.read(status))["pid"]
        muri.driver.run("pkill", "-KILL", "-f", f"muri.slurm_plugin.node.pilot.*{jobs[0]}", user="root")
        muri.driver.run("kill", "-KILL", str(runtime), user="root", check=False)
        muri.driver.wait_state(pilot)
        muri.driver.wait_until(
            lambda: muri.driver.run("muri", "top", "--once", user="alice", check=False).returncode == 1, "an empty top"
        )
        assert muri.driver.run("test", "-e", status, user="root", check=False).returncode == 0
        muri.driver.run("scancel", *map(str, jobs), user="alice")
        muri.driver.run("touch", "--date=1 minute ago", status, user="root")  # Slurm is not asked about younger ones
        with running_group(muri, ("load", "propagate")):
            assert muri.driver.run("test", "-e", status, user="root", check=False).returncode == 1


@on_sites("forky", "trixie")
def test_a_sites_login_host_tells_of_a_group(site: Driver) -> None:
    """A host of its own, with neither pyslurm nor anything that a controller or a node has written."""
    muri = MuriCluster(site)
    for slow in STAGES:
        muri.know_profile(ProfileKey(slow, 8, 1, "tesla"), [0.07 if stage == slow else 0.01 for stage in STAGES])
    other = site.submit("-p", "train", "--gres=gpu:1", "--wrap=exec sleep 600", user="bob", on="login")
    site.wait_state(other, "RUNNING")
    with running_group(muri, ("load", "propagate")) as (jobs, pilot):
        told = site.run("muri", "queue", "--json", on="login")
        assert told.stderr == ""
        shown = {job["job_id"]: job for job in json.loads(told.stdout)["jobs"]}
        assert [shown[job]["group"] for job in jobs] == [pilot, pilot]
        assert [shown[job]["partners"] for job in jobs] == [[jobs[1]], [jobs[0]]]
        assert all(shown[job]["predicted_speed"] and shown[job]["measured_speed"] for job in jobs)
        assert "γ" in site.run("muri", "explain", str(jobs[0]), on="login").stdout
        assert f"Group of pilot job {pilot} on n1" in site.run("muri", "top", "--once", on="login").stdout
