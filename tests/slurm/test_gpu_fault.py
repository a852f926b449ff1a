"""An error that ends the CUDA context, on a real Slurm: the culprit runs alone, its partners share again."""

import time
from collections.abc import Iterator

import pytest
from conftest import start
from muri_cluster import MuriCluster

from sandbox.cluster import Partition, Shape
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


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[Driver]:
    yield from start("forky", Shape(nodes=1, gpus_per_node=1, extra_partitions=(Partition("train", "n1"),)), "muri")


def test_culprit_is_barred_and_fails_alone_while_its_partners_finish(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu, f"/var/lib/muri-{time.monotonic_ns()}")
    muri.know_profiles()
    one_gpu.write("breaking.py", BREAKING_PY)
    one_gpu.write("breaking.sh", "#!/bin/sh\nexec muri run /home/alice/breaking.py\n")
    partners = [muri.submit(kind, iterations=80) for kind in ("load", "propagate")]
    mark = "--muri=model=preprocess,batch-size=8,duration=10s"
    culprit = one_gpu.submit("-p", "train", "--gres=gpu:1", mark, "/home/alice/breaking.sh")
    muri.cycle()
    muri.wait_grouped(*partners)
    (first,) = muri.hosts()
    one_gpu.wait_state(first, "FAILED", deadline_s=60)
    hosts = set()
    limit = time.monotonic() + 120
    while one_gpu.job(culprit)["JobState"] != "FAILED" or len(hosts) == 0:
        assert time.monotonic() < limit, [one_gpu.job(job)["JobState"] for job in (culprit, *partners)]
        muri.cycle()
        hosts |= set(muri.hosts()) - {first}
        time.sleep(0.5)
    fields = muri.cycles_until_ended(culprit, *partners)
    assert [fields[job]["JobState"] for job in partners] == ["COMPLETED"] * 2
    assert (fields[culprit]["JobState"], fields[culprit]["ExitCode"]) == ("FAILED", "1:0")
    assert {job["Restarts"] for job in fields.values()} == {"1"}
    assert len(hosts) == 1, "the partners shared the GPU again"
    assert muri.output(culprit).count("illegal memory access") == 2, "once in the group, once alone"
    assert "gres/gpu:1" in fields[culprit]["TresPerNode"]
