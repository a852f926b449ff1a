"""No policy holds a job for ever: after max_wait_s every job is Slurm's, whatever the policy made of it."""

import pytest
from fake_slurm import FakeSlurm, make_job, make_node

from muri.policies.registry import describe_policies
from muri.slurm_plugin.records.cluster import JobState

NAMES = [info.name for info in describe_policies() if not info.simulated_only]
# Synergy's orders make no difference to who is overdue.
POLICIES = [name for name in NAMES if not name.startswith("synergy-") or name.endswith("-fifo")]

HARD = {
    "an unknown model": {"admin_comment": "muri:model=unknown,batch-size=8"},
    "alone by wish": {"admin_comment": "muri:model=unknown,batch-size=8,alone=1"},
    "more GPUs than any node has": {"gpu_count": 64, "gpu_request": "gres/gpu:64"},
    "more GPUs than the cluster has": {"gpu_count": 64, "gpu_request": "gres/gpu:8", "node_count": 8},
    "an odd number of GPUs on its nodes": {"gpu_count": 3, "gpu_request": "gres/gpu:2", "node_count": 2},
    "a partition without nodes": {"partition": "empty"},
    "more CPUs than any node has": {"cpu_count": 999, "cpus_per_task": 999},
    "more memory than any node has": {"mem_per_node_mib": 10**9},
    "a type of GPU that is nowhere": {"gpu_request": "gres/gpu:h100:1"},
    "a checkpoint": {"admin_comment": "muri:model=m1,batch-size=8,duration=100,checkpoint=1", "restart_count": 3},
}


def cycles(slurm: FakeSlurm, make_controller, policy: str) -> None:
    for _ in range(2):
        with make_controller(slurm, policy=policy, gpu_mem_gib={"gpu": 80.0}) as controller:
            controller.cycle()
        slurm.tick()


def held(slurm: FakeSlurm) -> list[str]:
    return [name for job_id, name in enumerate(HARD, start=2) if slurm.jobs[job_id].held]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_is_released_in_the_end(make_controller, policy):
    busy = make_job(1, state=JobState.RUNNING, held=False, nodes="n1", gpu_count=2, admin_comment="")
    jobs = [make_job(n, **changes) for n, changes in enumerate(HARD.values(), start=2)]
    slurm = FakeSlurm([busy, *jobs], [make_node("n1", mem_mib=64_000)])
    cycles(slurm, make_controller, policy)
    assert held(slurm)
    slurm.now_s += 3 * 86_400
    cycles(slurm, make_controller, policy)
    assert held(slurm) == []
