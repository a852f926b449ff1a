"""Stops, returns and joins in the controller's cycle: only jobs that may be stopped, none lost, none run twice."""

from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm, Killed, make_job, make_node, one_cycle, pilots, run_cycles

from muri.policies.types import FreeNode, Group, NodeShare, Plan, PlanJob, PlanRequest, Running, Solo, Waiting
from muri.slurm_plugin.execute.gate import stop
from muri.slurm_plugin.planning.asking import settle
from muri.slurm_plugin.planning.running import running_units
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.roles import Role, read_job

pytestmark = pytest.mark.configuration(tuning={"restart_s": 0})
PREEMPTION = {"enabled": True, "least_run_s": 0}
ALONE = {"max_group_size": 1}


def job(job_id: int, duration_s: int = 100, checkpoint: bool = True, **changes):
    mark = f"muri:model=m{(job_id - 1) % 4 + 1},batch-size=8,duration={duration_s}"
    return make_job(job_id, admin_comment=mark + (",checkpoint=1" if checkpoint else ""), **changes)


def register(slurm: FakeSlurm, job_id: int) -> None:
    """What the script's call of muri.checkpoint leads to."""
    slurm._update(job_id, comment=f"{tags.CHECKPOINT_PREFIX}{slurm.jobs[job_id].restart_count}")


def run_long_then_submit_short(make_controller, *, checkpoint: bool = True, registered: bool = True) -> FakeSlurm:
    slurm = FakeSlurm([job(1, 100_000, checkpoint)], [make_node("n1", gpu_count=1)])
    one_cycle(make_controller, slurm, policy="srtf", preemption=PREEMPTION, grouping=ALONE)
    slurm.tick()
    assert slurm.jobs[1].state is JobState.RUNNING
    if registered:
        register(slurm, 1)
    slurm.jobs[2] = job(2, 10)
    return slurm


def cycles(slurm: FakeSlurm, make_controller, count: int, **changes) -> None:
    """Cycles of which each is a controller of its own; short jobs end after one of them."""
    for _ in range(count):
        one_cycle(make_controller, slurm, **changes)
        slurm.tick()
        if slurm.jobs[2].state is JobState.RUNNING and slurm.jobs[2].start_s < slurm.now_s:
            slurm.end(2)


PLAIN = {"policy": "srtf", "grouping": ALONE}
SHORTEST = {**PLAIN, "preemption": PREEMPTION}


def test_a_long_job_stops_for_a_short_one_and_runs_again(make_controller):
    slurm = run_long_then_submit_short(make_controller)
    cycles(slurm, make_controller, 6, **SHORTEST)
    assert slurm.jobs[2].state is JobState.COMPLETED
    assert (slurm.jobs[1].state, slurm.starts[1], slurm.jobs[1].restart_count) == (JobState.RUNNING, 2, 1)
    assert slurm.jobs[1].gpu_count == 1


def test_a_job_that_was_stopped_keeps_the_service_that_it_had(make_controller):
    slurm = run_long_then_submit_short(make_controller)
    slurm.now_s = slurm.jobs[1].start_s + 500.0
    with make_controller(slurm, **SHORTEST) as controller:
        controller.cycle()
        (waiting,) = (each for each in controller.decision().preparation.request.jobs if each.job_id == 1)
    assert (waiting.attained_gpu_s, waiting.remaining_s) == (500.0, 99_500.0)


def test_runs_that_slurm_itself_ended_count_as_service_but_not_as_done(make_controller):
    slurm = FakeSlurm([job(1, 100_000)], [make_node("n1", gpu_count=1)])
    las = {"policy": "las", "grouping": ALONE}
    with make_controller(slurm, **las) as controller:
        controller.cycle()
        slurm.tick()
        controller.cycle()
    begun_s = slurm.jobs[1].start_s
    slurm.now_s = begun_s + 700.0
    slurm._requeue(1)
    slurm.tick(130.0)  # Slurm lets a requeued job wait for a while
    assert (slurm.jobs[1].state, slurm.jobs[1].restart_count) == (JobState.RUNNING, 1)
    slurm.tick(30.0)
    with make_controller(slurm, **las) as controller:  # another process: it knows the journal only
        status = controller.cycle()
        preparation = controller.decision().preparation
        (unit,) = running_units(preparation.cycle)
    ran_s = slurm.now_s - slurm.jobs[1].start_s
    assert (unit.members[0].attained_gpu_s, unit.members[0].remaining_s) == (700.0 + ran_s, 100_000.0 - ran_s)
    assert "earlier runs have had 11.7 GPU minutes" in status.jobs[0].reasons


@pytest.mark.parametrize(
    ("checkpoint", "registered", "restarts", "options"),
    [(False, True, 0, SHORTEST), (True, False, 0, SHORTEST), (True, True, 1, SHORTEST), (True, True, 0, PLAIN)],
    ids=["no word", "no checkpoint", "a checkpoint of an earlier run", "preemption off"],
)
def test_nobody_is_stopped_with(make_controller, checkpoint, registered, restarts, options):
    slurm = run_long_then_submit_short(make_controller, checkpoint=checkpoint, registered=registered)
    slurm._update(1, restart_count=restarts)
    cycles(slurm, make_controller, 4, **options)
    assert "requeue_hold" not in slurm.calls
    assert (slurm.jobs[1].state, slurm.jobs[2].state) == (JobState.RUNNING, JobState.PENDING)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_killed_at_any_call_a_stop_is_carried_on(make_controller, side, nth):
    slurm = run_long_then_submit_short(make_controller)
    with pytest.raises(Killed), slurm.killing(side, nth):
        cycles(slurm, make_controller, 3, **SHORTEST)
    cycles(slurm, make_controller, 8, **SHORTEST)
    assert slurm.jobs[2].state is JobState.COMPLETED
    assert slurm.starts == {1: 2, 2: 1}
    assert slurm.jobs[1].state is JobState.RUNNING


def group_of(make_controller, *ids: int) -> FakeSlurm:
    slurm = FakeSlurm([job(each) for each in ids], [make_node("n1", gpu_count=1)])
    one_cycle(make_controller, slurm)
    slurm.tick()
    assert all(slurm.jobs[each].state is JobState.RUNNING for each in ids)
    return slurm


def test_a_member_that_stopped_by_itself_is_a_candidate_again_with_its_own_request(make_controller):
    slurm = group_of(make_controller, 1, 2)
    slurm._update(1, comment=f"{tags.STOPPED_PREFIX}0")
    slurm.requeue_hold(1)
    with make_controller(slurm, grouping={"join": False}) as controller:
        controller.cycle()
        status = controller.cycle()
    stopped = slurm.jobs[1]
    assert read_job(stopped).role is Role.CANDIDATE
    assert (stopped.gpu_request, stopped.required_nodes, stopped.time_limit_s) == ("gres/gpu:1", "", 3600)
    assert not any("not grouped again" in reason for each in status.jobs for reason in each.reasons)


def test_a_member_that_was_requeued_without_being_saved_runs_alone(make_controller):
    slurm = group_of(make_controller, 1, 2)
    register(slurm, 1)
    slurm.requeue_hold(1)
    one_cycle(make_controller, slurm)
    assert read_job(slurm.jobs[1]).role is Role.RELEASED


def test_two_jobs_that_join_in_one_cycle_are_both_known_to_the_pilot(make_controller):
    slurm = group_of(make_controller, 1, 2)
    slurm.jobs |= {3: job(3), 4: job(4)}
    one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    assert tags.parse_pilot(pilot.admin_comment)[1] == (1, 2, 3, 4)


def test_a_waiting_job_joins_the_group_at_work(make_controller):
    slurm = group_of(make_controller, 1, 2)
    (pilot,) = pilots(slurm)
    slurm.jobs[3] = job(3)
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        status = {each.job_id: each for each in controller.cycle().jobs}
    assert set(status[1].partners) == {2, 3}
    assert set(status[3].partners) == {1, 2}
    assert 0 < status[3].predicted_speed <= 1
    joined = slurm.jobs[3]
    assert joined.state is JobState.RUNNING
    assert tags.parse_state(joined.admin_comment).pilot == pilot.job_id
    assert tags.parse_pilot(slurm.jobs[pilot.job_id].admin_comment)[1] == (1, 2, 3)
    assert {slurm.jobs[each].time_limit_s for each in (1, 2, 3)} == {3 * 3600}
    assert slurm.jobs[pilot.job_id].time_limit_s >= 3 * 3600
    assert pilots(slurm) == [slurm.jobs[pilot.job_id]]
    slurm._update(2, state=JobState.COMPLETED)
    status = one_cycle(make_controller, slurm)
    assert (status[1].partners, status[3].partners) == ((3,), (1,)), "job 2 has ended"


@pytest.mark.parametrize(
    "change",
    [
        {"uid": 1002, "user": "bob"},
        {"cpu_count": 33},
        {"gpu_count": 2, "gpu_request": "gres/gpu:2"},
        {"can_requeue": False},
    ],
)
def test_who_does_not_fit_does_not_join(make_controller, change):
    slurm = group_of(make_controller, 1, 2)
    slurm.jobs[3] = replace(job(3), **change)
    one_cycle(make_controller, slurm)
    assert tags.parse_state(slurm.jobs[3].admin_comment) is None


@pytest.mark.parametrize(("gpu_mem_gib", "joins"), [(8.0, False), (80.0, True)])
def test_who_does_not_fit_into_the_gpus_memory_does_not_join(make_controller, gpu_mem_gib, joins):
    slurm = group_of(make_controller, 1, 2)
    slurm.jobs[3] = job(3)
    with make_controller(slurm, gpu_mem_gib={"gpu": gpu_mem_gib}) as controller:
        store = controller._store
        store.put_all([replace(each, gpu_mem_gib=4.0) for each in store.list()])
        controller.cycle()
    assert (tags.parse_state(slurm.jobs[3].admin_comment) is not None) == joins


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_killed_at_any_call_a_join_is_carried_on(make_controller, side, nth):
    slurm = group_of(make_controller, 1, 2)
    slurm.jobs[3] = job(3)
    with pytest.raises(Killed), slurm.killing(side, nth), make_controller(slurm) as controller:
        controller.cycle()
    run_cycles(make_controller, slurm, 3)
    assert (slurm.jobs[3].state, slurm.starts[3]) == (JobState.RUNNING, 1)
    assert tags.parse_state(slurm.jobs[3].admin_comment).pilot == pilots(slurm)[0].job_id


SHARE = (NodeShare("n1", 1),)
PLAN_JOBS = tuple(PlanJob(number, "alice", "main", 1, 0.0, preemptible=True) for number in range(1, 4))


def test_what_was_planned_for_gpus_that_are_not_free_waits_a_cycle():
    request = PlanRequest(PLAN_JOBS[:2], (), 0.0, running=(Running(PLAN_JOBS[2:], SHARE),))
    plan = Plan("p", groups=(Group((1, 2), SHARE, 1, 1.0, 1.0, {}),), solo=(), waiting=(Waiting(3, (), True),))
    settled = settle(plan, request)
    assert [item.job_id for item in settled.stops] == [3]
    assert settled.plan.groups == ()
    assert [item.job_id for item in settled.plan.waiting] == [1, 2]


def test_what_is_kept_is_neither_stopped_nor_started_where_gpus_are_free():
    running = (Running(PLAN_JOBS[:2], SHARE), Running(PLAN_JOBS[2:], SHARE))
    group, solo = Group((1, 2), SHARE, 1, 1.0, 1.0, {}, (), kept=True), Solo(3, (), SHARE, kept=True)
    request = PlanRequest((), (FreeNode("n1", ("main",), 2),), 0.0, running=running)
    settled = settle(Plan("p", groups=(group,), solo=(solo,), waiting=()), request)
    assert (settled.stops, settled.plan.groups, settled.plan.solo) == ((), (), ())


def test_a_requeued_job_need_not_wait_for_its_old_credential(make_controller):
    slurm = FakeSlurm([job(1)], [make_node("n1", gpu_count=1)])
    one_cycle(make_controller, slurm)
    slurm.tick()
    stop(slurm, read_job(slurm.jobs[1]))
    (pilot,) = pilots(slurm)
    slurm.end(pilot.job_id)
    assert slurm.jobs[1].begin_s > slurm.now_s
    one_cycle(make_controller, slurm)
    slurm.tick()
    assert slurm.starts[1] == 2


def test_a_job_that_was_stopped_counts_from_its_first_submission(make_controller):
    slurm = run_long_then_submit_short(make_controller)
    first_s = slurm.jobs[1].submit_s
    slurm.now_s = slurm.jobs[1].start_s + 500.0
    one_cycle(make_controller, slurm, **SHORTEST)
    slurm.tick()
    for _ in range(2):  # also after a restart of the controller
        with make_controller(slurm, **SHORTEST) as controller:
            (waiting,) = (each for each in controller.decision().preparation.request.jobs if each.job_id == 1)
            controller.cycle()
        assert (waiting.submit_s, waiting.waiting_since_s) == (first_s, slurm.jobs[1].submit_s)
