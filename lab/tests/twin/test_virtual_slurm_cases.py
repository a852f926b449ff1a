"""The cases of `slurm_cases.py`, which a real Slurm has answered, on the virtual one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from slurm_cases import CASES, World

from muri.slurm_plugin.records.cluster import Job, JobState, Node, task_numbers
from muri_lab.twin.clock import VirtualTime
from muri_lab.twin.gateway import VirtualGateway
from muri_lab.twin.programs import NodeSide, TrainingScript, Work
from muri_lab.twin.sharing import Iteration, Sharing
from muri_lab.twin.site import Site, SlurmConf, plain_nodes, shared_cpus
from muri_lab.twin.slurm import VirtualSlurm
from muri_lab.twin.submission import Submission, sbatch

LONGEST_S = 240.0


class VirtualWorld:
    """A virtual Slurm in the shape of the tests' sandbox."""

    def __init__(self) -> None:
        self.time = VirtualTime(1_700_000_000.0)
        conf = SlurmConf(bf_interval_s=1.0, cred_expire_s=10.0, kill_wait_s=5.0, min_job_age_s=7200.0)
        self.slurm = VirtualSlurm(self.time, Site(plain_nodes(4, 2, 16, 64_000), shared_cpus(), conf))
        self.nodes = NodeSide(self.slurm, Sharing())
        self.gateway = VirtualGateway(self.nodes)

    def submit(self, *, gpus: int = 0, node: str = "", hold: bool = False, begin_in_s: int = 0, requeue: bool = True,
               cpus: int = 1, seconds: int = 600, minutes: int = 0, dependency: str = "",
               licenses: str = "", tasks: int = 0, at_once: int = 0, mem_mib: int = 0,
               shares: bool = False) -> int:  # fmt: skip
        work = Work(Iteration((0.0, 0.0, 1.0, 0.0), 1.0), seconds, uses_muri=False)
        asked = Submission(
            self.time.now_s, "alice", 1001, work, gpus_per_node=gpus, required_nodes=node, held=hold,
            begin_s=self.time.now_s + begin_in_s if begin_in_s else 0.0, can_requeue=requeue, cpus_per_task=cpus,
            time_limit_s=60 * minutes, dependency=dependency, task_count=tasks, most_tasks=at_once,
            mem_per_node_mib=mem_mib, oversubscribe=shares,
        )  # fmt: skip
        job_id = sbatch(self.nodes, asked)
        self.slurm.update_by_owner(job_id, licenses=licenses, cpu_count=cpus, cpus_per_task=cpus)  # one task
        return job_id

    def layers(self) -> int:
        return self.slurm.site.limits.partition("main").oversubscribe

    def job(self, job_id: int) -> Job:
        return next(job for job in self.gateway.snapshot().jobs if job.job_id == job_id)

    def node(self, name: str) -> Node:
        return next(node for node in self.gateway.snapshot().nodes if node.name == name)

    def wait(self, job_id: int, state: JobState) -> None:
        end_s = self.time.now_s + LONGEST_S
        while self.slurm.jobs[job_id].state is not state:
            assert self.time.now_s < end_s, f"job {job_id} is {self.slurm.jobs[job_id]}"
            self.time.sleep(0.1)

    def wait_reason(self, job_id: int, reason: str) -> None:
        self.until(lambda: self.job(job_id).reason == reason)

    def until(self, reached: Callable[[], bool]) -> None:
        end_s = self.time.now_s + LONGEST_S
        while not reached():
            assert self.time.now_s < end_s
            self.time.sleep(0.1)

    def settle(self) -> None:
        self.time.sleep(3.0)

    def call(self, method: str, *arguments: Any) -> None:
        if method == "extend_lease_by":
            method, arguments = "extend_lease", (self.time.now_s + arguments[0],)
        getattr(self.gateway, method)(*arguments)

    def split_first(self, job_id: int, count: int) -> None:
        record = self.job(job_id)
        self.gateway.split_tasks(record, list(task_numbers(record.array_tasks))[:count])

    def release_by_user(self, job_id: int) -> None:
        self.slurm.release(job_id, "user")

    def hold_by_admin(self, job_id: int) -> None:
        self.slurm.hold(job_id, "admin")


@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub("_", "-", case.__name__))
def test_virtual_slurm(case: Callable[[World], None]) -> None:
    case(VirtualWorld())


def test_scripts_that_train_are_of_this_kind() -> None:
    world = VirtualWorld()
    assert isinstance(world.slurm.ledger[world.submit()].program, TrainingScript)
