"""Stopping, resuming and joining on a real Slurm: a job is never lost, never run twice, and its loss is the same."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from muri_cluster import MuriCluster
from site_cluster import SiteCluster

from sandbox.driver import Driver

ITERATIONS = 20
STOPS_AT = 10  # The iteration in which a job with a checkpoint waits until it is asked to stop: in mid-epoch

CURVE_PY = f"""\
import json, random, sys, time
import muri

class Shuffled:
    def __len__(self):
        return 12
    def __iter__(self):
        return iter(random.sample(range(12), 12))

random.seed(2)
curve, registered = sys.argv[1], len(sys.argv) > 2
model = dict(weight=1.0, momentum=0.0)

def save(path):
    path.write_text(json.dumps(model))

def load(path):
    model.update(json.loads(path.read_text()))

begun = muri.checkpoint(save, load) if registered else None
done = begun.iteration if begun else 0
print("started at", done, flush=True)
for epoch in range(begun.epoch if begun else 0, 1000):
    training = muri.batches(Shuffled())
    for batch in training:
        with muri.stage("propagate"):
            error = model["weight"] * batch - 3 * batch + random.random()
            model["momentum"] = 0.9 * model["momentum"] + 0.001 * error * batch
            model["weight"] -= model["momentum"]
        done += 1
        while registered and done == {STOPS_AT} and training.lease.renewed:
            time.sleep(0.02)
        with open(curve, "a") as file:
            print(done, error.hex(), file=file)
        if not training.lease.renewed:
            print("its lease is not renewed at", done, flush=True)
        if done == {ITERATIONS}:
            print("finished", flush=True)
            sys.exit(0)
"""


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.know_profiles()
    muri.script("curve", CURVE_PY)
    muri.driver.run("sh", "-c", "rm -f *.curve")
    return muri


def submit(muri: MuriCluster, *options: str) -> int:
    """Submit the training script whose loss curve is looked at."""
    mark = "--muri=model=propagate,batch-size=8,duration=60s,checkpoint=1"
    words = ("--open-mode=append", *options, "/home/alice/curve.sh", "own.curve", "checkpoint")
    return muri.driver.submit("-p", "train", "--gres=gpu:1", mark, *words)


def curve(muri: MuriCluster) -> list[str]:
    return muri.driver.run("cat", "own.curve", check=False).stdout.splitlines()


@cache
def whole_curve() -> list[str]:
    """The curve of the same script, run without Slurm and without a stop."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", CURVE_PY, "whole.curve"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return Path(folder, "whole.curve").read_text().splitlines()


def wait_at_work(muri: MuriCluster, job: int) -> None:
    """Wait until the script waits for being stopped, and Slurm knows of its checkpoint."""
    muri.driver.wait_until(lambda: len(curve(muri)) == STOPS_AT - 1, f"{STOPS_AT - 1} iterations")
    muri.wait_checkpoint(job)


def assert_resumed_once(muri: MuriCluster, job: int) -> None:
    """The request came in the middle of an iteration: the loop saw it, and was saved and ended right after."""
    assert curve(muri) == whole_curve()
    output = muri.output(job)
    assert output.count("finished") == 1
    assert output.count("started at") == 2
    assert "resumed at iteration" in output
    for told in ("its lease is not renewed at {}", "saved at iteration {}, the script stops", "started at {}"):
        assert told.format(STOPS_AT) in output


def test_a_preempted_member_resumes_where_it_was(muri):
    with muri.training("load"):
        job, partner = submit(muri), muri.submit("load", iterations=5)
        muri.cycle()
        muri.wait_grouped(job, partner)
        wait_at_work(muri, job)
        muri.driver.run("muri", "preempt", str(job), "--yes", user="root")
        muri.driver.wait_state(job, "PENDING")
        assert len(curve(muri)) == STOPS_AT
        assert muri.driver.job(partner)["JobState"] == "RUNNING"
    fields = muri.cycles_until_ended(job, partner)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert (fields[job]["Restarts"], fields[partner]["Restarts"]) == ("1", "0")
    assert_resumed_once(muri, job)
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of the pilot, which has no members any more")


@pytest.mark.parametrize("policy", ["srtf", "themis"])
def test_the_controller_stops_a_long_job_for_one_that_waits(muri, policy):
    preemption, tuning = {"enabled": True, "least_run_s": 0}, {"restart_s": 0}
    muri.configure(policy=policy, preemption=preemption, grouping={"max_group_size": 1}, tuning=tuning)
    long = submit(muri)
    submitted = muri.driver.job(long)["SubmitTime"]
    muri.cycle()
    wait_at_work(muri, long)
    short = muri.submit("load", iterations=5)
    fields = muri.cycles_until_ended(long, short)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert (fields[long]["Restarts"], fields[short]["Restarts"]) == ("1", "0")
    assert fields[long]["SubmitTime"] > submitted  # for Slurm; Muri goes on counting from the first
    assert fields[short]["EndTime"] < fields[long]["EndTime"]
    assert_resumed_once(muri, long)


def test_a_waiting_job_joins_a_group_at_work(muri):
    with muri.training("load", "propagate"):
        with muri.training("synchronize"):
            (*first, leaver), pilot = muri.start_group("load", "propagate", "synchronize")
        # It leaves its share of the pilot's memory to the one that joins.
        muri.driver.wait_state(leaver, "COMPLETED")
        third = muri.submit("preprocess", iterations=5)
        muri.cycle()
        assert muri.driver.wait_state(third)["JobState"] == "COMPLETED"
        assert muri.pilots() == [pilot]
        assert all(muri.driver.job(job)["JobState"] == "RUNNING" for job in first)
    fields = muri.cycles_until_ended(*first, third)
    assert {field["JobState"] for field in fields.values()} == {"COMPLETED"}
    assert f"{third}" in muri.driver.job(pilot)["AdminComment"]


@pytest.mark.thorough
def test_a_warning_before_the_time_limit_saves_and_requeues(muri):
    """`#SBATCH --signal`: the script is saved and goes back to the queue before Slurm ends it."""
    # Slurm looks every half minute, so that the signal comes soon after the limit is set, when the script is ready.
    job = submit(muri, "--time=30", "--signal=B:USR1@100")
    muri.cycle()
    wait_at_work(muri, job)
    muri.driver.run("scontrol", "update", f"JobId={job}", "TimeLimit=2", user="root")
    muri.driver.wait_state(job, "PENDING")
    muri.driver.run("scontrol", "update", f"JobId={job}", "TimeLimit=30", user="root")
    assert muri.driver.wait_state(job)["JobState"] == "COMPLETED"
    assert_resumed_once(muri, job)


def test_scancel_saves_and_ends_without_a_requeue(muri):
    job = submit(muri)
    muri.cycle()
    wait_at_work(muri, job)
    muri.driver.run("scancel", str(job))
    fields = muri.driver.wait_state(job)
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0")
    folder = ("ls", f".muri/checkpoints/{job}")
    muri.driver.wait_until(
        lambda: f"iteration-{STOPS_AT:010d}" in muri.driver.run(*folder).stdout, "the checkpoint of its last iteration"
    )


def test_slurms_own_requeue_resumes(muri):
    job = submit(muri)
    muri.cycle()
    wait_at_work(muri, job)
    muri.driver.run("scontrol", "requeue", str(job), user="root")
    assert muri.driver.wait_state(job)["JobState"] == "COMPLETED"
    assert_resumed_once(muri, job)


def test_a_member_that_stops_after_a_drain_goes_on_as_a_plain_job(muri):
    """It is warned of its time limit, as by `--signal`, when no controller is left."""
    with muri.training("load"):
        job, partner = submit(muri), muri.submit("load", iterations=5)
        muri.cycle()
        muri.wait_grouped(job, partner)
        wait_at_work(muri, job)
        drain = muri.driver.popen("muri", "drain", "--wait", "--json", user="root")
        muri.driver.run("scancel", "--batch", "--signal=USR1", str(job))
    try:
        states = [muri.driver.wait_state(each)["JobState"] for each in (job, partner)]
        printed, _ = drain.communicate(timeout=240)
    finally:
        drain.terminate()
    assert states == ["COMPLETED", "COMPLETED"]
    assert drain.returncode == 0
    passes = [json.loads(line) for line in printed.splitlines()]
    assert sorted(each for done in passes for each in done["restored"]) == [job]
    assert "muri-state" not in muri.driver.job(job)["AdminComment"]
    assert_resumed_once(muri, job)


STUBBORN_PY = """\
import os, signal, time
import muri

run = os.environ.get("SLURM_RESTART_COUNT", "0")
with open("stubborn.runs", "a+") as runs:
    runs.seek(0)
    left = [line for line in runs if os.path.exists("/proc/" + line.split()[1])]
    print(run, os.getpid(), len(left), file=runs)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while run == "0":
    with muri.stage("load"):
        time.sleep(0.1)
"""


@pytest.mark.thorough
def test_a_requeued_member_waits_for_its_own_first_run_and_is_requeued_no_more(accounted: Driver) -> None:
    """The first run ignores SIGTERM; Slurm starts the second, on a GPU of its own, before the group has killed it."""
    site = SiteCluster(accounted, "auto")
    stubborn = site.script("stubborn", STUBBORN_PY, "touch stubborn.runs")
    accounted.run("rm", "-f", "stubborn.runs")
    blockers = [site.block("on1", gpus=1) for _ in range(2)]
    mark = "--muri=model=load,batch-size=8,duration=60s"
    job = accounted.submit("-p", "on1", "--gres=gpu:1", mark, stubborn)
    partner = site.until_go("propagate", "-p", "on1")
    with site.controller():
        accounted.run("scancel", str(blockers[0]), user="bob")
        accounted.wait_until(lambda: accounted.run("cat", "stubborn.runs").stdout.startswith("0 "), "the first run")
        assert site.pilot(job) is not None
        accounted.run("scancel", str(blockers[1]), user="bob")
        accounted.run("scontrol", "requeue", str(job))
        fields = accounted.wait_state(job)
        site.go()
        accounted.wait_state(partner)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")
    assert [line.split()[::2] for line in accounted.run("cat", "stubborn.runs").stdout.splitlines()] == [
        ["0", "0"], ["1", "0"],
    ]  # fmt: skip
