"""Jobs on several GPUs and nodes: who is grouped, and what their pilot and members are."""

import dataclasses
import socket

import pytest
from fake_slurm import FOUR_KINDS, GPUS_REMOVABLE, NOW_S, make_job, make_node, told

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.gateway.submit_as import sbatch_arguments
from muri.slurm_plugin.node import pilot as pilot_process
from muri.slurm_plugin.node.pilot import runtime_command
from muri.slurm_plugin.planning.actions import Join, ReleaseSolo, StartGroup
from muri.slurm_plugin.planning.cycle_input import CycleInput, Knowledge
from muri.slurm_plugin.planning.decision import decide
from muri.slurm_plugin.planning.joinable import jobs_with_pilots
from muri.slurm_plugin.planning.node_room import node_room
from muri.slurm_plugin.planning.plan_actions import actions_of
from muri.slurm_plugin.planning.request import prepare, ranks_reason
from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.planning.slurm_requests import dry_run_job, pilot_job
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot
from muri.slurm_plugin.records.roles import read_job, view_of

PROFILES = {
    key: dataclasses.replace(profile, key=key)
    for profile in FOUR_KINDS
    for gpu_count in (1, 2, 4)
    for key in [dataclasses.replace(profile.key, gpu_count=gpu_count)]
}
GUESSED = dataclasses.replace(FOUR_KINDS[0].key, model="guessed", gpu_count=2)
PROFILES[GUESSED] = dataclasses.replace(FOUR_KINDS[0], key=GUESSED, source="average")
GROUP = GroupSpec(members=(MemberSpec(job_id="1"), MemberSpec(job_id="2")))


def ddp(job_id: int, nodes: int = 2, gpus: int = 2, **changes):
    """A DDP job with a task per GPU; odd and even ids go well together."""
    fields = {
        "gpu_count": nodes * gpus, "gpu_request": f"gres/gpu:{gpus}", "node_count": nodes,
        "cpu_count": 2 * nodes * gpus,
        "cpus_per_task": 2, "admin_comment": f"muri:model={'m3' if job_id % 2 else 'm4'},batch-size=8,duration=100",
    }  # fmt: skip
    return make_job(job_id, **(fields | changes))


def planned(*jobs, nodes: int = 2, **changes):
    """The actions of one cycle on idle nodes with two GPUs."""
    config = Config(**{"policy": "muri-s", **changes})
    nodes_there = tuple(make_node(f"n{index + 1}") for index in range(nodes))
    snapshot = Snapshot(NOW_S, "c", "26.05.5", jobs, nodes_there, gpu_removal=GPUS_REMOVABLE)
    view, know = view_of(snapshot), Knowledge(PROFILES)
    cycle = CycleInput(view, know, config)
    request, policy = prepare(cycle).request, policy_of(config)
    plan = policy.plan(request)
    joinable = jobs_with_pilots(request.jobs, policy, cycle)
    return actions_of(plan, cycle, SiteRoom(view), node_room(request.nodes, cycle), joinable), plan


def test_a_group_over_two_nodes_asks_for_them_whole():
    (group,), _ = planned(ddp(1), ddp(2))
    assert isinstance(group, StartGroup)
    assert (group.node, group.node_count, group.gpus_per_node) == ("n[1-2]", 2, 2)
    assert [member.cpu_count for member in group.members] == [4, 4]
    pilot = pilot_job(group, "t", Config())
    assert (pilot.required_nodes, pilot.node_count, pilot.tasks_per_node, pilot.cpu_count) == ("n[1-2]", 2, 2, 2)
    assert pilot.gpu_request == "gres/gpu:2"
    assert (told(pilot).node_count, told(pilot).gpus_per_node) == (2, 2)
    arguments = sbatch_arguments(pilot, "mark")
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=2"} <= set(arguments)


def test_a_group_on_two_gpus_of_one_node():
    (group,), _ = planned(ddp(1, nodes=1), ddp(2, nodes=1), nodes=1)
    assert (group.node, group.node_count, group.gpus_per_node) == ("n1", 1, 2)


def test_a_group_on_one_gpu_is_started_as_ever():
    jobs = [make_job(job, admin_comment=f"muri:model=m{job},batch-size=8,duration=100") for job in (1, 2, 3, 4)]
    actions, _ = planned(*jobs, nodes=1)
    group = next(action for action in actions if isinstance(action, StartGroup))
    pilot = pilot_job(group, "t", Config())
    assert (told(pilot).node_count, told(pilot).gpus_per_node) == (1, 1)
    assert (pilot.node_count, pilot.tasks_per_node) == (1, 1)


def test_jobs_of_different_shapes_are_not_grouped():
    actions, plan = planned(ddp(1, nodes=2, gpus=1), ddp(2, nodes=1, gpus=2), nodes=2)
    assert not [action for action in actions if isinstance(action, StartGroup)]
    assert not plan.groups


def test_two_nodes_are_never_one():
    """A node with four GPUs does not do for a job that asks for two nodes."""
    config = Config(policy="muri-s")
    nodes = (make_node("n1", gpu_count=4), make_node("n2", gpu_count=4, usable=False))
    view = view_of(Snapshot(NOW_S, "c", "26.05.5", (ddp(1), ddp(2)), nodes, gpu_removal=GPUS_REMOVABLE))
    plan = policy_of(config).plan(prepare(CycleInput(view, Knowledge(PROFILES), config)).request)
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


def test_a_limit_of_one_gpu_leaves_them_alone():
    actions, _ = planned(ddp(1), ddp(2), grouping={"max_gpus_per_job": 1})
    assert [type(action) for action in actions] == [ReleaseSolo]


def test_a_dry_run_has_the_shape_of_its_job():
    run = dry_run_job(read_job(ddp(1)), "t", {}, Config())
    assert (run.node_count, run.tasks_per_node, run.cpu_count) == (2, 2, 2)


def test_a_step_of_several_ranks(tmp_path):
    command = runtime_command(dataclasses.replace(GROUP, node_count=2, gpus_per_node=2), tmp_path, tmp_path / "s.json")
    assert command[:5] == ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"]
    assert command[command.index("--world-size") + 1] == "4"
    assert 0 < int(command[command.index("--order-port") + 1]) < 65536
    alone = runtime_command(GROUP, tmp_path, tmp_path / "s.json")
    assert alone[:2] == ["srun", "--ntasks=1"]
    assert "--world-size" not in alone


def test_the_port_is_free():
    port = pilot_process.free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port


def at_work(nodes: int) -> tuple[Job, ...]:
    """A DDP job's pilot on two GPUs of each node, and the job as its only member."""
    names = "n1" if nodes == 1 else f"n[1-{nodes}]"
    running = {"state": JobState.RUNNING, "held": False, "reason": "", "nodes": names, "start_s": NOW_S - 600}
    asked = ddp(2001, nodes, time_limit_s=3600)
    original = tags.Original(asked.gpu_request, "", asked.cpu_count, 2, 0, 3600)
    state = tags.STATE_PREFIX + tags.format_state(tags.MemberState(1001, original, limit_s=3600))
    member = dataclasses.replace(
        asked, gpu_count=0, gpu_request="", cpu_count=2 * nodes, cpus_per_task=1, required_nodes=names, **running,
        admin_comment=f"{asked.admin_comment} {state}",
    )  # fmt: skip
    pilot = ddp(1001, nodes, time_limit_s=4200, admin_comment=tags.PILOT_PREFIX + tags.format_pilot("t", (2001,)))
    return (dataclasses.replace(pilot, **running), member)


def cycle_with(*jobs: Job, nodes: int, **changes) -> CycleInput:
    """What runs fills all GPUs."""
    there = tuple(
        make_node(f"n{index + 1}", gpus_allocated=2, **{"cpu_count": 32, "cpus_allocated": 10, **changes})
        for index in range(nodes)
    )
    view = view_of(Snapshot(NOW_S, "c", "26.05.5", jobs, there, gpu_removal=GPUS_REMOVABLE))
    return CycleInput(view, Knowledge(PROFILES), Config(policy="muri-s"))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_joins_one_of_the_same_shape_on_all_ranks(nodes):
    cycle = cycle_with(*at_work(nodes), ddp(2, nodes), ddp(4, nodes, gpus=1), nodes=nodes)
    joins = [action for action in decide(cycle, policy_of(cycle.config)).actions if isinstance(action, Join)]
    (join,) = joins
    assert (join.pilot, join.member.job_id, join.member.cpu_count) == (1001, 2, 2 * nodes)
    assert join.node == ("n1" if nodes == 1 else "n[1-2]")


@pytest.mark.parametrize("nodes", [1, 2])
def test_nobody_joins_where_the_scripts_tasks_have_no_cpus(nodes):
    cycle = cycle_with(*at_work(nodes), ddp(2, nodes), nodes=nodes, cpus_allocated=31)
    assert decide(cycle, policy_of(cycle.config)).actions == ()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, StartGroup),
        ({"cpus_per_task": 4}, ReleaseSolo),  # one task, which has processes for both GPUs, or does not
        ({"admin_comment": "muri:model=guessed,batch-size=8,duration=100"}, ReleaseSolo),
    ],
)
def test_a_measured_job_with_a_task_per_gpu_starts_joinable(changes, kind):
    (start,), _ = planned(ddp(1, nodes=1, **changes), nodes=1, profiling={"mode": "in-place"})
    assert type(start) is kind
    if isinstance(start, StartGroup):
        assert (start.gpus_per_node, start.members[0].cpu_count) == (2, 2)
        # Of 16 CPUs, four scripts with a task per GPU keep eight.
        assert start.cpu_count == 4
