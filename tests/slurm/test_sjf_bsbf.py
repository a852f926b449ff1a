"""SJF-BSBF on a real Slurm: a short job joins a long one on its GPU, and trains as it would alone, in smaller parts."""

import json

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

TRAIN_PY = """\
import os, sys, time
import torch, muri

torch.set_num_threads(1)
torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(36, 6).double(), torch.randint(0, 3, (36,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
accumulate = muri.accumulate()
print("steps", accumulate.steps, "gpu", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
iterations, end = 0, sys.argv[1]
while iterations < 20 or not os.path.exists(end):
    for batch in loader:
        optimizer.zero_grad()
        sizes = []
        for inputs, targets in accumulate(batch):
            sizes.append(len(inputs))
            accumulate.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        if iterations < 20:
            print("loss", accumulate.loss.item(), *sizes, flush=True)
        iterations += 1
    time.sleep(0.05)
print("finished", os.environ["SLURM_JOB_ID"], flush=True)
"""

TRAIN_SH = '#!/bin/sh\nmuri run /home/alice/share.py "$@"\ncode=$?\necho "script ends with $code"\nexit $code\n'

STORE = """\
import json, sys
from pathlib import Path
from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
rows = json.loads(sys.argv[2])
with ProfileStore(Path(sys.argv[1]) / "profiles.db") as store:
    for model, batch, iteration_s, on_gpu, gpu_mem_gib in rows:
        times = (0.0, (1 - on_gpu) * iteration_s, on_gpu * iteration_s, 0.0)
        key = ProfileKey(model, batch, 1, "gpu")
        store.put(StageProfile(key, *times, iteration_s=iteration_s, iterations=20, gpu_mem_gib=gpu_mem_gib))
"""

KNOWN = [("long", 8, 1.0, 0.3, 6.0), ("short", 8, 0.5, 0.9, 8.0), ("short", 4, 0.3, 0.9, 5.0)]
"""Model, batch size, seconds per iteration, share of them on the GPU, and GiB of GPU memory."""


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    cluster = MuriCluster(one_gpu)
    cluster.configure(policy="sjf-bsbf", gpu_mem_gib={"gpu": 10.0}, grouping={"min_speed": 0})
    one_gpu.write("share.py", TRAIN_PY)
    one_gpu.write("share.sh", TRAIN_SH)
    cluster.python(STORE, cluster.state_dir, json.dumps(KNOWN))
    return cluster


def submit(muri: MuriCluster, mark: str, *arguments: str) -> int:
    return muri.driver.submit("-p", "train", "--gres=gpu:1", f"--muri={mark}", "/home/alice/share.sh", *arguments)


def losses(muri: MuriCluster, job: int) -> list[float]:
    return [float(line.split()[1]) for line in muri.output(job).splitlines() if line.startswith("loss")]


def sizes(muri: MuriCluster, job: int) -> list[list[str]]:
    return [line.split()[2:] for line in muri.output(job).splitlines() if line.startswith("loss")]


def test_a_short_job_joins_a_long_one_in_smaller_parts_and_trains_as_alone(muri):
    long = submit(muri, "model=long,batch-size=8,duration=2h", "/home/alice/end")
    muri.cycle()
    muri.driver.wait_until(lambda: len(losses(muri, long)) == 20, "the first job at work")
    (host,) = muri.hosts()

    short = submit(muri, "model=short,batch-size=8,duration=60s,accumulate=8", "/home/alice/end-short")
    muri.cycle()
    shown = muri.queue()
    assert (shown[short]["group"], shown[short]["partners"]) == (host, [long])
    assert "in 4 steps" in " ".join(shown[short]["reasons"])
    muri.driver.wait_until(lambda: len(losses(muri, short)) == 20, "the second job at work")
    muri.driver.write("end-short", "")
    ended = muri.driver.wait_state(short)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0")
    assert muri.driver.job(long)["JobState"] == "RUNNING"
    assert muri.hosts() == [host]

    muri.driver.write("end", "")
    ended = muri.driver.wait_state(long)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0")
    muri.driver.wait_state(host, "COMPLETED")

    first = {job: muri.output(job).splitlines()[0].split() for job in (long, short)}
    assert [first[job][1] for job in (long, short)] == ["1", "4"]
    assert first[long][3] == first[short][3] == "0"  # the same GPU
    # Both scripts train the same from the same seed; the long one ran alone then, with whole batches.
    assert losses(muri, short) == pytest.approx(losses(muri, long), rel=1e-9)
    assert (sizes(muri, long)[0], sizes(muri, short)[0], sizes(muri, short)[4]) == (["8"], ["2"] * 4, ["1"] * 4)
    for job in (long, short):
        assert muri.output(job).splitlines()[-2:] == [f"finished {job}", "script ends with 0"]


PAIRS = """\
import json, sys
from pathlib import Path
from muri.profiler.interference.ratios import every_pair
from muri.profiler.store import ProfileStore
with ProfileStore(Path(sys.argv[1]) / "profiles.db", read_only=True) as store:
    pairs = every_pair(store)
print(json.dumps([[*(side.key.model for side in (pair.a, pair.b)), *(side.ratio for side in (pair.a, pair.b)),
                   pair.source, pair.turns, pair.rounds] for pair in pairs]))
"""


@pytest.mark.parametrize(("discipline", "turns"), [("fair", True), ("auto", False)])
def test_how_a_running_pair_slows_each_other_down_counts_in_the_next_plan(muri, discipline, turns):
    """By the estimate two long jobs share with gain. Their profiles are far too fast, so they seem to lose much."""
    grouping = {"min_speed": 0, "discipline": discipline}
    muri.configure(policy="sjf-bsbf", grouping=grouping, profiles={"drift_limit": 0})
    fast = [("long", 8, 1e-4, 0.3, 1.0), ("short", 8, 1e-4, 0.9, 1.0)]
    muri.python(STORE, muri.state_dir, json.dumps(fast))
    first = submit(muri, "model=long,batch-size=8,duration=2h", f"/home/alice/end-first-{discipline}")
    muri.cycle()
    muri.driver.wait_until(lambda: len(losses(muri, first)) == 20, "the first job at work")
    second = submit(muri, "model=short,batch-size=8,duration=2h", f"/home/alice/end-second-{discipline}")
    muri.cycle()
    assert muri.queue()[second]["partners"] == [first]
    muri.driver.wait_until(lambda: len(losses(muri, second)) == 20, "the second job at work")

    def learnt():
        """What is known of the pair; under `auto` a group may take turns for a while before it shares plainly."""
        muri.cycle()
        pairs = json.loads(muri.python(PAIRS, muri.state_dir).stdout)
        return [pair for pair in pairs if pair[5] == turns]

    muri.driver.wait_until(learnt, "a pair that is learnt", deadline_s=300)
    ((model_a, model_b, ratio_a, ratio_b, source, _, rounds),) = learnt()
    assert (model_a, model_b, source) == ("long", "short", "learnt")
    assert rounds >= 3
    assert min(ratio_a, ratio_b) > 2
    listed = muri.driver.run(
        "muri", "profile", "pair", "--list", "--store", f"{muri.state_dir}/profiles.db", user="root"
    )
    assert "learnt, turns" in listed.stdout or not turns

    muri.driver.write(f"end-second-{discipline}", "")
    muri.driver.wait_state(second)
    third = submit(muri, "model=short,batch-size=8,duration=2h", "/home/alice/end-third")
    muri.cycle()
    shown = muri.queue()[third]
    assert shown["partners"] == []
    assert any(f"sharing with job {first} now would end both" in reason for reason in shown["reasons"])
    muri.driver.run("scancel", str(third), user="alice")
    muri.driver.write(f"end-first-{discipline}", "")
    muri.driver.wait_state(first, "COMPLETED")
