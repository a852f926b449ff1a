"""Profiles on a real Slurm: a model never seen is measured while its job trains, live drift is measured again once."""

import json
from typing import Any

import pytest
from muri_cluster import DRY_RUNS, MuriCluster

from muri.profiler.records import ProfileKey, StageProfile
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


def test_a_pytorch_script_never_seen_shares_at_once_and_its_profile_is_stored_while_it_trains(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    muri.configure(profiling={"mode": "in-place"})
    muri.know_profiles()
    before = muri.dry_runs()
    script = muri.script("new", NEW_PY, "echo started")
    with muri.training():
        known = muri.submit("load", iterations=5)
        mark = "--muri=model=new,batch-size=64,duration=100s"
        new = one_gpu.submit("-p", "train", "--gres=gpu:1", mark, script)
        muri.cycle()
        muri.wait_grouped(known, new)
        assert "the mean of this site's models" in str(muri.queue()[new])
        one_gpu.wait_until(lambda: "muri-measured:" in one_gpu.job(new).get("Comment", ""), "the measurement")
        muri.cycle()
        found = muri.models("--user", "alice")["new"]
        assert one_gpu.job(new)["JobState"] == "RUNNING"
    assert (found["source"], found["batch_size"], found["gpu_count"]) == ("in-place", 64, 1)
    assert found["iterations"] >= 10
    assert found["propagate_s"] > found["load_s"]
    assert found["detail"]["gradient_mib"] > 1
    assert isinstance(found["detail"]["dangers"], list)
    assert {one_gpu.wait_state(job)["JobState"] for job in (known, new)} == {"COMPLETED"}
    assert muri.output(new).count("started") == 1  # no script ran twice
    assert muri.dry_runs() == before


def profile(model: str, load_s: float) -> StageProfile:
    """The scripts take 10 ms for each stage but the slow one; a loaded machine does not reach more than twice these."""
    return StageProfile(ProfileKey(model, 8, 1, "gpu"), load_s, 0.03, 0.07, 0.03, iteration_s=0.2)


def cycles_until(muri: MuriCluster, logged: str) -> None:
    """Have a controller at work until it logs a text."""
    with muri.controller():
        muri.driver.wait_until(lambda: logged in muri.controller_log(), f"{logged!r} in the log")


def mark_of_load(muri: MuriCluster, user: str) -> dict[str, Any] | None:
    """Why a user's profile of `load` is to be measured again, and who says so; None where it is fresh."""
    mark: dict[str, Any] | None = json.loads(muri.profile("show", "load", "--user", user, "--json"))["stale"]
    return mark


@DRY_RUNS
def test_drift_of_a_running_group_is_measured_again_once(muri: MuriCluster) -> None:
    tuning = {"drift_after_s": 4.0, "drift_limit": 1.5, "wait_for_profiles_s": 0}
    muri.configure(tuning=tuning, profiling={"partition": "measure"}, grouping={"discipline": "fair"})
    muri.know(profile("load", 0.02), profile("propagate", 0.03))  # loading takes 70 ms in the script of the first
    before = muri.dry_runs()
    with muri.training():
        jobs = [muri.submit("load"), muri.submit("propagate")]
        muri.cycle()
        muri.wait_grouped(*jobs)
        cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu) is stale")
        mark = mark_of_load(muri, "all")
        assert mark is not None
        assert mark["who"] == "drift"
        assert mark["reason"].startswith("load took ")
        assert muri.dry_runs() == before  # no job of that model waits, nothing to measure it with
        muri.driver.run("scancel", *map(str, jobs), user="alice")

    later = [muri.submit("load", iterations=30), muri.submit("load", iterations=30)]
    cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu): stored")
    assert mark_of_load(muri, "alice") is None
    fields = muri.cycles_until_ended(*later)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    muri.cycles_until_ended(muri.submit("load", iterations=5))  # fresh again: no second dry run
    assert len(muri.dry_runs() - before) == 1
    shown = muri.models("--user", "alice")["load"]
    assert shown["source"] == "dry-run"
    assert shown["load_s"] > 0.05


FORGE = """for job; do scontrol update jobid=$job comment='muri-measured:{"at":1e300,"error":"as-forged"}'; done"""


@pytest.mark.thorough
def test_forged_measurements_leave_one_line_in_the_log(muri: MuriCluster) -> None:
    driver = muri.driver
    muri.configure(profiling={"mode": "in-place"})
    with muri.training():
        members, _ = muri.start_group("load", "propagate")
        others = [driver.submit("--hold", "--gres=gpu:1", f"--muri=model=m{n}", "--wrap=true") for n in range(10)]
        driver.run("sh", "-c", FORGE, "sh", *map(str, others))
        driver.run("scancel", *map(str, others[5:]))
        with muri.controller():
            for _ in range(60):  # the pilot job tells of its members, too
                driver.run("sh", "-c", FORGE, "sh", *map(str, members))
            driver.wait_until(lambda: "2 faulty jobs of alice" in muri.controller_log(), "a cycle")
    log = muri.controller_log()
    assert log.count("its figures of its model cannot be true") <= 2, log  # of one member, and of both
    assert "as-forged" not in log
