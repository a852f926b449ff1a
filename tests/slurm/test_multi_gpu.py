"""Groups of DDP jobs on several GPUs of a real Slurm: planned, run by srun steps, cancelled and killed."""

import pytest
from muri_cluster import MuriCluster, slow_in
from sandboxes import ROOT

from muri.profiler.records import ProfileKey
from sandbox.driver import DeadlineError, Driver

PARTITIONS = {1: "small", 2: "two"}
MODELS = {"computes": "propagate", "talks": "synchronize", "loads": "load"}
"""Models by the stage that is slow; a job's seed is the place of its model."""

#: More epochs for as long as ~/keep-<seed> exists: all ranks see the same end, whenever the test takes the file away.
EPOCHS = """
def epochs(least, seed):
    for epoch in range(10**6):
        kept = torch.tensor(float(os.path.exists(f"/home/alice/keep-{seed}")))
        dist.all_reduce(kept)
        if epoch >= least and not kept:
            return
        time.sleep(0.05)
        yield epoch


def main()"""

RUN = "muri run /home/alice/train_ddp.py --samples 256 --epochs $1 --seed $2"
SCRIPTS = {
    "srun": f'#!/bin/sh\n[ -z "$SLURM_RESTART_COUNT" ] || exec srun echo again\nexec srun --unbuffered {RUN}\n',
    "torchrun": f"#!/bin/sh\nexec python -m torch.distributed.run --standalone --no-python --nproc-per-node 2 {RUN}\n",
}


class DdpCluster(MuriCluster):
    """Partitions of one and two nodes with two GPUs each, by the number of nodes."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self.configure(partitions=list(PARTITIONS.values()))
        text = (ROOT / "examples" / "train_ddp.py").read_text().replace("import os\n", "import os\nimport time\n")
        text = text.replace("range(options.epochs)", "epochs(options.epochs, options.seed)")
        driver.write("train_ddp.py", text.replace("\ndef main()", EPOCHS))
        for name, script in SCRIPTS.items():
            driver.write(f"{name}.sh", script)
        self.know(*(slow_in(slow, ProfileKey(model, 32, n, "gpu")) for model, slow in MODELS.items() for n in (2, 4)))

    def submit_ddp(self, model: str, nodes: int, epochs: int = 1, script: str = "srun") -> int:
        """Submit a DDP job, two GPUs on each of its nodes."""
        tasks = 1 if script == "torchrun" else 2
        shape = ("-p", PARTITIONS[nodes], f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--gres=gpu:2")
        mark = f"--muri=model={model},batch-size=32,duration=60s"
        return self.driver.submit(*shape, mark, f"/home/alice/{script}.sh", str(epochs), str(list(MODELS).index(model)))

    def start(self, nodes: int, *models: str, script: str = "srun") -> list[int]:
        """Start a group and wait until all train on all their ranks; the test keeps them at work."""
        jobs = [self.submit_ddp(model, nodes, script=script) for model in models]
        with self.controller():
            try:
                self.driver.wait_until(
                    lambda: all(self.output(job).count("epoch 0 loss") == 2 * nodes for job in jobs), "all to train"
                )
            except DeadlineError as late:
                raise AssertionError(self.queue(), *map(self.output, jobs), self.controller_log()) from late
        assert len(self.pilots()) == 1, f"the jobs were not grouped: {self.queue()}"
        return jobs

    def ended(self, *jobs: int) -> None:
        """Wait until jobs have ended well, every epoch with the same loss on all ranks."""
        for job, fields in self.cycles_until_ended(*jobs).items():
            assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "0"), self.output(job)
            assert {len(losses) for losses in self.losses(job)} == {1}, self.output(job)

    def losses(self, job: int) -> list[set[str]]:
        """The loss of every epoch as each rank printed it."""
        epochs: dict[str, set[str]] = {}
        for line in self.output(job).splitlines():
            words = line.split()
            if words[:1] == ["rank"]:
                epochs.setdefault(words[3], set()).add(words[5])
        return list(epochs.values())

    def runtimes(self) -> list[str]:
        """Process ids of all hosts' runtimes, one for each rank."""
        pattern = "^[^ ]*python[^ ]* .*muri.launcher.runtime.main"
        return str(self.driver.run("pgrep", "-f", pattern, user="root", check=False).stdout).split()


@pytest.fixture
def ddp(cluster: Driver) -> DdpCluster:
    return DdpCluster(cluster)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_ddp_jobs_share_their_gpus_until_one_is_cancelled_on_all_ranks(ddp: DdpCluster, nodes: int) -> None:
    with ddp.training("0", "1"):
        first, second = ddp.start(nodes, "computes", "talks")
        ddp.driver.run("scancel", str(first), user="alice")
        assert ddp.driver.wait_state(first)["JobState"] == "CANCELLED"
        done = len(ddp.losses(second))
        ddp.driver.wait_until(lambda: len(ddp.losses(second)) > done + 2, "the other to go on")
    ddp.ended(second)
    assert ddp.losses(first)[0] != ddp.losses(second)[0]


@pytest.mark.thorough
def test_ranks_that_torchrun_starts_share_their_gpus_and_train_as_alone(ddp: DdpCluster) -> None:
    shape = ("-p", "two", "--gres=gpu:2", "--ntasks=1")
    alone = ddp.driver.submit(*shape, "/home/alice/torchrun.sh", "3", "0", user="alice")
    ddp.driver.wait_state(alone, "COMPLETED")
    with ddp.training("0", "1"):
        jobs = ddp.start(1, "computes", "talks", script="torchrun")
        ddp.driver.wait_until(lambda: all(len(ddp.losses(job)) > 3 for job in jobs), "three epochs")
    ddp.ended(*jobs)
    assert ddp.losses(jobs[0])[:3] == ddp.losses(alone) != ddp.losses(jobs[1])[:3]


def test_a_killed_rank_costs_no_job(ddp: DdpCluster) -> None:
    with ddp.training("0", "1"):
        jobs = ddp.start(2, "computes", "talks")
        runtimes = ddp.runtimes()
        assert len(runtimes) == 4
        with ddp.going_back(*jobs, partition=PARTITIONS[2]):
            ddp.driver.run("kill", "-KILL", runtimes[-1], user="root")
    for job, fields in ddp.cycles_until_ended(*jobs).items():
        assert (fields["JobState"], fields["Restarts"], fields["NumNodes"]) == ("COMPLETED", "1", "2")
        assert ddp.output(job).split() == ["again"] * 4
    assert ddp.runtimes() == []


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "nodes", "at_work"), [("muri-s", 2, 2), ("muri-s", 1, 1), ("sjf-bsbf", 1, 1)])
def test_a_job_joins_those_at_work_on_all_ranks(ddp: DdpCluster, policy: str, nodes: int, at_work: int) -> None:
    ddp.configure(policy=policy, partitions=list(PARTITIONS.values()), grouping={"min_speed": 0})
    with ddp.training("0", "1"):
        jobs = ddp.start(nodes, *list(MODELS)[:at_work])
        (pilot,) = ddp.pilots()
        joiner = ddp.submit_ddp("loads", nodes, epochs=3)
        ddp.cycle()
        shown = ddp.queue()[joiner]
        assert (shown["group"], set(shown["partners"])) == (pilot, set(jobs)), shown
        ddp.ended(joiner)
        assert {ddp.driver.job(job)["JobState"] for job in jobs} == {"RUNNING"}
    ddp.ended(*jobs)
