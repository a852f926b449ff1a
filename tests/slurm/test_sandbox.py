"""The sandbox is a real Slurm: jobs run, GPUs are handed out, instances don't disturb each other."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from polling import until

from sandbox import daemons, instance, lifecycle, namespace
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.support import CHECKOUT, InstancePaths, Progress, StartError

COMMAND = str(CHECKOUT / "bin/muri-sandbox")


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=240)


def mounts_of_host() -> str:
    return Path("/proc/self/mountinfo").read_text()


def test_jobs_get_distinct_gpus(cluster: Driver) -> None:
    script = "#!/bin/sh\necho gpu=$CUDA_VISIBLE_DEVICES node=$SLURMD_NODENAME\nsleep 2\n"
    path = cluster.write("gpu.sh", script)
    jobs = [cluster.submit("--gres=gpu:1", "--nodelist=n2", f"--output=g{i}.out", path) for i in range(2)]
    for job in jobs:
        assert cluster.wait_state(job)["JobState"] == "COMPLETED"
    lines = sorted(cluster.read(f"/home/alice/g{i}.out").strip() for i in range(2))
    assert lines == ["gpu=0 node=n2", "gpu=1 node=n2"]


def test_exit_code_of_a_job_is_its_own(cluster: Driver) -> None:
    job = cluster.submit("--wrap=exit 3")
    fields = cluster.wait_state(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", "3:0")


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


def test_pyslurm_reads_the_jobs(cluster: Driver) -> None:
    assert cluster.instance.pyslurm, cluster.instance.pyslurm_reason
    job = cluster.submit("--hold", "--wrap=true")
    code = f"import pyslurm; print(pyslurm.Jobs.load()[{job}].user_name)"
    assert cluster.run("python3", "-c", code, user="root").stdout == "alice\n"


def test_member_starts_beside_its_host_without_a_gpu(cluster: Driver) -> None:
    host = cluster.submit("--gres=gpu:2", "--nodelist=n3", "--wrap=sleep 30")
    cluster.wait_state(host, "RUNNING")
    member = cluster.submit("--hold", "--gres=gpu:1", "--output=m.out", "--wrap=echo gpu=$CUDA_VISIBLE_DEVICES")
    change = ["TresPerNode=gres/gpu:0", "ReqNodeList=n3"]
    cluster.run("scontrol", "update", f"jobid={member}", *change, user="root")
    cluster.run("scontrol", "release", str(member), user="root")
    fields = cluster.wait_state(member)
    assert (fields["JobState"], fields["NodeList"]) == ("COMPLETED", "n3")
    assert cluster.read("/home/alice/m.out") == "gpu=\n"


def test_jobs_survive_a_restart_of_the_controller(cluster: Driver) -> None:
    job = cluster.submit("--hold", "--comment=kept", "--wrap=true")
    cluster.restart_controller()
    assert cluster.job(job)["Comment"] == "kept"
    cluster.run("scontrol", "release", str(job))
    assert cluster.wait_state(job)["JobState"] == "COMPLETED"


def test_up_again_says_so(sandbox: Driver) -> None:
    done = cli("up", "--name", sandbox.instance.name)
    assert done.returncode == 0
    assert "already up" in done.stdout


def test_status_as_json(sandbox: Driver) -> None:
    document = json.loads(cli("status", "--json", "--name", sandbox.instance.name).stdout)
    assert document["up"] is True
    assert (document["nodes"], document["gpus_per_node"]) == (4, 2)


def test_second_instance_runs_beside_and_leaves_nothing(sandbox: Driver) -> None:
    name, before = f"second-{os.getpid()}", mounts_of_host()
    started, fresh = lifecycle.up(name, SUITES["forky"], Shape(nodes=1, gpus_per_node=1), Progress())
    try:
        second = Driver(started)
        assert fresh
        assert second.run("sinfo", "--noheader", "--format=%N").stdout == "n1\n"
        job = second.submit("--wrap=sleep 60")
        second.wait_state(job, "RUNNING")
        assert mounts_of_host() == before
    finally:
        lifecycle.down(name, Progress())
    assert namespace.start_ticks(started.pid) is None
    assert not InstancePaths(name).directory.exists()
    assert mounts_of_host() == before
    assert sandbox.run("sinfo", "--noheader", "--format=%N").stdout == "n[1-4]\n"


@pytest.mark.usefixtures("sandbox")  # so that the cached build is there
def test_a_slurmd_that_ended_is_started_again_and_one_that_cannot_start_is_named() -> None:
    name = f"revived-{os.getpid()}"
    started, _ = lifecycle.up(name, SUITES["forky"], Shape(nodes=2), Progress())
    try:
        driver = Driver(started)
        end_n2 = ("pkill", "-KILL", "--exact", "--full", "slurmd -N n2")
        driver.run(*end_n2, user="root")
        driver.run("scontrol", "update", "nodename=n2", "state=down", "reason=test", user="root")
        daemons.wait_until_idle(started, Progress())
        job = driver.submit("--nodelist=n2", "--wrap=true")
        assert driver.wait_state(job)["JobState"] == "COMPLETED"
        driver.run(*end_n2, user="root")
        # A socket that cannot be removed has the same end as two slurmds that bind it at the same time.
        driver.run("sh", "-c", "rm /run/slurm/sack.socket && mkdir -p /run/slurm/sack.socket/x", user="root")
        with pytest.raises(StartError, match=r"(?s)slurmd of n2 ended 3 times.*slurmd-n2.log.*sack\.socket"):
            daemons.ensure_slurmd(started, "n2", Progress())
    finally:
        lifecycle.down(name, Progress())


def test_a_wait_in_vain_names_the_nodes_their_states_and_reasons(cluster: Driver) -> None:
    change = ("scontrol", "update", "nodename=n3")
    cluster.run(*change, "state=drain", "reason=fan broken", user="root")
    try:
        with pytest.raises(StartError, match=r"(?s)n3 is drained \(fan broken\)\n.*slurmd-n3\.log"):
            daemons.wait_until_idle(cluster.instance, Progress(), deadline_s=0.2)
    finally:
        cluster.run(*change, "state=resume", user="root")


def test_build_starts_nothing(sandbox: Driver) -> None:
    def unnumbered() -> list[str]:
        """Names of sandboxes without the process id that those of tests end with; other tests run meanwhile."""
        return [name for name in instance.names() if not name.rpartition("-")[2].isdigit()]

    before = unnumbered()
    done = cli("build", "--suite", "forky")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"forky: Slurm {sandbox.instance.slurm_version}, with pyslurm.\n"
    assert unnumbered() == before


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


def test_bookworm_runs_the_old_slurm_without_pyslurm(old_sandbox: Driver) -> None:
    assert old_sandbox.instance.slurm_version.startswith("22.05.")
    assert not old_sandbox.instance.pyslurm
    assert "command gateway" in old_sandbox.instance.pyslurm_reason
    job = old_sandbox.submit("--gres=gpu:1", "--output=o.out", "--wrap=echo gpu=$CUDA_VISIBLE_DEVICES")
    assert old_sandbox.wait_state(job)["JobState"] == "COMPLETED"
    assert old_sandbox.read("/home/alice/o.out") == "gpu=0\n"
    assert old_sandbox.run("squeue", "--json").stdout.lstrip().startswith("{")
