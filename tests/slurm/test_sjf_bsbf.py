"""SJF-BSBF on a real Slurm: a short job joins a long one on its GPU, and trains as it would alone, in smaller parts."""

import json

import pytest
from muri_cluster import MuriCluster

from muri.profiler.interference import LEARNED
from muri.profiler.records import ProfileKey, StageProfile

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
iterations, kept = 0, f"/home/alice/keep-{sys.argv[1]}"
while iterations < 20 or os.path.exists(kept):
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


def profile(model: str, batch: int, iteration_s: float, on_gpu: float, gpu_mem_gib: float) -> StageProfile:
    """`on_gpu` is the share of an iteration that is on the GPU."""
    times_s = (0.0, (1 - on_gpu) * iteration_s, on_gpu * iteration_s, 0.0)
    key = ProfileKey(model, batch, 1, "gpu")
    return StageProfile(key, *times_s, iteration_s=iteration_s, iterations=20, gpu_mem_gib=gpu_mem_gib)


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.configure(policy="sjf-bsbf", gpu_mem_gib={"gpu": 10.0}, grouping={"min_speed": 0})
    muri.script("share", TRAIN_PY)
    return muri


def submit(muri: MuriCluster, mark: str, name: str) -> int:
    """Submit a job that trains for as long as the test keeps its name."""
    return muri.driver.submit("-p", "train", "--gres=gpu:1", f"--muri={mark}", "/home/alice/share.sh", name)


def losses(muri: MuriCluster, job: int) -> list[float]:
    return [float(line.split()[1]) for line in muri.output(job).splitlines() if line.startswith("loss")]


def sizes(muri: MuriCluster, job: int) -> list[list[str]]:
    return [line.split()[2:] for line in muri.output(job).splitlines() if line.startswith("loss")]


def wait_at_work(muri: MuriCluster, job: int) -> None:
    muri.driver.wait_until(lambda: len(losses(muri, job)) == 20, f"job {job} at work")


def test_a_short_job_joins_a_long_one_in_smaller_parts_and_trains_as_alone(muri):
    muri.know(profile("long", 8, 1.0, 0.3, 6.0), profile("short", 8, 0.5, 0.9, 8.0), profile("short", 4, 0.3, 0.9, 5.0))
    with muri.training("first"):
        long = submit(muri, "model=long,batch-size=8,duration=2h", "first")
        muri.cycle()
        wait_at_work(muri, long)
        (pilot,) = muri.pilots()
        with muri.training("second"):
            short = submit(muri, "model=short,batch-size=8,duration=60s,accumulate=8", "second")
            muri.cycle()
            shown = muri.queue()[short]
            assert (shown["group"], shown["partners"]) == (pilot, [long])
            assert "in 4 steps" in " ".join(shown["reasons"])
            wait_at_work(muri, short)
        ended = [muri.driver.wait_state(short)]
        assert muri.driver.job(long)["JobState"] == "RUNNING"
        assert muri.pilots() == [pilot]
    ended.append(muri.driver.wait_state(long))
    assert [(job["JobState"], job["ExitCode"]) for job in ended] == [("COMPLETED", "0:0")] * 2
    muri.driver.wait_state(pilot, "COMPLETED")

    first = {job: muri.output(job).splitlines()[0].split() for job in (long, short)}
    assert [first[job][1] for job in (long, short)] == ["1", "4"]
    assert first[long][3] == first[short][3] == "0"  # the same GPU
    # Both scripts train the same from the same seed; the long one ran alone then, with whole batches.
    assert losses(muri, short) == pytest.approx(losses(muri, long), rel=1e-9)
    assert (sizes(muri, long)[0], sizes(muri, short)[0], sizes(muri, short)[4]) == (["8"], ["2"] * 4, ["1"] * 4)
    for job in (long, short):
        assert muri.output(job).splitlines()[-1] == f"finished {job}"


@pytest.mark.parametrize(
    ("discipline", "turns"), [("fair", True), pytest.param("auto", False, marks=pytest.mark.thorough)]
)
def test_how_a_running_pair_slows_each_other_down_counts_in_the_next_plan(muri, discipline, turns):
    """By the estimate two long jobs share with gain. Their profiles are far too fast, so they seem to lose much."""
    grouping = {"min_speed": 0, "discipline": discipline}
    muri.configure(policy="sjf-bsbf", grouping=grouping, tuning={"drift_limit": 0})
    muri.know(profile("load", 8, 1e-4, 0.3, 1.0), profile("propagate", 8, 1e-4, 0.9, 1.0))

    def learned():
        """Return the known speeds of the pair; under `auto` a group may take turns at first."""
        pairs = json.loads(muri.pairs("--json"))["pairs"]
        return [pair for pair in pairs if pair["turns"] == turns and pair["rounds"] >= 3]

    first = muri.submit("load", iterations=72_000)
    muri.cycle()
    muri.wait_grouped(first)
    second = muri.submit("propagate", iterations=72_000)
    muri.cycle()
    assert muri.queue()[second]["partners"] == [first]
    with muri.controller():
        muri.driver.wait_until(learned, "a pair that is learned")
    muri.driver.run("scancel", str(second), user="alice")
    muri.driver.wait_state(second, "CANCELLED")
    (pair,) = learned()
    assert [pair[side]["key"]["model"] for side in "ab"] == ["load", "propagate"]
    assert pair["source"] == LEARNED
    assert min(pair[side]["ratio"] for side in "ab") > 2
    assert f"{LEARNED}, turns" in muri.pairs() or not turns

    third = muri.submit("propagate", iterations=72_000)
    muri.cycle()
    shown = muri.queue()[third]
    assert shown["partners"] == []
    assert any(f"sharing with job {first} now would end both" in reason for reason in shown["reasons"])
