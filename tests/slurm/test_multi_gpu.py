"""Groups of DDP jobs on several GPUs of a real Slurm: planned, run by srun steps, cancelled and killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from muri_cluster import MuriCluster

from muri.profiler.records import STAGES, ProfileKey
from sandbox.driver import Driver

PARTITIONS = {1: "small", 2: "two"}

TRAIN_DDP_SH = """\
#!/bin/sh
epochs=$1
# A job that was requeued shall end soon.
[ -n "$SLURM_RESTART_COUNT" ] && epochs=1
srun --unbuffered muri run /home/alice/train_ddp.py --epochs $epochs --samples 512 --seed $2
code=$?
echo "script ends with $code"
exit $code
"""

TORCHRUN_SH = """\
#!/bin/sh
ranks="python -m torch.distributed.run --standalone --no-python --nproc-per-node 2"
exec $ranks muri run /home/alice/train_ddp.py --epochs $1 --samples 512 --seed $2
"""


class DdpCluster(MuriCluster):
    """Partitions of one and two nodes with two GPUs each, by the number of nodes."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.configure(partitions=list(PARTITIONS.values()))
        driver.write("train_ddp.py", (ROOT / "examples" / "train_ddp.py").read_text(), user="alice")
        driver.write("train_ddp.sh", TRAIN_DDP_SH, user="alice")
        driver.write("torchrun.sh", TORCHRUN_SH, user="alice")
        for model, slow in (("loads", "load"), ("computes", "propagate"), ("talks", "synchronize")):
            stage_s = [0.07 if stage == slow else 0.01 for stage in STAGES]
            for gpu_count in (2, 4):
                self.know_profile(ProfileKey(model, 32, gpu_count, "gpu"), stage_s)

    def submit_ddp(
        self, model: str, nodes: int, epochs: int, seed: int, *options: str, name: str = "train_ddp.sh", tasks: int = 2
    ) -> int:
        """Submit a DDP job, two GPUs on each of its nodes."""
        shape = (f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--gres=gpu:2", *options)
        mark = f"--muri=model={model},batch-size=32,duration=60s"
        script = (f"/home/alice/{name}", str(epochs), str(seed))
        return self.driver.submit("-p", PARTITIONS[nodes], *shape, mark, *script, user="alice")

    def start_pair(self, nodes: int, epochs: int, **how: Any) -> list[int]:
        """Start a group of two and wait until both train on all their ranks."""
        # Jobs of an earlier test may still be completing; on busy GPUs nothing would be grouped.
        self.driver.wait_until(lambda: self.node_states() == {"idle"}, "idle nodes")
        jobs = [self.submit_ddp(model, nodes, epochs, seed, **how) for seed, model in enumerate(("computes", "talks"))]
        self.cycle()
        for job in jobs:
            self.driver.wait_state(job, "RUNNING")
        assert len(self.hosts()) == 1, f"the jobs were not grouped: {self.queue()}"
        ranks = 2 * nodes
        self.driver.wait_until(
            lambda: all(self.output(job).count("epoch 0 loss") == ranks for job in jobs), "both to train"
        )
        return jobs

    def node_states(self) -> set[str]:
        """States of the nodes."""
        return set(self.driver.run("sinfo", "-h", "-N", "-o", "%t", user="root").stdout.split())

    def losses(self, job: int) -> list[set[str]]:
        """The loss of every epoch as each rank printed it."""
        epochs: dict[str, set[str]] = {}
        for line in self.output(job).splitlines():
            words = line.split()
            if words[:1] == ["rank"]:
                epochs.setdefault(words[3], set()).add(words[5])
        return list(epochs.values())

    def runtimes(self, host: int) -> list[int]:
        """Process ids of a host's runtimes, as this machine sees them."""
        job = f"SLURM_JOB_ID={host}".encode()
        cluster = f"SLURM_CLUSTER_NAME={self.cluster_name}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                variables = (path / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"muri.launcher.runtime.main" in words and b"srun" not in words and {job, cluster} <= set(variables):
                found.append(int(path.name))
        return sorted(found)

    @property
    def cluster_name(self) -> str:
        """Slurm's name of the cluster."""
        config = self.driver.run("scontrol", "show", "config", user="alice").stdout
        return next(line.split("=")[1].strip() for line in config.splitlines() if line.startswith("ClusterName"))


@pytest.fixture
def ddp(cluster: Driver) -> DdpCluster:
    return DdpCluster(cluster)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_group_of_ddp_jobs_shares_its_gpus(ddp: DdpCluster, nodes: int) -> None:
    jobs = ddp.start_pair(nodes, epochs=3)
    ended = ddp.cycles_until_ended(*jobs)
    for job in jobs:
        assert ended[job]["JobState"] == "COMPLETED", ddp.output(job)
        assert ended[job]["ExitCode"] == "0:0"
        assert ended[job]["Restarts"] == "0"
        assert ended[job]["NumNodes"] == str(nodes)
        assert [len(losses) for losses in ddp.losses(job)] == [1, 1, 1], ddp.output(job)
    assert ddp.losses(jobs[0]) != ddp.losses(jobs[1])


def test_ranks_that_torchrun_starts_share_their_gpus_and_train_as_alone(ddp: DdpCluster) -> None:
    how = {"name": "torchrun.sh", "tasks": 1}
    alone = ddp.driver.submit(
        "-p", "two", "--gres=gpu:2", "--ntasks=1", "/home/alice/torchrun.sh", "3", "0", user="alice"
    )
    ddp.driver.wait_state(alone, "COMPLETED")
    jobs = ddp.start_pair(1, 3, **how)
    ended = ddp.cycles_until_ended(*jobs)
    for job in jobs:
        assert (ended[job]["JobState"], ended[job]["Restarts"]) == ("COMPLETED", "0"), ddp.output(job)
        assert [len(losses) for losses in ddp.losses(job)] == [1, 1, 1], ddp.output(job)
    assert ddp.losses(jobs[0]) == ddp.losses(alone) != ddp.losses(jobs[1])


def test_a_cancelled_member_leaves_on_all_ranks_and_the_other_goes_on(ddp: DdpCluster) -> None:
    first, second = ddp.start_pair(2, epochs=20)
    ddp.driver.run("scancel", str(first), user="alice")
    ended = ddp.cycles_until_ended(first, second)
    assert ended[first]["JobState"] == "CANCELLED"
    assert ended[second]["JobState"] == "COMPLETED", ddp.output(second)
    assert ended[second]["Restarts"] == "0"
    assert len(ddp.losses(second)) == 20


def test_a_killed_rank_costs_no_job(ddp: DdpCluster) -> None:
    jobs = ddp.start_pair(2, epochs=100000)
    host = ddp.hosts()[0]
    runtimes = ddp.runtimes(host)
    assert len(runtimes) == 4
    with ddp.no_starts(PARTITIONS[2]), ddp.controller():
        os.kill(runtimes[-1], signal.SIGKILL)
        ddp.driver.wait_until(
            lambda: all("gres/gpu:2" in ddp.driver.job(job)["TresPerNode"] for job in jobs), "the way back of both"
        )
    ended = ddp.cycles_until_ended(*jobs)
    for job in jobs:
        assert ended[job]["JobState"] == "COMPLETED", ddp.output(job)
        assert ended[job]["Restarts"] == "1"
        assert ended[job]["NumNodes"] == "2"
    assert ddp.runtimes(host) == []


def test_a_job_on_two_gpus_starts_joinable_and_others_join_it_on_all_ranks(ddp: DdpCluster) -> None:
    ddp.driver.wait_until(lambda: ddp.node_states() == {"idle"}, "idle nodes")
    first = ddp.submit_ddp("computes", 1, 100_000, 0)
    ddp.cycle()
    ddp.driver.wait_state(first, "RUNNING")
    assert "others may join it" in str(ddp.queue()[first])
    (host,) = ddp.hosts()
    ddp.driver.wait_until(lambda: ddp.output(first).count("epoch 0 loss") == 2, "the first to train")
    joiners = [ddp.submit_ddp(model, 1, 3, seed) for seed, model in ((1, "talks"), (2, "loads"))]
    ddp.cycle()
    assert ddp.hosts() == [host], ddp.queue()
    ended = ddp.cycles_until_ended(*joiners)
    for job in joiners:
        assert (ended[job]["JobState"], ended[job]["Restarts"]) == ("COMPLETED", "0"), ddp.output(job)
        assert [len(losses) for losses in ddp.losses(job)] == [1, 1, 1], ddp.output(job)
    assert ddp.losses(joiners[0]) != ddp.losses(joiners[1])
    assert ddp.driver.job(first)["JobState"] == "RUNNING"
    ddp.driver.run("scancel", str(first), user="alice")
    ddp.driver.wait_state(first, "CANCELLED")


def test_under_sjf_bsbf_a_job_on_two_gpus_joins_one_on_the_same_two(ddp: DdpCluster) -> None:
    ddp.driver.wait_until(lambda: ddp.node_states() == {"idle"}, "idle nodes")
    ddp.configure(policy="sjf-bsbf", partitions=list(PARTITIONS.values()), grouping={"min_speed": 0})
    first = ddp.submit_ddp("computes", 1, 100_000, 0)
    ddp.cycle()
    ddp.driver.wait_state(first, "RUNNING")
    (host,) = ddp.hosts()
    ddp.driver.wait_until(lambda: ddp.output(first).count("epoch 0 loss") == 2, "the first to train")
    second = ddp.submit_ddp("loads", 1, 3, 1)
    ddp.cycle()
    shown = ddp.queue()[second]
    assert (shown["group"], shown["partners"]) == (host, [first]), shown
    assert f"sharing with job {first} now ends both after" in " ".join(shown["reasons"])
    ended = ddp.cycles_until_ended(second)
    assert (ended[second]["JobState"], ended[second]["Restarts"]) == ("COMPLETED", "0"), ddp.output(second)
    assert [len(losses) for losses in ddp.losses(second)] == [1, 1, 1], ddp.output(second)
    assert ddp.driver.job(first)["JobState"] == "RUNNING"
    ddp.driver.run("scancel", str(first), user="alice")
    ddp.driver.wait_state(first, "CANCELLED")


def test_a_job_joins_a_group_on_two_nodes(ddp: DdpCluster) -> None:
    jobs = ddp.start_pair(2, epochs=100_000)
    third = ddp.submit_ddp("loads", 2, 3, 2)
    ddp.cycle()
    assert len(ddp.hosts()) == 1, ddp.queue()
    assert ddp.driver.job(third)["Reason"] != "Licenses", ddp.queue()
    ended = ddp.cycles_until_ended(third)
    assert (ended[third]["JobState"], ended[third]["Restarts"]) == ("COMPLETED", "0"), ddp.output(third)
    assert [len(losses) for losses in ddp.losses(third)] == [1, 1, 1], ddp.output(third)
    assert {ddp.driver.job(job)["JobState"] for job in jobs} == {"RUNNING"}
    ddp.driver.run("scancel", *map(str, jobs), user="alice")
    for job in jobs:
        ddp.driver.wait_state(job, "CANCELLED")
