"""An error that ends the CUDA context, on a real Slurm: a process fails alone, a thread takes its partners along."""

from muri_cluster import MuriCluster

from sandbox.driver import Driver

BREAKING_PY = """\
import time
import muri

for step in range(60):
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.01)
    if step == 20:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def start(one_gpu: Driver, muri: MuriCluster) -> tuple[list[int], int, int]:
    """Start a group; its two good members, the one that breaks, and the pilot job."""
    one_gpu.write("breaking.py", BREAKING_PY)
    one_gpu.write("breaking.sh", "#!/bin/sh\nexec muri run /home/alice/breaking.py\n")
    partners = [muri.submit(kind, iterations=80) for kind in ("load", "propagate")]
    mark = "--muri=model=preprocess,batch-size=8,duration=10s"
    culprit = one_gpu.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/breaking.sh")
    muri.cycle()
    muri.wait_grouped(*partners)
    (pilot,) = muri.hosts()
    return partners, culprit, pilot


def test_a_process_fails_alone_at_once(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    muri.know_profiles()
    partners, culprit, pilot = start(one_gpu, muri)
    fields = {job: one_gpu.wait_state(job) for job in (culprit, *partners)}
    assert [fields[job]["JobState"] for job in partners] == ["COMPLETED"] * 2
    assert (fields[culprit]["JobState"], fields[culprit]["ExitCode"]) == ("FAILED", "1:0")
    assert {job["Restarts"] for job in fields.values()} == {"0"}
    assert muri.output(culprit).count("RuntimeError: CUDA error") == 1
    one_gpu.wait_state(pilot, "COMPLETED")


def test_a_thread_is_barred_and_fails_alone_while_its_partners_finish(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    muri.configure(grouping={"isolation": "auto"})
    muri.know_profiles(dangers=())
    partners, culprit, first = start(one_gpu, muri)
    one_gpu.wait_state(first, "FAILED")
    hosts: set[int] = set()

    def culprit_failed_and_partners_share() -> bool:
        hosts.update(set(muri.hosts()) - {first})
        return one_gpu.job(culprit)["JobState"] == "FAILED" and bool(hosts)

    with muri.controller():
        one_gpu.wait_until(culprit_failed_and_partners_share, "the culprit's failure and another group")
    fields = muri.cycles_until_ended(culprit, *partners)
    assert [fields[job]["JobState"] for job in partners] == ["COMPLETED"] * 2
    assert (fields[culprit]["JobState"], fields[culprit]["ExitCode"]) == ("FAILED", "1:0")
    assert {job["Restarts"] for job in fields.values()} == {"1"}
    assert len(hosts) == 1, "the partners shared the GPU again"
    assert muri.output(culprit).count("RuntimeError: CUDA error") == 1, "what it wrote alone"
    assert "gres/gpu:1" in fields[culprit]["TresPerNode"]
