"""What administrators and users do to the jobs of a group beside Muri, on a real Slurm."""

import json
from typing import Any

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    cluster = MuriCluster(one_gpu)
    cluster.know_profiles()
    return cluster


def started_group(muri: MuriCluster) -> tuple[int, int, int]:
    """Two members at work, and their pilot job."""
    mark = "--muri=model={},batch-size=8,duration=60s"
    first, second = (
        muri.driver.submit(
            "-p", "train", "--gres=gpu:1", mark.format(kind), "/home/alice/train.sh", "100000", "0", kind
        )
        for kind in ("load", "propagate")
    )  # fmt: skip
    muri.cycle()
    muri.wait_grouped(first, second)
    (pilot,) = muri.hosts()
    return first, second, pilot


def test_suspend_stops_a_members_training_and_resume_lets_it_go_on(muri: MuriCluster) -> None:
    first, second, pilot = started_group(muri)

    def member(job: int) -> dict[str, Any]:
        path = f"/run/muri/1001/host-{pilot}.json"
        return json.loads(muri.driver.read(path))["members"][str(job)]

    def advances(job: int, iterations: int) -> None:
        wanted = member(job)["iterations"] + iterations
        muri.driver.wait_until(lambda: member(job)["iterations"] >= wanted, f"{iterations} iterations of {job}")

    advances(first, 2)
    muri.driver.run("scontrol", "suspend", str(first), user="root")
    muri.driver.wait_until(lambda: member(first)["paused"], "the pause")
    before = member(first)["iterations"]
    advances(second, 30)
    assert member(first)["iterations"] <= before + 1
    muri.driver.run("scontrol", "resume", str(first), user="root")
    advances(first, 10)
    muri.driver.run("scontrol", "suspend", str(first), user="root")
    muri.driver.wait_until(lambda: member(first)["paused"], "the second pause")
    muri.driver.run("scancel", str(first), user="alice")
    assert muri.driver.wait_state(first)["JobState"] == "CANCELLED"
    advances(second, 10)


def test_who_cancels_a_pilot_job_is_told_whom_to_cancel_and_a_hold_survives(muri: MuriCluster) -> None:
    first, second, pilot = started_group(muri)
    muri.driver.run("scontrol", "hold", str(first), user="root")
    muri.driver.run("scancel", str(pilot), user="alice")
    for job in (first, second):
        muri.driver.wait_state(job, "PENDING")
        words = f"pilot job {pilot}, which held the GPUs of its group, was cancelled or has reached its time limit"
        assert words in muri.output(job), muri.driver.read(f"/run/muri/1001/host-{pilot}.log")
        assert f"scancel {job}" in muri.output(job)
    reasons = {job: muri.driver.job(job)["Reason"] for job in (first, second)}
    assert reasons[first] == "JobHeldAdmin"
    assert "held" not in reasons[second].lower()
    log = muri.driver.read(f"/run/muri/1001/host-{pilot}.log")
    assert "To end one job of a group, cancel that job" in log


def test_a_script_in_another_encoding_and_a_comment_of_two_lines_are_no_obstacle_to_a_dry_run(
    muri: MuriCluster,
) -> None:
    write = "printf '#!/bin/sh\\n# caf\\351\\nmuri run /home/alice/train.py 500 0 load\\n' > latin1.sh"
    options = "-p train --gres=gpu:1 --muri=model=latin,batch-size=8,duration=60s"
    submit = f"sbatch --parsable {options} --comment=\"$(printf 'a\\nb')\" latin1.sh"
    job = int(muri.driver.run("sh", "-c", f"{write}; {submit}").stdout)
    with muri.controller():
        muri.driver.wait_until(lambda: "latin" in profiles(muri), "the profile")
        muri.driver.run("scancel", str(job), user="alice")


def profiles(muri: MuriCluster) -> str:
    """What `muri profile list` prints."""
    return muri.driver.run("muri", "profile", "list", user="root").stdout
