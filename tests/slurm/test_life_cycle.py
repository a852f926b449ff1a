"""Stopping, resuming and joining on a real Slurm: a job is never lost, never run twice, and its loss is the same."""

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

CURVE_PY = """\
import random, sys, time
import torch, muri

torch.set_num_threads(1)
torch.manual_seed(1)
random.seed(2)
iterations, curve, pause_s, registered = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4] == "checkpoint"
data = torch.utils.data.TensorDataset(torch.randn(48, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
parts = [model, optimizer]

def load(path):
    for part, state in zip(parts, torch.load(path)):
        part.load_state_dict(state)

begun = muri.checkpoint(lambda path: torch.save([p.state_dict() for p in parts], path), load) if registered else None
done = begun.iteration if begun else 0
if registered and not done:  # what stops it must come before its end, on a busy machine too
    pause_s = max(pause_s, 0.4)
print("started at", done, flush=True)
for epoch in range(begun.epoch if begun else 0, 1000):
    training = muri.batches(loader)
    for (batch,) in training:
        with muri.stage("propagate"):
            loss = (model(batch) * (1 + random.random())).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            time.sleep(pause_s)
        done += 1
        with open(curve, "a") as file:
            print(done, loss.item().hex(), file=file)
        if not training.lease.renewed:
            print("its lease is not renewed at", done, flush=True)
        if done == iterations:
            print("finished", flush=True)
            sys.exit(0)
"""

MOST_ITERATIONS = 300
CURVE_SH = '#!/bin/sh\nmuri run /home/alice/curve.py "$@"\n'


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    cluster = MuriCluster(one_gpu)
    cluster.know_profiles()
    one_gpu.write("curve.py", CURVE_PY)
    one_gpu.write("curve.sh", CURVE_SH)
    one_gpu.run("sh", "-c", "rm -rf .muri *.curve")
    return cluster


def submit(muri: MuriCluster, curve: str, *options: str, iterations: int = 60, kind: str = "propagate",
           pause_s: float = 0.01, checkpoint: bool = True) -> int:  # fmt: skip
    """Submit the training script whose loss curve is looked at."""
    mark = f"--muri=model={kind},batch-size=8,duration=60s" + (",checkpoint=1" if checkpoint else "")
    arguments = (str(iterations), curve, str(pause_s), "checkpoint" if checkpoint else "none")
    append = "--open-mode=append"
    return muri.driver.submit("-p", "train", "--gres=gpu:1", mark, append, *options, "/home/alice/curve.sh", *arguments)


def curve(muri: MuriCluster, name: str) -> list[str]:
    done = muri.driver.run("cat", name, check=False)
    return done.stdout.splitlines()


@cache
def whole_curve() -> list[str]:
    """The curve of the same script, run without Slurm and without a stop, for as many iterations as any test needs."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CURVE_PY, str(MOST_ITERATIONS), "whole.curve", "0", "none"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return Path(folder, "whole.curve").read_text().splitlines()


def wait_for(muri: MuriCluster, name: str, lines: int) -> None:
    muri.driver.wait_until(lambda: len(curve(muri, name)) >= lines, f"{lines} iterations of {name}")


def declared(muri: MuriCluster, job: int) -> None:
    """Wait until Slurm knows that the job has a checkpoint."""
    muri.driver.wait_until(lambda: "muri-checkpoint:" in muri.driver.job(job).get("Comment", ""), "the comment")


def assert_resumed_once(muri: MuriCluster, job: int, name: str, iterations: int = 60) -> None:
    assert curve(muri, name) == whole_curve()[:iterations]
    output = muri.output(job)
    assert output.count("finished") == 1
    assert output.count("started at") == 2
    assert "resumed at iteration" in output


def test_a_preempted_member_resumes_where_it_was(muri):
    job, partner = submit(muri, "a.curve"), muri.submit("load", iterations=150)
    muri.cycle()
    muri.wait_grouped(job, partner)
    wait_for(muri, "a.curve", 5)
    declared(muri, job)
    muri.driver.run("muri", "preempt", str(job), "--yes", user="root")
    muri.driver.wait_state(job, "PENDING")
    assert 5 <= len(curve(muri, "a.curve")) < 60
    assert muri.driver.job(partner)["JobState"] == "RUNNING"
    fields = muri.cycles_until_ended(job, partner)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert fields[job]["Restarts"] == "1"
    assert_resumed_once(muri, job, "a.curve")
    # The request came in the middle of an iteration: the loop saw it, and was saved and ended right after.
    output = muri.output(job)
    (at,) = {line.split()[-1] for line in output.splitlines() if line.startswith("its lease is not renewed at")}
    assert f"saved at iteration {at}, the script stops" in output
    assert f"started at {at}" in output
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the host, which serves nobody any more")


def test_the_controller_stops_a_long_job_for_a_short_one(muri):
    muri.configure(policy="srtf", preemption={"enabled": True, "least_run_s": 0, "restart_s": 0},
                   grouping={"max_group_size": 1})  # fmt: skip
    long = submit(muri, "long.curve", iterations=80)
    muri.cycle()
    wait_for(muri, "long.curve", 5)
    declared(muri, long)
    short = muri.submit("load", iterations=5)
    fields = muri.cycles_until_ended(long, short)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert fields[long]["Restarts"] == "1"
    assert fields[short]["EndTime"] < fields[long]["EndTime"]
    assert_resumed_once(muri, long, "long.curve", 80)


def test_a_job_without_a_checkpoint_is_never_stopped(muri):
    muri.configure(policy="srtf", preemption={"enabled": True, "least_run_s": 0, "restart_s": 0},
                   grouping={"max_group_size": 1})  # fmt: skip
    long = submit(muri, "long.curve", checkpoint=False, iterations=60, pause_s=0.1)
    muri.cycle()
    wait_for(muri, "long.curve", 5)
    refused = muri.driver.run("muri", "preempt", str(long), "--yes", user="root", check=False)
    assert refused.returncode == 2
    assert "--muri=checkpoint=1" in refused.stderr
    short = muri.submit("load", iterations=5)
    fields = muri.cycles_until_ended(long, short)
    assert fields[long]["Restarts"] == "0"
    assert fields[long]["JobState"] == "COMPLETED"


def test_a_waiting_job_joins_a_group_at_work(muri):
    muri.configure(grouping={"max_group_size": 4})
    first = [muri.submit("load", iterations=200), muri.submit("propagate", iterations=200)]
    leaver = muri.submit("synchronize", iterations=5)
    muri.cycle()
    muri.wait_grouped(*first)
    # It leaves its share of the host's memory to the one that joins.
    muri.driver.wait_state(leaver, "COMPLETED")
    (host,) = muri.hosts()
    third = muri.submit("preprocess", iterations=20)
    muri.cycle()
    muri.driver.wait_until(lambda: "finished" in muri.output(third), "the new member's end")
    assert muri.driver.wait_state(third)["JobState"] == "COMPLETED"
    assert muri.hosts() == [host]
    assert all(muri.driver.job(job)["JobState"] == "RUNNING" for job in first)
    fields = muri.cycles_until_ended(*first, third)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert f"{third}" in muri.driver.job(host)["AdminComment"]


def test_a_warning_before_the_time_limit_saves_and_requeues(muri):
    """`#SBATCH --signal`: the script is saved and goes back to the queue before Slurm ends it."""
    muri.driver.write("curve.sh", CURVE_SH.replace("muri run", "exec muri run"))
    # Slurm looks every half minute, so that the signal comes soon after the limit is set, when the script is ready.
    job = submit(muri, "b.curve", "--time=30", "--signal=B:USR1@100", iterations=MOST_ITERATIONS)
    muri.cycle()
    wait_for(muri, "b.curve", 3)
    muri.driver.run("scontrol", "update", f"JobId={job}", "TimeLimit=2", user="root")
    muri.driver.wait_state(job, "PENDING")
    muri.driver.run("scontrol", "update", f"JobId={job}", "TimeLimit=30", user="root")
    assert muri.driver.wait_state(job)["JobState"] == "COMPLETED"
    assert_resumed_once(muri, job, "b.curve", MOST_ITERATIONS)


def test_a_warned_member_saves_and_is_planned_anew(muri):
    """What `--signal` does at a member's time limit, sent by hand: it is longer in a group."""
    muri.driver.write("curve.sh", CURVE_SH.replace("muri run", "exec muri run"))
    job, partner = submit(muri, "e.curve"), muri.submit("load", iterations=200)
    muri.cycle()
    wait_for(muri, "e.curve", 5)
    muri.driver.run("scancel", "--batch", "--signal=USR1", str(job))
    muri.driver.wait_state(job, "PENDING")
    fields = muri.cycles_until_ended(job, partner)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert (fields[job]["Restarts"], fields[partner]["Restarts"]) == ("1", "0")
    assert_resumed_once(muri, job, "e.curve")


def test_scancel_saves_and_ends_without_a_requeue(muri):
    job = submit(muri, "c.curve")
    muri.cycle()
    wait_for(muri, "c.curve", 5)
    muri.driver.run("scancel", str(job))
    fields = muri.driver.wait_state(job)
    assert fields["JobState"] == "CANCELLED"
    assert fields["Restarts"] == "0"

    def saved() -> bool:
        found = muri.driver.run("ls", f".muri/checkpoints/{job}", check=False).stdout
        return f"iteration-{len(curve(muri, 'c.curve')):010d}" in found

    muri.driver.wait_until(saved, "the checkpoint of its last iteration")


def test_slurms_own_requeue_resumes(muri):
    job = submit(muri, "d.curve")
    muri.cycle()
    wait_for(muri, "d.curve", 5)
    muri.driver.run("scontrol", "requeue", str(job), user="root")
    assert muri.driver.wait_state(job)["JobState"] == "COMPLETED"
    assert_resumed_once(muri, job, "d.curve")


def test_a_member_that_stops_after_a_drain_goes_on_as_a_plain_job(muri):
    """It is warned of its time limit when no controller is left."""
    muri.driver.write("curve.sh", CURVE_SH.replace("muri run", "exec muri run"))
    job, partner = submit(muri, "f.curve", iterations=30), muri.submit("load", iterations=20)
    muri.cycle()
    muri.wait_grouped(job, partner)
    wait_for(muri, "f.curve", 5)
    drain = muri.driver.popen("muri", "drain", "--wait", "--json", user="root")
    try:
        muri.driver.run("scancel", "--batch", "--signal=USR1", str(job))
        states = [muri.driver.wait_state(each)["JobState"] for each in (job, partner)]
        assert states == ["COMPLETED", "COMPLETED"]
        printed, _ = drain.communicate(timeout=240)
    finally:
        drain.terminate()
    assert drain.returncode == 0
    passes = [json.loads(line) for line in printed.splitlines()]
    assert sorted(each for done in passes for each in done["restored"]) == [job]
    assert "muri-state" not in muri.driver.job(job)["AdminComment"]
    assert_resumed_once(muri, job, "f.curve", 30)


def test_runs_that_slurm_ended_itself_count_as_service(muri):
    """2D-LAS: a member whose group's GPUs an administrator took away has had its time, and newer jobs come first."""
    muri.configure(policy="muri-l", grouping={"max_group_size": 2})
    first, partner = (muri.submit(kind, iterations=4000) for kind in ("load", "propagate"))
    muri.cycle()
    muri.wait_grouped(first, partner)
    muri.cycle()
    begun_s = time.monotonic()
    muri.driver.wait_until(lambda: time.monotonic() > begun_s + 4, "some service")
    (host,) = muri.hosts()
    # Slurm itself would start them two seconds after their requeue: it starts nothing until that is put off.
    with muri.no_starts():
        muri.driver.run("scancel", str(host), user="root")
        for job in (first, partner):
            muri.driver.wait_state(job, "PENDING")
            muri.driver.run("scontrol", "update", f"JobId={job}", "StartTime=now+1hour", user="root")
    later = muri.submit("preprocess", "--muri=model=preprocess,batch-size=8,duration=400s,alone=1", iterations=4000)
    with muri.controller():
        muri.driver.wait_state(later, "RUNNING")
    muri.cycle()
    told = {job: " ".join(muri.queue()[job]["reasons"]) for job in (first, partner, later)}
    assert "earlier runs have had" in told[first]
    assert "earlier runs have had" in told[partner]
    assert "earlier runs have had" not in told[later]
    muri.driver.run("scancel", str(first), str(partner), str(later), user="root")
