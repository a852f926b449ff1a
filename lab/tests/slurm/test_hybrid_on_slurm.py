"""muri-hybrid on a real Slurm: two jobs whose pair was measured train side by side on one GPU, without turns."""

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

TRAIN_PY = """\
import os, sys, time
import muri

own, other = sys.argv[1:]
print("started", own, "pid", os.getpid(), "gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
met = False
while not met or os.path.exists("keep-training"):
    with muri.stage("propagate"):  # which members with turns never share
        open(f"{own}-is-there", "w").close()
        limit_s = time.monotonic() + 120
        while not (met or os.path.exists(f"{other}-is-there")):
            assert time.monotonic() < limit_s, f"{other} was never at the GPU beside {own}"
            time.sleep(0.005)
        met = True
    time.sleep(0.01)
print("met and finished", own, flush=True)
"""

MEASURED = """\
import sys
from pathlib import Path
from muri.profiler.interference import Interference, Side, put
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
sides = [Side(ProfileKey(name, 8, 1, "gpu"), 0.1, 0.1 * r, r, 0.02, 0.9, 40) for name, r in (("a", 1.25), ("b", 1.6))]
with ProfileStore(Path(sys.argv[1])) as store:
    for side in sides:  # both are at the GPU all the time
        store.put(StageProfile(side.key, 0.0, 0.0, 0.1, 0.0, iteration_s=0.1, iterations=20))
    put(store, Interference(*sides, rounds=5, measured_s=30.0, measured_at="2026-01-01T00:00:00+00:00"))
"""


def test_a_measured_pair_trains_side_by_side_without_turns(cluster: Driver) -> None:
    muri = MuriCluster(cluster)
    muri.configure(policy="muri-hybrid", partitions=["small"])
    script = muri.script("meet", TRAIN_PY)
    cluster.run("rm", "-f", "a-is-there", "b-is-there")
    muri.python(MEASURED, f"{muri.state_dir}/profiles.db")
    muri.occupy("small")

    def submit(own: str, other: str) -> int:
        mark = f"--muri=model={own},batch-size=8,duration=1h"
        return cluster.submit("-p", "small", "--gres=gpu:1", mark, script, own, other)

    with muri.training():
        jobs = {"a": submit("a", "b"), "b": submit("b", "a")}
        muri.cycle()
        (pilot,) = muri.pilots()
        assert "muri-mode:plain" in cluster.job(pilot)["AdminComment"].split()
        muri.wait_grouped(*jobs.values())
        told = cluster.run("squeue", "-h", "-u", "alice", "-t", "RUNNING", "-o", "%i %u %N %b", user="root").stdout
        running = {int(line.split()[0]): line.split()[1:] for line in told.splitlines()}
        member = ["alice", "n1", "gres/gpu:0,gres/muri:1"]
        assert running == {pilot: ["alice", "n1", "gres/gpu:1"], jobs["a"]: member, jobs["b"]: member}

        cluster.wait_until(lambda: muri.queue()[jobs["a"]]["discipline"] == "plain", "the runtime's word")
        shown = muri.queue()
        assert [(shown[job]["state"], shown[job]["group"]) for job in jobs.values()] == [("shared", pilot)] * 2
        assert [shown[jobs[name]]["predicted_speed"] for name in "ab"] == pytest.approx([0.8, 0.625])
        assert any("they share without turns" in reason for reason in shown[jobs["a"]]["reasons"])

    for job in (*jobs.values(), pilot):
        ended = cluster.wait_state(job, "COMPLETED")
        assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "0")
    lines = {name: muri.output(job).splitlines() for name, job in jobs.items()}
    assert [lines[name][-1] for name in "ab"] == ["met and finished a", "met and finished b"]
    words = [lines[name][0].split() for name in "ab"]
    assert words[0][5] == words[1][5] != "None"  # one GPU
    assert words[0][3] != words[1][3]  # each has a process, as when the pair was measured
    assert muri.pilots() == []
