"""On a real Slurm: a model never seen starts at once, and is measured while its job trains."""

from muri_cluster import MuriCluster

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
