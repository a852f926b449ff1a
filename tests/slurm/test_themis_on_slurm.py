"""Themis on a real Slurm: who waits is slowed down, so what runs stops for it, and is not forgotten for having run."""

import pytest
from muri_cluster import MuriCluster
from test_put_back_on_slurm import TRAIN_PY

from sandbox.driver import Driver

FACTS = "import sys; from pathlib import Path; from muri.slurm_plugin.records.journal import Journal;"
FACTS += "print(*Journal(Path(sys.argv[1])).facts('first-submit').items(), sep='\\n')"


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    cluster = MuriCluster(one_gpu)
    cluster.configure(policy="themis", preemption={"enabled": True, "least_run_s": 5, "restart_s": 0})
    one_gpu.write("train_on.py", TRAIN_PY)
    one_gpu.write("train_on.sh", "#!/bin/sh\nmuri run /home/alice/train_on.py\n")
    one_gpu.run("sh", "-c", "rm -rf .muri enough")
    return cluster


def test_what_runs_stops_for_who_waits_and_comes_back(muri: MuriCluster) -> None:
    driver, on_one_gpu = muri.driver, ("-p", "train", "--gres=gpu:1")
    mark = "--muri=model=m,batch-size=8,duration=600s,checkpoint=1"
    first = driver.submit(*on_one_gpu, mark, "--open-mode=append", "/home/alice/train_on.sh")
    submitted = driver.job(first)["SubmitTime"]
    with muri.controller():
        driver.wait_until(lambda: "muri-checkpoint:" in driver.job(first).get("Comment", ""), "the first one at work")
        second = muri.submit("load", iterations=100)
        driver.wait_state(second, "RUNNING")
        driver.wait_until(lambda: driver.job(first)["Restarts"] == "1", "the return of the first one to the queue")
        assert driver.job(first)["SubmitTime"] > submitted  # Slurm counts from its return
        facts = muri.python(FACTS, f"{muri.state_dir}/journal.db").stdout
        assert f"('{first}', " in facts
        driver.write("enough", "")
        ended = {job: driver.wait_state(job) for job in (first, second)}
    assert {fields["JobState"] for fields in ended.values()} == {"COMPLETED"}
    output = muri.output(first)
    assert (output.count("started at"), output.count("finished")) == (2, 1)
