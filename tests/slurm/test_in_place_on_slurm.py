"""On a real Slurm: a model never seen starts at once, and is measured while its job trains."""

import json
from typing import Any

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

NEW_PY = """\
import os, sys
import torch

torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(256, 512), torch.randint(0, 8, (256,)))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
epoch = 0
while epoch < 3 or os.path.exists(os.path.expanduser("~/keep-training")):
    epoch += 1
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
print("finished", os.environ["SLURM_JOB_ID"], flush=True)
"""

NEW_SH = "#!/bin/sh\necho started\nmuri run /home/alice/new.py\n"


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    muri = MuriCluster(one_gpu)
    muri.configure(profiling={"mode": "in-place"})
    return muri


def profiles(muri: MuriCluster, user: str) -> dict[str, dict[str, Any]]:
    """The stored profiles of a user's own models."""
    path = f"{muri.state_dir}/profiles.db"
    text = muri.driver.run("muri", "profile", "list", "--json", "--user", user, "--store", path, user="root").stdout
    return {each["model"]: each for each in json.loads(text)["profiles"]}


def dry_runs(muri: MuriCluster) -> set[str]:
    """The dry-run jobs that slurmctld remembers, ended ones too."""
    return set(
        muri.driver.run("squeue", "-h", "-t", "all", "-n", "muri-dryrun", "-o", "%i", user="root").stdout.split()
    )


def test_a_pytorch_script_never_seen_shares_at_once_and_its_profile_is_stored_while_it_trains(
    muri: MuriCluster,
) -> None:
    muri.know_profiles()
    before = dry_runs(muri)
    muri.driver.write("new.py", NEW_PY, user="alice")
    muri.driver.write("new.sh", NEW_SH, user="alice", mode="0755")
    with muri.training():
        known = muri.submit("load", iterations=30)
        mark = "--muri=model=new,batch-size=64,duration=100s"
        new = muri.driver.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/new.sh", user="alice")
        muri.cycle()
        muri.wait_grouped(known, new)
        assert "the mean of this site's models" in str(muri.queue()[new])
        muri.driver.wait_until(lambda: "muri-measured:" in muri.driver.job(new).get("Comment", ""), "the measurement")
        muri.cycle()
        found = profiles(muri, "alice")["new"]
        assert muri.driver.job(new)["JobState"] == "RUNNING"
    assert (found["source"], found["batch_size"], found["gpu_count"]) == ("in-place", 64, 1)
    assert found["iterations"] >= 10
    assert found["propagate_s"] > found["load_s"]
    assert found["detail"]["gradient_mib"] > 1
    assert isinstance(found["detail"]["dangers"], list)
    assert {muri.driver.wait_state(job)["JobState"] for job in (known, new)} == {"COMPLETED"}
    assert muri.output(new).count("started") == 1  # no script ran twice
    assert dry_runs(muri) == before
