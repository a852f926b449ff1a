"""On a real Slurm: synergy sets each job's CPUs and memory before it starts, and `muri drain` takes them back."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from muri_cluster import DRY_RUNS, MuriCluster, slow_in
from sandboxes import GATEWAY
from test_end_to_end import KILL

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.records import comment_tags as tags
from sandbox.driver import Driver

pytestmark = DRY_RUNS

TRAIN_SH = """\
#!/bin/sh
echo "batch cpus=$SLURM_CPUS_ON_NODE per_task=$SLURM_CPUS_PER_TASK memory=$SLURM_MEM_PER_NODE node=$SLURMD_NODENAME"
srun sh -c 'echo "step cpus=$SLURM_CPUS_ON_NODE per_task=$SLURM_CPUS_PER_TASK"'
muri run /home/alice/train.py 5 0 load || exit
muri run /home/alice/cached.py || exit
# Until the test has seen it run.
while [ ! -e /home/alice/seen-$SLURM_JOB_ID ]; do sleep 0.1; done
"""

CACHED_PY = """\
import muri
print(f"cache of {muri.cache([1, 2]).gib * 1024:.0f} MiB")
"""

APPETITES = """\
import sys
from pathlib import Path
from muri.profiler.sensitivity import SENSITIVITIES, CpuSensitivity, Point, SensitivityProfile
from muri.profiler.store import ProfileStore
curves = {
    "hungry": CpuSensitivity((Point(1, 1.0), Point(9, 9.0), Point(16, 9.1)), 9, 0, 3),
    "modest": CpuSensitivity((Point(1, 2.5), Point(2, 5.0), Point(16, 5.1)), 2, 0, 3),
}
with ProfileStore(Path(sys.argv[1])) as store:
    for name, cpu in curves.items():
        profile = SensitivityProfile(name, "2026-01-01T00:00:00Z", cpu, process_gib=2.0)
        store.put_document(SENSITIVITIES, profile.to_document())
"""

FRESH_PY = """\
import os, time
import muri
cpus = int(os.environ.get("MURI_CPUS") or os.environ["SLURM_CPUS_ON_NODE"])
for _ in muri.batches(range(100_000)):
    with muri.stage("preprocess"):
        time.sleep(0.06 / min(cpus, 2))
    with muri.stage("propagate"):
        time.sleep(0.005)
"""

STORED_PY = """\
import os, time
import muri

class Files:
    def __len__(self):
        return 8000
    def __getitem__(self, index):
        if os.environ.get("MURI_DRY_RUN"):  # later runs find them in the page cache
            time.sleep(0.02)
        return bytes(1 << 16)

data = muri.cache(Files(), gib=0.2)
def batches():
    for start in range(0, 8000, 4):
        yield [data[index] for index in range(start, start + 4)]
for _ in muri.batches(batches(), prefetch=0):
    with muri.stage("propagate"):
        time.sleep(0.005)
"""

GIVE = """\
import sys, time
from muri.policies.types import CpuMemShare
from muri.slurm_plugin.config import Allocation
from muri.slurm_plugin.planning.starts import share_of
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.execute.gate import give_share
gateway = open_gateway(sys.argv[1])
for job in gateway.snapshot().jobs:
    if str(job.job_id) in sys.argv[2:]:
        share = share_of(job, (CpuMemShare("n1", 8.0, 20.0),), Allocation(), measured=True)
        print(job.job_id, give_share(gateway, job, share, time.time()) or "given")
"""


class Site(MuriCluster):
    """One node with two GPUs and 16 CPUs, planned by synergy."""

    def __init__(self, driver: Driver, gateway: str) -> None:
        super().__init__(driver)
        self.gateway = gateway
        self.configure(policy="synergy", partitions=["small"], gateway=gateway, profiling={"at_once": 0})
        self.python(APPETITES, f"{self.state_dir}/profiles.db")
        self.know(*(slow_in("preprocess", ProfileKey(model, 8, 1, "gpu")) for model in ("hungry", "modest")))
        driver.write("resources.sh", TRAIN_SH, user="alice")
        driver.write("cached.py", CACHED_PY, user="alice")

    def submit_model(self, model: str, *options: str) -> int:
        mark = f"--muri=model={model},batch-size=8,duration=60s"
        return self.driver.submit("-p", "small", "--gres=gpu:1", mark, *options, "/home/alice/resources.sh")

    def asked(self, job: int) -> dict[str, Any]:
        """What of a pending job Muri may change, as `scontrol show job` tells it."""
        names = ("NumCPUs", "NumTasks", "CPUs/Task", "MinCPUsNode", "MinMemoryNode", "MinMemoryCPU", "ReqNodeList")
        fields = self.driver.job(job)
        return {name: fields.get(name) for name in names}

    def seen(self, *jobs: int) -> dict[int, dict[str, str]]:
        """Let jobs end that the test has seen run, and return their fields then."""
        self.driver.run("touch", *(f"/home/alice/seen-{job}" for job in jobs), user="alice")
        return self.cycles_until_ended(*jobs)


@pytest.fixture(params=[f"forky-{GATEWAY}", "bookworm-command"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    suite, _, gateway = request.param.partition("-")
    driver: Driver = request.getfixturevalue("sandbox" if suite == "forky" else "old_sandbox")
    driver.cancel_all()
    yield Site(driver, gateway)
    driver.cancel_all()


def test_jobs_run_on_the_cpus_that_synergy_gives_them(site: Site) -> None:
    hungry = site.submit_model("hungry", "-c", "4", "--mem-per-cpu=500")
    modest = site.submit_model("modest", "-c", "4", "--mem=3000")
    site.cycle()
    for job, cpus in ((hungry, "9"), (modest, "2")):
        site.driver.wait_state(job, "RUNNING")
        assert site.driver.job(job)["NumCPUs"] == cpus
    listed = site.driver.run("squeue", "-h", "-t", "all", "-j", f"{hungry},{modest}", "-o", "%i %C %u").stdout
    assert sorted(listed.split("\n"))[1:] == sorted([f"{hungry} 9 alice", f"{modest} 2 alice"])
    told = site.queue()[hungry]
    assert (told["cpu_count"], told["asked_cpu_count"], told["state"]) == (9, 4, "alone")
    assert "4 → 9 CPUs" in site.explain(hungry)
    ended = site.seen(hungry, modest)
    # Memory: the 2 GiB that the model was measured to need, and 3000 MiB because the user asked for no less.
    for job, cpus, mem_mib in ((hungry, 9, 2048), (modest, 2, 3000)):
        output = site.output(job)
        assert (ended[job]["JobState"], ended[job]["ExitCode"]) == ("COMPLETED", "0:0"), output
        assert f"batch cpus={cpus} per_task={cpus} memory={mem_mib} node=n1" in output
        assert f"step cpus={cpus} per_task={cpus}" in output
        assert f"finished {job}" in output
        # A tenth stays free, and the script itself needs some.
        assert 0.8 * mem_mib < float(output.partition("cache of ")[2].split()[0]) < 0.9 * mem_mib, output
        assert ended[job]["Restarts"] == "0"


def test_a_start_that_was_cut_off_is_undone_to_the_letter(site: Site) -> None:
    requests = (("-c", "4", "--mem-per-cpu=500"), ("-n", "4"), ("--mem=3000",))
    jobs = [site.submit_model("hungry", *options) for options in requests]
    before = [site.asked(job) for job in jobs]
    # As a controller that dies before it releases the jobs.
    done = site.python(GIVE, site.gateway, *map(str, jobs)).stdout
    assert done.splitlines() == [f"{job} given" for job in jobs]
    for job in jobs:
        given = site.asked(job)
        assert (given["NumCPUs"], given["ReqNodeList"], given["MinMemoryNode"]) == ("8", "n1", "20G")
    with site.no_starts("small"):  # as Slurm may as soon as a drain has ended the lease
        drained = json.loads(site.driver.run("muri", "drain", "--json", user="root").stdout)
        assert sorted(drained["released"]) == sorted(jobs)
        assert [site.asked(job) for job in jobs] == before
    assert not any(tags.GIVEN_PREFIX in site.driver.job(job).get("AdminComment", "") for job in jobs)


def test_a_controller_killed_between_change_and_start_loses_nothing(cluster: Driver) -> None:
    site = Site(cluster, GATEWAY)
    job = site.submit_model("hungry", "-c", "4", "--mem-per-cpu=500")
    site.python(KILL, "3", "before", check=False)
    left = cluster.job(job)
    assert (left["JobState"], left["Licenses"], left["NumCPUs"]) == ("PENDING", "muri_gate:1", "9")
    ended = site.seen(job)[job]
    assert (ended["JobState"], ended["ExitCode"], ended["NumCPUs"], ended["Restarts"]) == ("COMPLETED", "0:0", "9", "0")
    given = tags.parse_given(ended["AdminComment"])
    assert given is not None
    assert (given.original.cpu_count, given.original.mem_per_cpu_mib) == (4, 500)
    assert site.output(job).count("batch cpus=9") == 1


def arrive(site: Site, model: str, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The second of two jobs of a new model, and the sensitivity that the first one's dry run finds."""
    site.configure(policy="synergy", profiling={"partition": "measure"})
    driver, script = site.driver, site.script(model, text)
    mark = f"--muri=model={model},batch-size=8"
    jobs = [driver.submit("-p", "train", "--gres=gpu:1", mark, "-c", "1", *options, script) for _ in range(2)]
    found: list[dict[str, Any]] = []

    def measured() -> bool:
        sweep = json.loads(site.profile("show", model, "--user", "alice", "--json"))["sweep"]
        found.append(sweep)
        return sweep is not None

    with site.controller():
        driver.wait_until(measured, "the sensitivity of the new model")
    driver.run("scancel", str(jobs[0]), user="alice")
    with site.controller():  # the other one starts with what was measured
        driver.wait_state(jobs[1], "RUNNING", "COMPLETED")
    return jobs[1], found[-1]


def test_a_new_models_cpus_are_measured_on_arrival(one_gpu: Driver) -> None:
    site = Site(one_gpu, GATEWAY)
    job, body = arrive(site, "fresh", FRESH_PY)
    rates = {point["cpus"]: point["throughput"] for point in body["points"]}
    assert min(rates) == 1 and max(rates) >= 2, rates
    assert rates[max(rates)] > 1.4 * rates[1], rates
    assert body["saturating_cpus"] == 2
    assert body["process_gib"] > 0
    assert body["dataset"] is None
    assert one_gpu.job(job)["NumCPUs"] == "2"
    assert "1 → 2 CPUs" in site.explain(job)


def test_a_new_models_dataset_is_measured_on_arrival_and_gets_memory(one_gpu: Driver) -> None:
    site = Site(one_gpu, GATEWAY)
    job, body = arrive(site, "stored", STORED_PY, "--mem=300")
    dataset = body["dataset"]
    assert dataset["dataset_gib"] == pytest.approx(8000 / 2**14, rel=0.01)
    assert dataset["batch_mib"] == pytest.approx(0.25, rel=0.01)
    assert 0 < dataset["storage_mib_per_s"] < 3.2  # 64 KiB in 20 ms
    assert dataset["overlap"] < 0.1
    assert min(point["throughput"] for point in body["points"]) > 25  # measured as if all were in memory
    # All but a few of its 500 MiB, and its processes.
    assert 480 < float(one_gpu.job(job)["MinMemoryNode"].removesuffix("M")) < 1000
