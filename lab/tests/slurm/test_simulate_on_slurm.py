"""A sweep of `muri-lab sweep` as a job array on the real Slurm, submitted by an ordinary user."""

import json
import subprocess

import pytest

from sandbox.driver import Driver

TRACE = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
    + "".join(
        f"{index},1,{index * 1000},{100 + 37 * index % 90},{model},16,0,1000,1000,{times},0\n"
        for index, (model, times) in enumerate([("shufflenet", "700,200,50"), ("bert", "50,800,100")] * 4)
    )
)
CLUSTER = ("--nodes", "1", "--gpus-per-node", "2")

#: `muri-lab` that asks sooner for what has left the queue, and waits less for its result.
IMPATIENT = """
from muri_lab.cli import main
from muri_lab.sweep import on_slurm

on_slurm._QUEUE_EVERY_S = on_slurm._GRACE_S = 1.0
main()
"""
WALL_CLOCK = ("wall_s", "decision_mean_s", "decision_p99_s")


@pytest.fixture
def trace(cluster: Driver) -> str:
    return cluster.write("trace.csv", TRACE, mode="0644")


def figures(output: str) -> dict[str, dict[str, object]]:
    policies = json.loads(output)["policies"]
    return {
        name: {key: value for key, value in found.items() if key not in WALL_CLOCK} for name, found in policies.items()
    }


def test_job_array_gives_what_the_same_sweep_gives_here(cluster: Driver, trace: str) -> None:
    command = ("muri-lab", "sweep", trace, "--policy", "srsf,muri-s", *CLUSTER, "--json")
    local = figures(cluster.run(*command).stdout)
    slurm = cluster.run(*command, "--executor", "slurm", "--jobs", "2", "--slurm-option", "partition=main",
                        "--out", "/home/alice/sweep")  # fmt: skip
    assert figures(slurm.stdout) == local
    assert list(local) == ["srsf", "muri-s"]
    logs = cluster.run("ls", "/home/alice/sweep/slurm").stdout.split()
    assert sum(name.endswith("_log.out") for name in logs) == 2
    assert "report.html" in cluster.run("ls", "/home/alice/sweep").stdout.split()


def test_refusal_in_a_task_reaches_the_user_in_its_own_words(cluster: Driver, trace: str) -> None:
    done = cluster.run("muri-lab", "sweep", trace, "--policy", "srsf", "--nodes", "1", "--gpus-per-node", "2",
                       "--executor", "slurm", "--option", "speed_model=measured", check=False)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "measured" in done.stderr


def test_partition_that_is_not_there_is_slurms_refusal(cluster: Driver, trace: str) -> None:
    done = cluster.run("muri-lab", "sweep", trace, "--policy", "srsf", *CLUSTER, "--executor", "slurm",
                       "--slurm-option", "partition=nowhere", check=False)  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Slurm did not take the job array" in done.stderr


def submit_for_later(cluster: Driver, trace: str, *command: str) -> "subprocess.Popen[str]":
    """A sweep whose job array is in the queue and stays there."""
    options = ("sweep", trace, "--policy", "srsf,fifo", *CLUSTER, "--executor", "slurm")
    process = cluster.popen(*command, *options, "--slurm-option", "additional_parameters={begin: now+1hour}")
    cluster.wait_until(lambda: queued(cluster) != "", "the job array")
    return process


def queued(cluster: Driver) -> str:
    return cluster.run("squeue", "--noheader", "--format=%i", "--name=muri-simulate").stdout.strip()


def test_interrupt_takes_the_job_array_back(cluster: Driver, trace: str) -> None:
    process = submit_for_later(cluster, trace, "muri-lab")
    cluster.run("pkill", "--signal", "INT", "--full", "muri-lab sweep", user="root")
    _, stderr = process.communicate(timeout=240)
    assert "muri: interrupted" in stderr
    assert "Traceback" not in stderr
    cluster.wait_until(lambda: queued(cluster) == "", "an empty queue")


def test_cancelled_task_is_an_error_and_not_a_long_wait(cluster: Driver, trace: str) -> None:
    process = submit_for_later(cluster, trace, "python", "-c", IMPATIENT)
    cluster.cancel_all()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "left the queue without a result" in stderr
