"""muri-hybrid on a real Slurm: two jobs whose pair was measured train side by side on one GPU, without turns."""

import json

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

TRAIN_PY = """\
import os, sys, time
import torch, muri

own, other = sys.argv[1:]
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
print("started", own, "pid", os.getpid(), "gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
met = False
while not os.path.exists("end"):
    for inputs, targets in muri.batches(loader):
        with muri.stage("propagate"):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            # Within the stage that members with turns never share.
            open(f"{own}-is-there", "w").close()
            limit_s = time.monotonic() + 120
            while not (met or os.path.exists(f"{other}-is-there")):
                assert time.monotonic() < limit_s, f"{other} was never at the GPU beside {own}"
                time.sleep(0.005)
            met = True
    time.sleep(0.01)
print("met and finished", own, flush=True)
"""

TRAIN_SH = '#!/bin/sh\nmuri run /home/alice/meet.py "$@"\n'

MEASURED = """\
import sys
from pathlib import Path
from muri.profiler.interference.ratios import Interference, Side, put
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
path = Path(sys.argv[1])
path.parent.mkdir(exist_ok=True)
sides = [Side(ProfileKey(name, 8, 1, "gpu"), 0.1, 0.1 * r, r, 0.02, 0.9, 40) for name, r in (("a", 1.25), ("b", 1.6))]
with ProfileStore(path) as store:
    for side in sides:  # both are at the GPU all the time
        store.put(StageProfile(side.key, 0.0, 0.0, 0.1, 0.0, iteration_s=0.1, iterations=20))
    put(store, Interference(*sides, rounds=5, measured_s=30.0, measured_at="2026-01-01T00:00:00+00:00"))
"""

STARTS = """\
import json, sys
from pathlib import Path
from muri.slurm_plugin.records.journal import Journal
with Journal(Path(sys.argv[1])) as journal:
    groups = [intent for intent in journal.intents() if intent.kind == "group"]
    print(json.dumps([[intent.submitted_job, intent.state, intent.payload["mode"]] for intent in groups]))
"""


@pytest.fixture
def muri(cluster: Driver) -> MuriCluster:
    """A node with two GPUs, of which somebody else has one."""
    site = MuriCluster(cluster)
    site.configure(policy="muri-hybrid", partitions=["small"])
    cluster.write("meet.py", TRAIN_PY)
    cluster.write("meet.sh", TRAIN_SH)
    cluster.run("rm", "-f", *(f"/home/alice/{name}" for name in ("end", "a-is-there", "b-is-there")), user="alice")
    site.python(MEASURED, f"{site.state_dir}/profiles.db")
    cluster.wait_state(cluster.submit("-p", "small", "--gres=gpu:1", "--wrap=sleep infinity", user="bob"), "RUNNING")
    return site


def test_a_measured_pair_trains_side_by_side_without_turns(muri: MuriCluster) -> None:
    def submit(own: str, other: str) -> int:
        mark = f"--muri=model={own},batch-size=8,duration=1h"
        return muri.driver.submit("-p", "small", "--gres=gpu:1", mark, "/home/alice/meet.sh", own, other)

    jobs = {"a": submit("a", "b"), "b": submit("b", "a")}
    muri.cycle()
    (host,) = muri.hosts()
    assert "muri-mode:plain" in muri.driver.job(host)["AdminComment"].split()
    muri.wait_grouped(*jobs.values())
    told = muri.driver.run(
        "squeue", "-h", "-u", "alice", "-t", "RUNNING", "-o", "%i %u %N %b", user="root"
    ).stdout.split("\n")
    running = {int(line.split()[0]): line.split()[1:] for line in told if line}
    member = ["alice", "n1", "gres/gpu:0,gres/muri:1"]
    assert running == {host: ["alice", "n1", "gres/gpu:1"], jobs["a"]: member, jobs["b"]: member}

    muri.driver.wait_until(lambda: muri.queue()[jobs["a"]]["discipline"] == "plain", "the runtime's word")
    shown = muri.queue()
    assert [(shown[job]["state"], shown[job]["group"]) for job in jobs.values()] == [("shared", host)] * 2
    assert [shown[jobs[name]]["predicted_speed"] for name in "ab"] == pytest.approx([0.8, 0.625])
    assert any("they share without turns" in reason for reason in shown[jobs["a"]]["reasons"])
    assert json.loads(muri.python(STARTS, f"{muri.state_dir}/journal.db").stdout) == [[host, "done", "plain"]]

    muri.driver.write("end", "")
    for job in (*jobs.values(), host):
        ended = muri.driver.wait_state(job, "COMPLETED")
        assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "0")
    lines = {name: muri.output(job).splitlines() for name, job in jobs.items()}
    assert [lines[name][-1] for name in "ab"] == ["met and finished a", "met and finished b"]
    words = [lines[name][0].split() for name in "ab"]
    assert words[0][5] == words[1][5] != "None"  # one GPU
    assert words[0][3] != words[1][3]  # each has a process, as when the pair was measured
    assert muri.hosts() == []
