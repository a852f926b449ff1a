"""Where Muri keeps its files on a real Slurm, what another user can do to them, and what PrivateData hides."""

import configparser
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from muri_cluster import STAGES, MuriCluster

from sandbox.driver import Driver

SQUATTED = "/tmp/muri-1001"  # The name that alice's run directory would have in /tmp


@pytest.fixture
def squatted(one_gpu: Driver) -> Iterator[None]:
    """Bob has made alice's directory in /tmp, where everybody can enter it."""
    one_gpu.run("sh", "-c", f"mkdir {SQUATTED} && chmod 777 {SQUATTED}", user="bob")
    yield
    one_gpu.run("rm", "-r", SQUATTED, user="root")


def modes(driver: Driver, *places: str) -> list[str]:
    return driver.run("stat", "-c", "%U %a", *places, user="root").stdout.splitlines()


@pytest.mark.usefixtures("squatted")
def test_groups_meet_in_a_directory_that_root_made_for_their_user(muri: MuriCluster) -> None:
    with muri.training():
        jobs, pilot = muri.start_group(*STAGES[:2])
    log = f"/run/muri/1001/pilot-{pilot}.log"
    assert modes(muri.driver, "/run/muri", "/run/muri/1001") == ["root 755", "alice 700"]
    assert f"serving members {jobs[0]}, {jobs[1]} in /run/muri/1001" in muri.driver.read(log)
    assert [muri.driver.wait_state(job)["JobState"] for job in jobs] == ["COMPLETED"] * 2
    assert all(muri.driver.job(job)["Restarts"] == "0" for job in jobs)


@pytest.fixture
def no_run_dirs(one_gpu: Driver) -> Iterator[None]:
    """As on a node without the SPANK plugin: root makes no directory for anybody."""
    one_gpu.run("sh", "-c", "rm -rf /run/muri && touch /run/muri", user="root")
    yield
    one_gpu.run("rm", "/run/muri", user="root")


@pytest.mark.usefixtures("no_run_dirs", "squatted")
def test_a_directory_that_another_user_took_sends_jobs_back_and_fails_none(muri: MuriCluster) -> None:
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=20) for kind in STAGES[:2]]
    fields = muri.cycles_until_ended(*jobs)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    assert all("gres/gpu:1" in job["TresPerNode"] for job in fields.values())  # alone, with their own request
    assert all(muri.output(job).count("started") == 1 for job in jobs)


def test_users_learn_about_their_own_jobs_and_read_nothing_else(muri: MuriCluster) -> None:
    muri.know_profiles()
    muri.driver.submit("-p", "train", "--gres=gpu:1", "--wrap=sleep 60")
    job, bobs = muri.submit("load"), muri.submit("propagate", user="bob")
    muri.cycle()
    status = f"{muri.state_dir}-status"
    places = (muri.state_dir, f"{muri.state_dir}/journal.db", status, f"{status}/1001.json", f"{status}/1002.json")
    assert modes(muri.driver, *places) == ["root 700", "root 600", "root 755", "root 440", "root 440"]
    own = json.loads(muri.driver.run("cat", f"{status}/1001.json", user="alice").stdout)
    assert [told["job_id"] for told in own["jobs"]] == [job]
    assert muri.driver.run("cat", f"{status}/1002.json", user="alice", check=False).returncode != 0
    assert set(muri.queue()) == {job, bobs}  # what Slurm itself shows
    said = [muri.driver.run("muri", "explain", str(number), user="alice").stdout for number in (job, bobs)]
    assert "GPU" in said[0]
    assert "only bob and administrators may see why" in said[1]


def rights_of(unit: str) -> tuple[str, ...]:
    """The command line that takes every right away which a systemd unit does not leave."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.read(Path(__file__).parents[2] / "etc" / "systemd" / f"{unit}.service")
    kept = parser["Service"]["CapabilityBoundingSet"].lower().replace("cap_", "+").split()
    return ("setpriv", "--no-new-privs", "--bounding-set", ",".join(["-all", *kept]))


def test_the_units_leave_the_rights_that_a_cycle_and_the_watchdog_need(muri: MuriCluster) -> None:
    muri.know_profiles()
    with muri.training():
        jobs = [muri.submit(kind, iterations=20) for kind in STAGES[:2]]
        muri.driver.run(*rights_of("muri-controller"), "muri-controller", "--once", user="root")
        assert modes(muri.driver, f"{muri.state_dir}-status/1001.json") == ["root 440"]
        muri.wait_grouped(*jobs)
    held, new = muri.submit("preprocess"), muri.submit("unknown")
    muri.driver.run(*rights_of("muri-controller"), "muri-controller", "--once", user="root")  # submits a dry run, too
    released = muri.driver.run(*rights_of("muri-watchdog"), "muri", "drain", "--json", user="root").stdout
    assert set(json.loads(released)["released"]) <= {held, new}
    assert [muri.driver.wait_state(job)["JobState"] for job in (*jobs, held, new)] == ["COMPLETED"] * 4


EVERYTHING = "accounts,events,jobs,nodes,reservations,usage,users"


@contextmanager
def private_data(driver: Driver, kinds: str) -> Iterator[None]:
    before = driver.read("/etc/slurm/slurm.conf")
    driver.write("/etc/slurm/slurm.conf", f"{before}\nPrivateData={kinds}\n", user="root", mode="0644")
    driver.reconfigure()
    try:
        yield
    finally:
        driver.write("/etc/slurm/slurm.conf", before, user="root", mode="0644")
        driver.reconfigure()


@pytest.mark.parametrize(
    ("kinds", "gateway"),
    [
        (EVERYTHING, "auto"),
        *(
            pytest.param(*other, marks=pytest.mark.thorough)
            for other in (("jobs", "auto"), ("jobs", "command"), (EVERYTHING, "command"))
        ),
    ],
)
def test_commands_show_own_jobs_and_nothing_of_others(accounted: Driver, kinds: str, gateway: str) -> None:
    with private_data(accounted, kinds), ExitStack() as kept_at_work:
        muri = MuriCluster(accounted)
        muri.configure(gateway=gateway)
        muri.know_profiles()
        for user in ("alice", "bob"):
            kept_at_work.enter_context(muri.training(user=user))
        own = [muri.submit(kind) for kind in ("load", "propagate")]
        others = [muri.submit("load", "--job-name=secret-name", user="bob") for _ in range(2)]
        muri.cycle()
        muri.wait_grouped(*own)
        for user, seen, hidden in (("alice", own, others), ("bob", others, own)):
            shown = muri.driver.run("muri", "queue", "--json", user=user)
            assert shown.stderr == ""
            assert [job["job_id"] for job in json.loads(shown.stdout)["jobs"]] == seen
            texts = [shown.stdout, muri.driver.run("muri", "queue", user=user).stdout]
            for command in ("explain", "preempt"):
                refused = muri.driver.run("muri", command, str(hidden[0]), user=user, check=False)
                assert refused.returncode == 2
                assert "Traceback" not in refused.stderr
                texts.append(refused.stderr.replace(f"job {hidden[0]}", ""))
            texts.append(muri.driver.run("muri", "explain", str(seen[0]), user=user).stdout)
            top = muri.driver.run("muri", "top", "--once", user=user, check=False)
            assert "Traceback" not in top.stderr
            if user == "alice":
                assert "secret-name" not in "".join((*texts, top.stdout))
            told = re.compile(rf"\bjobs? (\d+, )*({'|'.join(map(str, hidden))})\b")
            assert not [text for text in texts if told.search(text)]
            taken = muri.driver.run("muri", "plan", "--save", "-", user=user, check=False)
            assert "Traceback" not in taken.stderr
            if taken.returncode == 0:
                assert {job["job_id"] for job in json.loads(taken.stdout)["jobs"]}.isdisjoint(hidden)
        everything = json.loads(muri.driver.run("muri", "queue", "--json", user="root").stdout)
        assert {job["job_id"] for job in everything["jobs"]} == {*own, *others}
        muri.driver.cancel_all()
