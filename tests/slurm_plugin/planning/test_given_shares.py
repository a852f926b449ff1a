"""CPUs and memory of a plan reach Slurm's jobs, and jobs get their own request back."""

from dataclasses import replace

import pytest
from at_work import candidate, cycle_of
from fake_slurm import FOUR_KINDS, NOW_S, FakeSlurm, Killed, make_job, make_node, one_cycle, run_cycles

from muri.policies.types import CpuMemShare, Group, NodeShare, Plan
from muri.profiler.records import ProfileDetail
from muri.profiler.sensitivity import SENSITIVITIES, CpuSensitivity, Point, SensitivityProfile
from muri.slurm_plugin.cli.look import explanation
from muri.slurm_plugin.config import Allocation
from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.slurm_requests import as_asked
from muri.slurm_plugin.planning.starts import share_of, start_group
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

TUNE = {"policy": "synergy", "profiling": {"at_once": 0}}
BOTH = Allocation()
GIB = 1024
pytestmark = pytest.mark.usefixtures("appetites")


def share(cpus, mem_gib=0.0, node="n1"):
    return CpuMemShare(node, cpus, mem_gib)


@pytest.fixture
def appetites(store):
    """A model that wants 9 CPUs and one that is content with 2."""
    hungry = CpuSensitivity((Point(1, 1.0), Point(9, 9.0), Point(16, 9.1)), 9, 0, 3)
    modest = CpuSensitivity((Point(2, 5.0), Point(16, 5.1)), 2, 0, 2)
    for name, cpu in (("hungry", hungry), ("modest", modest)):
        store.put_document(SENSITIVITIES, SensitivityProfile(name, "2026-01-01T00:00:00Z", cpu).to_document())


def two_jobs(**changes):
    jobs = [("hungry", 1), ("modest", 2)]
    return [make_job(each, admin_comment=f"muri:model={model},duration=100", **changes) for model, each in jobs]


def own_request(slurm, job_id):
    job = slurm.jobs[job_id]
    given = tags.parse_given(job.admin_comment)
    return (job.cpu_count, job.cpus_per_task, job.mem_per_node_mib, job.required_nodes, given)


UNTOUCHED = (4, 4, 0, "", None)


def test_synergy_sets_the_cpus_that_each_model_wants(make_controller):
    slurm = FakeSlurm(two_jobs(), [make_node("n1")])
    status = one_cycle(make_controller, slurm, **TUNE)
    hungry, modest = slurm.jobs[1], slurm.jobs[2]
    assert (hungry.cpu_count, hungry.cpus_per_task, hungry.required_nodes, hungry.held) == (9, 9, "n1", False)
    assert (modest.cpu_count, modest.cpus_per_task, modest.held) == (2, 2, False)
    assert tags.parse_given(hungry.admin_comment).original.cpu_count == 4
    assert read_job(hungry).role is Role.RELEASED
    assert "4 → 9 CPUs" in "\n".join(explanation(status[1]))


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 7))
def test_killed_at_any_call_each_job_runs_once_with_its_share(make_controller, side, nth):
    slurm = FakeSlurm(two_jobs(mem_per_cpu_mib=500, mem_per_node_mib=2000), [make_node("n1")])
    with pytest.raises(Killed), slurm.killing(side, nth):
        one_cycle(make_controller, slurm, **TUNE)
    left_over = [job for job in slurm.jobs.values() if job.held and tags.parse_given(job.admin_comment)]
    run_cycles(make_controller, slurm, 3, **TUNE)
    assert slurm.starts == {1: 1, 2: 1}
    assert [slurm.jobs[each].cpu_count for each in (1, 2)] == [9, 2]
    for job in left_over:  # what was cut off did not become "its own request"
        assert tags.parse_given(slurm.jobs[job.job_id].admin_comment).original.cpu_count == 4


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_drain_after_the_controller_died_gives_every_job_its_own_request(make_controller, nth):
    slurm = FakeSlurm(two_jobs(mem_per_cpu_mib=500, mem_per_node_mib=2000), [make_node("n1")])
    with pytest.raises(Killed), slurm.killing("after", nth):
        one_cycle(make_controller, slurm, **TUNE)
    assert drain(slurm, slurm.snapshot).failed == ()
    for each in (1, 2):
        assert own_request(slurm, each) == (4, 4, 2000, "", None)
        assert slurm.jobs[each].mem_per_cpu_mib == 500
        assert not slurm.jobs[each].held


@pytest.mark.parametrize("starts", [True, False])
def test_a_job_that_starts_while_a_drain_resets_it_is_no_failure(make_controller, starts):
    """The lease has ended, so Slurm may be quicker; of a running job it says that the node name is invalid."""
    slurm = FakeSlurm(two_jobs()[:1], [make_node("n1")], gate_license=True)
    slurm.jobs[1] = replace(slurm.jobs[1], licenses="muri_gate:1", held=False)
    with pytest.raises(Killed), slurm.killing("after", 3):
        one_cycle(make_controller, slurm, **TUNE)
    assert tags.parse_given(slurm.jobs[1].admin_comment)

    def refuse(job_id, change):
        if starts:
            slurm._update(job_id, state=JobState.RUNNING, nodes="n1")
        raise GatewayError(f"cannot change job {job_id}: Invalid node name specified for job {job_id}")

    slurm._modify = refuse
    assert bool(drain(slurm, slurm.snapshot).failed) != starts


def test_a_share_that_is_not_free_is_given_up_in_time(make_controller):
    slurm = FakeSlurm(two_jobs(), [make_node("n1"), make_node("n2")])
    for cpus in (9, 9, 4):
        one_cycle(make_controller, slurm, **TUNE)
        assert slurm.jobs[1].cpu_count == cpus
        slurm.now_s += 100
    assert own_request(slurm, 1) == UNTOUCHED
    assert not slurm.jobs[1].held


def test_a_job_that_slurm_refuses_to_change_starts_as_it_asked(make_controller):
    slurm = FakeSlurm(two_jobs(), [make_node("n1")])
    modify = slurm._modify

    def refuse(job_id, change):
        if change.cpu_count == 9:
            raise GatewayError("cannot change job 1: Requested node configuration is not available")
        modify(job_id, change)

    slurm._modify = refuse
    one_cycle(make_controller, slurm, **TUNE)
    slurm.tick()
    status = one_cycle(make_controller, slurm, **TUNE)
    assert own_request(slurm, 1) == UNTOUCHED
    assert slurm.starts == {1: 1, 2: 1}
    assert any("its own request after all" in why and "not available" in why for why in status[1].reasons)


@pytest.mark.parametrize("drained", [False, True])
def test_a_job_that_slurm_refuses_its_own_request_is_not_held_for_ever(make_controller, drained):
    slurm = FakeSlurm(two_jobs()[:1], [make_node("n1")])
    with make_controller(slurm, **TUNE) as controller:
        with slurm.killing("before", 3), pytest.raises(Killed):
            controller.cycle()
        assert slurm.jobs[1].held
        assert slurm.jobs[1].cpu_count == 9

        def refuse(job_id, change):
            raise GatewayError(f"cannot change job {job_id}: Access/permission denied")

        slurm._modify = refuse
        if drained:
            assert "permission denied" in drain(slurm, slurm.snapshot).failed[0]
        else:
            controller.cycle()
            assert slurm.jobs[1].held
            slurm.now_s += 200
            assert any("permission denied" in error for error in controller.cycle().errors)
    assert not slurm.jobs[1].held


def test_a_job_that_its_user_holds_gets_its_own_request_back_and_stays_held(make_controller):
    slurm = FakeSlurm(two_jobs(), [make_node("n1")])
    one_cycle(make_controller, slurm, **TUNE)
    assert slurm.jobs[1].cpu_count == 9
    assert tags.parse_given(slurm.jobs[1].admin_comment).original.cpu_count == 4
    assert as_asked(read_job(slurm.jobs[1])).required_nodes == ""
    slurm.hold(1)
    for _ in range(2):
        one_cycle(make_controller, slurm, **TUNE)
    assert slurm.jobs[1].held
    assert slurm.jobs[1].cpu_count == 4


@pytest.mark.parametrize(
    ("allocation", "cpus"),
    [
        ({"cpus": "both"}, [9, 2]),
        ({"cpus": "raise-only"}, [9, 4]),
        ({"cpus": "off", "memory": "off"}, [4, 4]),
    ],
)
def test_the_administrator_says_what_may_be_changed(make_controller, allocation, cpus):
    slurm = FakeSlurm(two_jobs(), [make_node("n1")])
    one_cycle(make_controller, slurm, **TUNE, allocation=allocation)
    assert [slurm.jobs[each].cpu_count for each in (1, 2)] == cpus


@pytest.mark.parametrize(
    ("asked", "cpus", "measured", "given"),
    [(8, 3.0, True, 3), (8, 3.0, False, 8), (8, 12.0, False, 12), (4, 0.1, True, 1)],
)
def test_cpus_go_below_the_request_only_where_they_were_measured(asked, cpus, measured, given):
    job = make_job(1, cpu_count=asked, cpus_per_task=asked)
    assert share_of(job, (share(cpus),), BOTH, measured=measured).cpu_count == given


@pytest.mark.parametrize(("asked_gib", "gib", "given_gib"), [(8, 2.0, 8), (8, 20.0, 20), (0, 20.0, 0)])
def test_memory_is_never_less_than_the_request_nor_limited_where_it_was_not(asked_gib, gib, given_gib):
    job = make_job(1, mem_per_node_mib=asked_gib * GIB)
    assert share_of(job, (share(4, gib),), BOTH, measured=True).mem_per_node_mib == given_gib * GIB


def test_tasks_and_nodes_get_whole_cpus_each():
    given = share_of(make_job(1, cpu_count=4, cpus_per_task=1), (share(9.0),), BOTH, measured=True)
    assert (given.cpu_count, given.cpus_per_task) == (8, 2)
    nodes = make_job(1, node_count=2, gpu_count=4, cpu_count=8, cpus_per_task=4)
    given = share_of(nodes, (share(3 * (16 / 3), node="n2"), share(20.0, node="n1")), BOTH, measured=True)
    assert (given.cpu_count, given.cpus_per_task, given.nodes) == (32, 16, "n[1-2]")


@pytest.mark.parametrize(("cpus", "given"), [(9.0, 8), (7.0, 6), (8.0, 8), (1.0, 1)])
def test_whole_cores_are_given(cpus, given):
    assert share_of(make_job(1), (share(cpus),), BOTH, measured=True, threads_per_core=2).cpu_count == given


@pytest.mark.parametrize(
    "changes", [{"array": True}, {"het": True}, {"node_count": 2}, {"special": ("--mem-per-gpu",)}]
)
def test_what_slurm_would_lay_out_differently_keeps_its_request(changes):
    assert share_of(make_job(1, **changes), (share(9.0),), BOTH, measured=True) is None


OFF = {"cpus": "off", "memory": "off"}


@pytest.mark.parametrize(
    ("allocation", "cpus", "pilot_cpus", "mem_gib"),
    [({}, (3.0, 7.0), 8, 6), ({}, (9.0, 9.0), 14, 6), ({}, (9.0,), 4, 2), (OFF, (9.0, 9.0), 4, 2)],
)
def test_a_pilot_gets_the_shares_of_its_threads(allocation, cpus, pilot_cpus, mem_gib):
    facts, harmless = f" {tags.FACTS_PREFIX}1.{'b' * 16}.{'c' * 16}..YQA", ProfileDetail(dangers=())
    jobs = [candidate(each, f"m{each}", mem_per_node_mib=GIB) for each in (1, 2)]
    jobs = [replace(job, admin_comment=job.admin_comment + facts) for job in jobs]
    known, nodes = [replace(each, detail=harmless) for each in FOUR_KINDS], [make_node("n1", cpu_count=16)]
    cycle = gather(cycle_of(jobs, nodes, known=known, allocation=allocation, grouping={"isolation": "auto"}))
    group = Group((1, 2), (NodeShare("n1", 1),), 1, 1.0, 0.9, {1: 0.9, 2: 0.9})
    shares = {each: (share(count, 3.0),) for each, count in enumerate(cpus, start=1)}
    start = start_group(group, Plan("p", (group,), cpu_mem_shares=shares), cycle)
    assert [member.isolation for member in start.members] == ["thread", "thread"]
    # A CPU for each member's own processes stays outside the pilot; the node has 16.
    assert (start.cpu_count, start.mem_per_node_mib) == (pilot_cpus, mem_gib * GIB)


def test_a_running_job_keeps_what_it_has(make_controller):
    slurm = FakeSlurm(two_jobs(), [make_node("n1")])
    preemption = {"enabled": True, "least_run_s": 0}
    with make_controller(slurm, **TUNE, preemption=preemption) as controller:
        controller.cycle()
        slurm.tick()
        (unit, _) = controller.decision().preparation.request.running
        assert unit.cpu_mem_shares == {1: (CpuMemShare("n1", 9.0, 0.0),)}
        assert unit.members[0].job_id == 1
        slurm.calls.clear()
        controller.cycle()
    assert slurm.calls == []
    assert slurm.jobs[1].state is JobState.RUNNING


def running_with_too_little(*, checkpoint):
    """A hungry job that was released with its own 4 CPUs and runs."""
    mark = "muri:model=hungry,duration=100000" + (",checkpoint=1" if checkpoint else "")
    job = make_job(
        1, admin_comment=mark, held=False, state=JobState.RUNNING, nodes="n1", start_s=NOW_S,
        comment=f"{tags.CHECKPOINT_PREFIX}0",
    )  # fmt: skip
    return FakeSlurm([job], [make_node("n1", cpus_allocated=4)])


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_share_changes_only_at_a_restart(make_controller, checkpoint):
    slurm = running_with_too_little(checkpoint=checkpoint)
    slurm.now_s += 1000
    preemption = {"enabled": True, "least_run_s": 0}
    run_cycles(make_controller, slurm, 4, **TUNE, preemption=preemption, tuning={"restart_s": 1})
    job = slurm.jobs[1]
    assert job.state is JobState.RUNNING
    assert (job.cpu_count, job.restart_count) == ((9, 1) if checkpoint else (4, 0))
    assert ("requeue_hold" in slurm.calls) == checkpoint
