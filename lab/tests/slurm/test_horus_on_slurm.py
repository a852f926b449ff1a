"""Horus on a real Slurm: a model that never ran is placed by its graph; who runs out of GPU memory asks for more."""

import json

import pytest
from muri_cluster import DRY_RUNS, MuriCluster

from sandbox.driver import Driver

pytestmark = DRY_RUNS

PARTITION = ["-p", "small", "--gres=gpu:1"]

MEASURED = """\
import sys
from pathlib import Path
from muri_lab.prediction.features import put_features
from muri_lab.prediction.features import GraphFeatures
from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore

def measured(family, batch_size):
    flops = 10**9 * batch_size * (1 + family)
    features = GraphFeatures(batch_size, 64, 256 * batch_size, 10**6, 4 * 10**6, 4 * 10**6, flops // 100,
                             flops // 200, flops // 3, flops, kernels=40, moved_bytes=flops // 20, matmuls=10, depth=10)
    load_s, propagate_s = 1e-3 * batch_size, flops / 1e12
    whole_s = load_s + propagate_s
    detail = ProfileDetail(gpu_utilization=propagate_s / whole_s)
    key = ProfileKey(f"family{family}", batch_size, 1, "gpu")
    stages = (load_s, 0.0, propagate_s, 0.0)
    return features, StageProfile(key, *stages, whole_s, gpu_mem_gib=2.0, iterations=20, detail=detail)

with ProfileStore(Path(sys.argv[1])) as store:
    for family in range(10):
        for batch_size in (4, 8, 16, 32):
            features, profile = measured(family, batch_size)
            store.put(profile)
            put_features(store, profile.key, features)
"""

NET_PY = """\
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
"""

TRAIN_PY = """\
import os, time
import muri

print("started", os.environ["SLURM_JOB_ID"], flush=True)
while os.path.exists("/home/alice/keep-training"):
    for stage in ("load", "propagate"):
        with muri.stage(stage):
            time.sleep(0.02)
"""

# Stands in for PyTorch's error, which only a GPU raises; the second run finds the memory that it asked for.
HUNGRY_PY = """\
import os, time
import muri

class OutOfMemoryError(RuntimeError):
    pass

print("started", os.environ["SLURM_JOB_ID"], flush=True)
for step in range(20):
    with muri.stage("propagate"):
        time.sleep(0.05)
if not os.environ.get("SLURM_RESTART_COUNT"):
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
print("finished", flush=True)
"""


@pytest.fixture
def muri(cluster: Driver) -> MuriCluster:
    site = MuriCluster(cluster)
    site.configure(policy="horus", partitions=["small"], gpu_mem_gib={"gpu": 24.0})
    site.script("patient", TRAIN_PY)
    site.script("hungry", HUNGRY_PY)
    site.python(MEASURED, f"{site.state_dir}/profiles.db")
    return site


def submit(muri: MuriCluster, model: str, script: str) -> int:
    mark = f"--muri=model={model},batch-size=8,duration=60s"
    return muri.driver.submit(*PARTITION, mark, "--open-mode=append", f"/home/alice/{script}.sh")


def all_end_well(muri: MuriCluster, *jobs: int) -> None:
    ended = muri.cycles_until_ended(*jobs)
    assert {fields["JobState"] for fields in ended.values()} == {"COMPLETED"}


def cycles_until(muri: MuriCluster, what: str, *jobs: int) -> None:
    """Have a controller at work until the jobs' outputs say so."""
    with muri.controller():
        muri.driver.wait_until(lambda: all(what in muri.output(job) for job in jobs), f"{what!r} of jobs {jobs}")


@pytest.mark.thorough
def test_a_model_that_never_ran_is_placed_by_its_graph_and_shares_a_gpu(muri: MuriCluster) -> None:
    muri.driver.write("net.py", NET_PY, user="root")
    graph = ("--module", "net.py:build", "--input", "64", "--batch-size", "8", "--keep-as", "newcomer")
    store = ("--store", f"{muri.state_dir}/profiles.db")
    assert json.loads(muri.driver.run("muri-lab", "predict", *graph, *store, "--json", user="root").stdout)
    with muri.training():
        jobs = [submit(muri, "newcomer", "patient") for _ in range(3)]
        muri.cycle()
        pilots = muri.pilots()
        assert len(pilots) == 2  # both GPUs have a job that was never measured, before any dry run
        cycles_until(muri, "started", *jobs)
        assert sorted(muri.pilots()) == sorted(pilots)  # the third one joined
        texts = [muri.explain(job) for job in jobs]
    assert all("never measured here" in text and "predicted from its model's graph" in text for text in texts)
    assert "shares GPUs with" in texts[2]
    all_end_well(muri, *jobs)


def test_who_runs_out_of_gpu_memory_beside_others_comes_back_and_asks_for_more(muri: MuriCluster) -> None:
    with muri.training():
        partners = [submit(muri, "family1", "patient") for _ in range(2)]
        cycles_until(muri, "started", *partners)
        hungry = submit(muri, "family2", "hungry")
        cycles_until(muri, "finished", hungry)
        assert all(muri.driver.job(job)["JobState"] == "RUNNING" for job in partners)
    output = muri.output(hungry)
    assert output.count("started") == 2
    assert "asks for more next time" in output
    asks = "import sys; from pathlib import Path; from muri.slurm_plugin.records.journal import Journal;"
    asks += "print(*Journal(Path(sys.argv[1])).facts('gpu-mem').values())"
    assert muri.python(asks, f"{muri.state_dir}/journal.db").stdout.split() == ["3.0"]  # its profile says 2 GiB
    all_end_well(muri, *partners, hungry)
    assert muri.driver.job(hungry)["Restarts"] == "1"
