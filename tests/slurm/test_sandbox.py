"""The sandbox is a real Slurm: jobs run, GPUs are handed out, instances don't disturb each other."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from polling import until
from sandboxes import NO_PYSLURM, start

from sandbox import daemons, instance, lifecycle, namespace
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import CHECKOUT, InstancePaths, Progress, StartError

COMMAND = str(CHECKOUT / "bin/muri-sandbox")


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=240)


@contextmanager
def one_more(kind: str, shape: Shape) -> Iterator[Driver]:
    """Start another sandbox; take it down at the end."""
    yield from start("forky", shape, kind)


def mounts_of_host() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_users_are_themselves(cluster: Driver) -> None:
    assert cluster.run("id", "--user", user="alice").stdout == "1001\n"
    assert cluster.run("id", "--user", user="bob").stdout == "1002\n"
    cluster.write("private", "x", user="alice", mode="0600")
    assert cluster.run("cat", "/home/alice/private", user="bob", check=False).returncode != 0


def test_run_passes_the_exit_code_on(sandbox: Driver) -> None:
    assert cli("run", "--name", sandbox.instance.name, "--", "sh", "-c", "exit 7").returncode == 7


def test_command_ends_with_the_process_that_runs_it(sandbox: Driver) -> None:
    process = sandbox.popen("sleep", "4711")
    running = ("pgrep", "--full", "^sleep 4711")
    sandbox.wait_until(lambda: sandbox.run(*running, check=False).returncode == 0, "the start of sleep")
    process.terminate()
    process.communicate(timeout=240)
    sandbox.wait_until(lambda: sandbox.run(*running, check=False).returncode == 1, "the end of sleep")


def test_the_key_of_the_cluster_is_secret(sandbox: Driver) -> None:
    plan = InstancePaths(sandbox.instance.name).plan
    assert plan.exists()
    for path in ("/etc/slurm/slurm.key", str(plan)):
        assert sandbox.run("cat", path, user="alice", check=False).returncode != 0


def test_nobody_but_root_reads_the_database(accounting_sandbox: Driver) -> None:
    query = ("mariadb", "--execute", "SHOW TABLES", "slurm_acct_db")
    assert "acct_table" in accounting_sandbox.run(*query, user="root").stdout
    assert accounting_sandbox.run(*query, user="alice", check=False).returncode != 0
    assert accounting_sandbox.run("cat", "/etc/slurm/slurmdbd.conf", user="alice", check=False).returncode != 0


def test_up_again_says_so(sandbox: Driver) -> None:
    done = cli("up", "--name", sandbox.instance.name)
    assert done.returncode == 0
    assert "already up" in done.stdout


def test_status_as_json(sandbox: Driver) -> None:
    document = json.loads(cli("status", "--json", "--name", sandbox.instance.name).stdout)
    assert document["up"] is True
    assert (document["nodes"], document["gpus_per_node"]) == (4, 2)


def test_second_instance_runs_beside_and_leaves_nothing(sandbox: Driver) -> None:
    before = mounts_of_host()
    with one_more("second", Shape(nodes=1, gpus_per_node=1)) as second:
        assert second.run("sinfo", "--noheader", "--format=%N").stdout == "n1\n"
        job = second.submit("--wrap=sleep 60")
        second.wait_state(job, "RUNNING")
        assert mounts_of_host() == before
    assert namespace.start_ticks(second.instance.pid) is None
    assert not InstancePaths(second.instance.name).directory.exists()
    assert mounts_of_host() == before
    assert sandbox.run("sinfo", "--noheader", "--format=%N").stdout == "n[1-4]\n"


def test_a_slurmd_that_ended_is_started_again_and_one_that_cannot_start_is_named() -> None:
    with one_more("revived", Shape(nodes=2)) as driver:
        end_n2 = ("pkill", "-KILL", "--exact", "--full", "slurmd -N n2")
        driver.run(*end_n2, user="root")
        driver.run("scontrol", "update", "nodename=n2", "state=down", "reason=test", user="root")
        daemons.wait_until_idle(driver.instance, Progress())
        job = driver.submit("--nodelist=n2", "--wrap=true")
        assert driver.wait_state(job)["JobState"] == "COMPLETED"
        driver.run(*end_n2, user="root")
        if driver.instance.slurm_version < "25.05":
            pytest.skip("a slurmd of Slurm 24.05 makes no socket that could be in its way")
        # A socket that cannot be removed has the same end as two slurmds that bind it at the same time.
        driver.run("sh", "-c", "rm /run/slurm/sack.socket && mkdir -p /run/slurm/sack.socket/x", user="root")
        with pytest.raises(StartError, match=r"(?s)slurmd of n2 ended 3 times.*slurmd-n2.log.*sack\.socket"):
            daemons.ensure_slurmd(driver.instance, "n2", Progress())


def test_a_wait_in_vain_names_the_nodes_their_states_and_reasons(cluster: Driver) -> None:
    change = ("scontrol", "update", "nodename=n3")
    cluster.run(*change, "state=drain", "reason=fan broken", user="root")
    try:
        with pytest.raises(StartError, match=r"(?s)n3 is drained \(fan broken\)\n.*slurmd-n3\.log"):
            daemons.wait_until_idle(cluster.instance, Progress(), deadline_s=0.2)
    finally:
        cluster.run(*change, "state=resume", user="root")


def test_build_says_what_is_there(sandbox: Driver) -> None:
    done = cli("build", "--suite", sandbox.instance.suite)
    assert done.returncode == 0, done.stderr
    pyslurm = f"without pyslurm: {NO_PYSLURM}" if NO_PYSLURM else "with pyslurm"
    assert done.stdout == f"{sandbox.instance.suite}: Slurm {sandbox.instance.slurm_version}, {pyslurm}.\n"


@pytest.mark.usefixtures("sandbox")
def test_interrupted_up_cleans_up() -> None:
    name = f"interrupted-{os.getpid()}"
    process = subprocess.Popen([COMMAND, "up", "--name", name, "--nodes", "32"], stderr=subprocess.PIPE, text=True)
    until(lambda: instance.load(name) is not None, "the record of the instance", 60)
    started = instance.load(name)
    assert started is not None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130, stderr
    assert not started.alive
    assert not InstancePaths(name).directory.exists()


@pytest.mark.usefixtures("sandbox")
def test_down_finds_what_a_killed_up_left_unrecorded() -> None:
    name = f"unrecorded-{os.getpid()}"
    started, _ = lifecycle.up(name, SUITES["forky"], Shape(nodes=1), Progress())
    InstancePaths(name).state.unlink()  # as if `up` had been killed before writing it
    done = cli("down", "--name", name)
    assert done.returncode == 0, done.stderr
    assert not started.alive
    assert not InstancePaths(name).directory.exists()
