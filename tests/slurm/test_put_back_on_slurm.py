"""PAB on a real Slurm: of two jobs on a GPU the one that came last goes back, and goes on where it was."""

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

TRAIN_PY = """\
import json, os, time
import muri

done = [0]

def save(path):
    with open(path, "w") as file:
        json.dump(done, file)

def load(path):
    with open(path) as file:
        done[:] = json.load(file)

muri.checkpoint(save, load)
print("started at", done[0], flush=True)
while done[0] < 40 or not os.path.exists("/home/alice/enough"):
    with muri.stage("load"):
        time.sleep(0.02)
    with muri.stage("propagate"):  # the profile says 0.1 s for an iteration: two such jobs get on at 0.42, one at 0.71
        time.sleep(0.12)
    done[0] += 1
print("finished", flush=True)
"""


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    cluster = MuriCluster(one_gpu)
    cluster.configure(
        policy="pab",
        gpu_mem_gib={"gpu": 40.0},
        grouping={"min_speed": 0, "discipline": "fair"},
        preemption={"enabled": True, "least_run_s": 5, "restart_s": 0},
    )
    cluster.know_profiles()
    one_gpu.write("train_on.py", TRAIN_PY)
    one_gpu.write("train_on.sh", "#!/bin/sh\nmuri run /home/alice/train_on.py\n")
    one_gpu.run("sh", "-c", "rm -rf .muri enough")
    return cluster


def submit(muri: MuriCluster) -> int:
    mark = "--muri=model=propagate,batch-size=8,duration=600s,checkpoint=1"
    return muri.driver.submit("-p", "train", "--gres=gpu:1", mark, "--open-mode=append", "/home/alice/train_on.sh")


def test_the_last_comer_that_gets_on_at_less_than_half_goes_back_and_is_not_lost(muri: MuriCluster) -> None:
    jobs = [submit(muri) for _ in range(2)]
    last = jobs[-1]

    def at_work() -> bool:
        return all(muri.driver.job(job)["JobState"] == "RUNNING" and "started" in muri.output(job) for job in jobs)

    def last_is_back() -> bool:
        return muri.driver.job(last)["JobState"] == "PENDING" and muri.driver.job(last)["Restarts"] == "1"

    with muri.controller():
        muri.driver.wait_until(at_work, "both at work on one GPU")
        muri.driver.wait_until(last_is_back, "the return of the last comer")
        muri.driver.wait_until(
            lambda: "waits for GPUs of its own" in " ".join(muri.queue()[last]["reasons"]), "the reason"
        )
        muri.driver.write("enough", "")
        ended = {job: muri.driver.wait_state(job) for job in jobs}
    assert {fields["JobState"] for fields in ended.values()} == {"COMPLETED"}
    assert [fields["Restarts"] for fields in ended.values()] == ["0", "1"]
    output = muri.output(last)
    assert (output.count("started at"), output.count("finished")) == (2, 1)
    assert "started at 0" in output
    assert int(output.rpartition("started at ")[2].split()[0]) > 0
