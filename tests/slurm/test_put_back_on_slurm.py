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
while done[0] < 5 or os.path.exists("/home/alice/keep-training"):
    with muri.stage("load"):
        time.sleep(0.02)
    with muri.stage("propagate"):  # the profile says 0.1 s for an iteration: two such jobs get on at 0.42, one at 0.71
        time.sleep(0.12)
    done[0] += 1
print("finished", flush=True)
"""


@pytest.mark.thorough
def test_the_last_comer_that_gets_on_at_less_than_half_goes_back_and_is_not_lost(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    preemption = {"enabled": True, "least_run_s": 5, "restart_s": 0}
    grouping = {"min_speed": 0, "discipline": "fair"}
    muri.configure(policy="pab", gpu_mem_gib={"gpu": 40.0}, grouping=grouping, preemption=preemption)
    muri.know_profiles()
    mark = "--muri=model=propagate,batch-size=8,duration=600s,checkpoint=1"
    words = ("-p", "train", "--gres=gpu:1", mark, "--open-mode=append", muri.script("train_on", TRAIN_PY))
    jobs = [one_gpu.submit(*words) for _ in range(2)]
    last = jobs[-1]
    with muri.controller():
        with muri.training():
            one_gpu.wait_until(lambda: all("started" in muri.output(job) for job in jobs), "both at work on one GPU")
            # Speeds are means of half a minute.
            one_gpu.wait_until(lambda: one_gpu.job(last)["Restarts"] == "1", "the return of the last comer")
            one_gpu.wait_until(
                lambda: "waits for GPUs of its own" in " ".join(muri.queue()[last]["reasons"]), "the reason"
            )
        ended = [one_gpu.wait_state(job) for job in jobs]
    assert [(fields["JobState"], fields["Restarts"]) for fields in ended] == [("COMPLETED", "0"), ("COMPLETED", "1")]
    output = muri.output(last)
    assert (output.count("started at"), output.count("finished")) == (2, 1)
    assert int(output.rpartition("started at ")[2].split()[0]) > 0
