"""Jobs on several GPUs and nodes: who is grouped, and what their pilot and members are."""

import dataclasses
from functools import partial

import at_work
import pytest
from at_work import behind_pilot, of_kind
from fake_slurm import FOUR_KINDS, make_job, make_node, told

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.gateway.submit_as import sbatch_arguments
from muri.slurm_plugin.node.pilot import runtime_command
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.gathered import gather, ranks_reason
from muri.slurm_plugin.planning.request import plan_job
from muri.slurm_plugin.planning.slurm_requests import dry_run_job, pilot_job
from muri.slurm_plugin.records.cluster import Job
from muri.slurm_plugin.records.roles import read_job

PROFILES = [
    dataclasses.replace(profile, key=dataclasses.replace(profile.key, gpu_count=gpu_count))
    for profile in FOUR_KINDS
    for gpu_count in (1, 2, 4)
]
GUESSED = dataclasses.replace(FOUR_KINDS[0].key, model="guessed", gpu_count=2)
PROFILES.append(dataclasses.replace(FOUR_KINDS[0], key=GUESSED, source="average"))
decided = partial(at_work.decided, known=PROFILES)
IDLE = (make_node("n1"), make_node("n2"))
GROUP = GroupSpec(members=(MemberSpec(job_id="1"), MemberSpec(job_id="2")))


def ddp(job_id: int, nodes: int = 2, gpus: int = 2, **changes):
    """A DDP job with a task per GPU; odd and even ids go well together."""
    fields = {
        "gpu_count": nodes * gpus, "gpu_request": f"gres/gpu:{gpus}", "node_count": nodes,
        "cpu_count": 2 * nodes * gpus,
        "cpus_per_task": 2, "admin_comment": f"muri:model={'m3' if job_id % 2 else 'm4'},batch-size=8,duration=100",
    }  # fmt: skip
    return make_job(job_id, **(fields | changes))


def test_a_group_over_two_nodes_asks_for_them_whole():
    (group,) = decided([ddp(1), ddp(2)], IDLE).actions
    assert isinstance(group, StartGroup)
    assert (group.node, group.node_count, group.gpus_per_node) == ("n[1-2]", 2, 2)
    assert [member.cpu_count for member in group.members] == [8, 8]
    pilot = pilot_job(group, "t", Config())
    assert (pilot.required_nodes, pilot.node_count, pilot.tasks_per_node, pilot.cpu_count) == ("n[1-2]", 2, 2, 1)
    assert pilot.gpu_request == "gres/gpu:2"
    assert (told(pilot).node_count, told(pilot).gpus_per_node) == (2, 2)
    arguments = sbatch_arguments(pilot, "mark")
    run = dry_run_job(read_job(ddp(1)), "t", {}, Config())
    assert (run.node_count, run.tasks_per_node, run.cpu_count) == (2, 2, 2)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=1"} <= set(arguments)


def test_two_nodes_are_never_one():
    """A node with four GPUs does not do for a job that asks for two nodes."""
    plan = decided([ddp(1), ddp(2)], [make_node("n1", gpu_count=4), make_node("n2", gpu_count=4, usable=False)]).plan
    assert not plan.groups
    assert len(plan.waiting) == 2
    assert "it needs 2 nodes" in str(plan.waiting[0].reasons[0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"cpu_count": 4, "cpus_per_task": 2}, ""),
        ({"cpu_count": 6, "cpus_per_task": 2}, "it has 3 tasks for 4 GPUs"),
        ({"gpu_request": ""}, "--gres=gpu:N"),
        ({"gpu_count": 3}, "without saying how many on each"),
    ],
)
def test_what_cannot_be_grouped_says_why(changes, reason):
    found = ranks_reason(ddp(1, **changes))
    assert reason in found
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("other", "grouping"),
    [(ddp(2), {"max_gpus_per_job": 1}), (ddp(2, nodes=1, gpus=2), {}), (ddp(2, cpu_count=6), {})],
)
def test_jobs_of_different_shapes_and_larger_ones_than_the_site_says_are_not_grouped(other, grouping):
    found = decided([ddp(1, nodes=2, gpus=2), other], IDLE, grouping=grouping)
    assert all(len(start.members) == 1 for start in of_kind(found, StartGroup))
    assert not found.plan.groups


def test_what_a_run_that_was_stopped_has_saved_is_time_on_each_of_its_gpus():
    cycle = at_work.cycle_of([ddp(1)], IDLE, known=PROFILES)
    cycle = dataclasses.replace(cycle, knowledge=dataclasses.replace(cycle.knowledge, saved_gpu_s={1: 40.0}))
    assert plan_job(gather(cycle).known[1], "main", gather(cycle)).remaining_s == 90.0


def test_a_step_of_several_ranks(tmp_path):
    command = runtime_command(dataclasses.replace(GROUP, node_count=2, gpus_per_node=2), tmp_path, tmp_path / "s.json")
    assert command[:5] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"]
    assert command[command.index("--world-size") + 1] == "4"
    alone = runtime_command(GROUP, tmp_path, tmp_path / "s.json")
    assert alone[:2] == ["srun", "--ntasks=1"]
    assert "--world-size" not in alone


def at_work_on(nodes: int) -> list[Job]:
    """A DDP job's pilot on two GPUs of each node, and the job as its only member."""
    asked = ddp(2001, nodes)
    shape = {name: getattr(asked, name) for name in ("gpu_count", "gpu_request", "node_count")}
    pilot, member = behind_pilot(1, asked, **shape)
    names = "n1" if nodes == 1 else f"n[1-{nodes}]"
    return [dataclasses.replace(pilot, nodes=names), dataclasses.replace(member, nodes=names, required_nodes=names)]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("cpus_allocated", "joins"), [(28, True), (29, False)])
def test_a_job_joins_one_of_the_same_shape_where_its_tasks_have_cpus(nodes, cpus_allocated, joins):
    jobs = [*at_work_on(nodes), ddp(2, nodes), ddp(4, nodes, gpus=1)]
    there = [
        make_node(f"n{index + 1}", gpus_allocated=2, cpu_count=32, cpus_allocated=cpus_allocated)
        for index in range(nodes)
    ]
    found = of_kind(decided(jobs, there), Join)
    told = [(join.pilot, join.member.job_id, join.member.cpu_count, join.node) for join in found]
    assert told == ([(1001, 2, 4 * nodes, "n1" if nodes == 1 else "n[1-2]")] if joins else [])


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, StartGroup),
        ({"cpus_per_task": 4}, ReleaseSolo),  # one task, which has processes for both GPUs, or does not
        ({"admin_comment": "muri:model=guessed,batch-size=8,duration=100"}, ReleaseSolo),
    ],
)
def test_a_measured_job_with_a_task_per_gpu_starts_joinable(changes, kind):
    (start,) = decided([ddp(1, nodes=1, **changes)], IDLE[:1]).actions
    assert type(start) is kind
    if isinstance(start, StartGroup):
        assert (start.gpus_per_node, start.members[0].cpu_count, start.cpu_count) == (2, 4, 1)
