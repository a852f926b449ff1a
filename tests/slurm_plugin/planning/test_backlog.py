"""Slurm gets enough to choose from of the jobs that it alone decides about, not all at once; none is held for ever."""

from dataclasses import replace

import at_work
import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_license, make_job, make_node, run_cycles

from muri.policies.registry import describe_policies
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.actions import ReleaseSolo
from muri.slurm_plugin.planning.cycle_input import CycleInput
from muri.slurm_plugin.planning.decision import decide, to_let_go
from muri.slurm_plugin.records.cluster import Job, JobState


def cycle_of(*jobs: Job, idle_cpus: int = 0, backlog: int = 3) -> CycleInput:
    nodes = (
        make_node("n1", cpu_count=16, cpus_allocated=16 - idle_cpus, partitions=("main",)),
        make_node("n2", cpu_count=16, cpus_allocated=16, partitions=("other",)),
        make_node("n3", cpu_count=16, usable=False, partitions=("main",)),
    )
    return at_work.cycle_of(jobs, nodes, policy="auto", slurm_backlog=backlog)


def waiting(job_id: int, priority: int = 100, **changes: object) -> Job:
    """A job that no node can hold, which only Slurm can tell."""
    job = replace(behind_license(make_job(job_id, features="none")), priority=priority)
    return replace(job, **changes)  # type: ignore[arg-type]


def competing(job_id: int, reason: str = "Priority", **changes: object) -> Job:
    return replace(waiting(job_id), licenses="", reason=reason, **changes)  # type: ignore[arg-type]


def let_go(cycle: CycleInput, left: list[Job]) -> list[int]:
    return [job.job_id for job in to_let_go([cycle.view.jobs[job.job_id] for job in left], cycle.view, cycle.config)]


def test_the_highest_priority_goes_first_and_then_the_oldest() -> None:
    jobs = [waiting(1, 5), waiting(2, 9), waiting(3, 7), waiting(4, 7, submit_s=NOW_S - 5000), waiting(5, 1)]
    assert let_go(cycle_of(*jobs), jobs) == [2, 4, 3]


def test_idle_cpus_make_room_for_more_and_a_node_that_is_down_has_none() -> None:
    jobs = [waiting(number) for number in range(1, 20)]
    assert let_go(cycle_of(*jobs, idle_cpus=4), jobs) == [1, 2, 3, 4, 5, 6, 7]


def test_each_partition_has_its_own_portion() -> None:
    jobs = [waiting(number, partition=("main", "other")[number % 2]) for number in range(1, 11)]
    assert let_go(cycle_of(*jobs), jobs) == [1, 2, 3, 4, 5, 6]
    lists = [waiting(number, partition="main,other") for number in range(1, 11)]
    assert let_go(cycle_of(*lists, idle_cpus=1), lists) == [1, 2, 3, 4]


def test_those_that_compete_already_count_and_those_that_a_limit_stops_do_not() -> None:
    jobs = [waiting(number) for number in range(1, 11)]
    others = [competing(21), competing(22, "Resources"), competing(23, "QOSMaxGRESPerUser")]
    others += [competing(24, "Dependency", dependency="after:9")]
    assert let_go(cycle_of(*jobs, *others), jobs) == [1]
    blocked = [competing(number, "AssocGrpGRES") for number in range(21, 60)]
    assert let_go(cycle_of(*jobs, *blocked), jobs) == [1, 2, 3]  # other users' limits keep no job back
    enough = [competing(number) for number in range(21, 26)]
    assert let_go(cycle_of(*jobs, *enough), jobs) == []


def test_a_cycle_lets_a_portion_go_and_says_why_the_others_wait() -> None:
    cycle = cycle_of(*[waiting(number) for number in range(1, 6)])
    decision = decide(cycle, policy_of(cycle.config))
    assert [each.job_id for each in decision.actions if isinstance(each, ReleaseSolo)] == [1, 2, 3]
    assert {number for number, why in decision.preparation.waiting.items() if "slurm_backlog" in why} == {4, 5}


NAMES = [info.name for info in describe_policies() if info.live != "no"]
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


def two_cycles(slurm: FakeSlurm, make_controller, policy: str) -> None:
    run_cycles(make_controller, slurm, 2, policy=policy, gpu_mem_gib={"gpu": 80.0})


def held(slurm: FakeSlurm) -> list[str]:
    return [name for job_id, name in enumerate(HARD, start=2) if slurm.jobs[job_id].held]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_job_is_released_in_the_end(make_controller, policy):
    busy = make_job(1, state=JobState.RUNNING, held=False, nodes="n1", gpu_count=2, admin_comment="")
    jobs = [make_job(n, **changes) for n, changes in enumerate(HARD.values(), start=2)]
    slurm = FakeSlurm([busy, *jobs], [make_node("n1", mem_mib=64_000)])
    two_cycles(slurm, make_controller, policy)
    assert held(slurm)
    slurm.now_s += 3 * 86_400
    two_cycles(slurm, make_controller, policy)
    assert held(slurm) == []
