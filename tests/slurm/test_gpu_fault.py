"""An error that ends the CUDA context, on a real Slurm: a process fails alone, a thread takes its partners along."""

import pytest
from muri_cluster import MuriCluster

BREAKING_PY = """\
import os, time
import muri

while not os.path.exists("/home/alice/break"):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.01)
raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.script("breaking", BREAKING_PY)
    muri.driver.run("rm", "-f", "break")
    return muri


def start(muri: MuriCluster) -> tuple[list[int], int, int]:
    """Start a group; its two good members, the one that breaks, and the pilot job."""
    partners = [muri.submit(kind, iterations=5) for kind in ("load", "propagate")]
    mark = "--muri=model=preprocess,batch-size=8,duration=10s"
    culprit = muri.driver.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/breaking.sh")
    muri.cycle()
    muri.wait_grouped(*partners)
    muri.driver.wait_state(culprit, "RUNNING")
    (pilot,) = muri.pilots()
    return partners, culprit, pilot


def judge(muri: MuriCluster, partners: list[int], culprit: int, restarts: str) -> None:
    fields = muri.cycles_until_ended(culprit, *partners)
    assert [fields[job]["JobState"] for job in partners] == ["COMPLETED"] * 2
    assert (fields[culprit]["JobState"], fields[culprit]["ExitCode"]) == ("FAILED", "1:0")
    assert {job["Restarts"] for job in fields.values()} == {restarts}
    assert muri.output(culprit).count("RuntimeError: CUDA error") == 1
    assert "gres/gpu:1" in fields[culprit]["TresPerNode"] or restarts == "0"


def test_a_process_fails_alone_at_once(muri: MuriCluster) -> None:
    muri.know_profiles()
    with muri.training():
        partners, culprit, pilot = start(muri)
        muri.driver.write("break", "")
        muri.driver.wait_state(culprit, "FAILED")
    judge(muri, partners, culprit, "0")
    muri.driver.wait_state(pilot, "COMPLETED")


def test_a_thread_is_barred_and_fails_alone_while_its_partners_run_again(muri: MuriCluster) -> None:
    muri.configure(grouping={"isolation": "auto"})
    muri.know_profiles(dangers=())
    with muri.training():
        partners, culprit, first = start(muri)
        with muri.going_back(culprit, *partners):
            muri.driver.write("break", "")
    muri.driver.wait_state(first, "FAILED")
    judge(muri, partners, culprit, "1")
