"""The license as the gate of waiting jobs: who may start them, what survives, what happens when Muri stops."""

from dataclasses import replace
from itertools import islice

import pytest
from fake_slurm import (
    NOW_S,
    FakeSlurm,
    Killed,
    behind_lease,
    behind_license,
    four_jobs,
    make_job,
    make_node,
    one_cycle,
    one_gpu,
    pilots,
    run_cycles,
)
from virtual_clock import VirtualClock

from muri.slurm_plugin.execute.gate import drain_until_over, stop
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.roles import GATE_LICENSE, Role, read_job, with_gate, without_gate

HOLDS = ["JobHeldAdmin", "JobHeldUser", "launch_failed_requeued_held"]


def waiting(count: int = 4, nodes: list | None = None, **changes) -> FakeSlurm:
    """Jobs behind the license, before a controller that had a cycle."""
    return behind_lease(four_jobs(**changes)[:count], one_gpu() if nodes is None else nodes)


@pytest.mark.parametrize(
    ("licenses", "own"),
    [
        ("", ""),
        ("muri_gate:1", ""),
        ("matlab:1,muri_gate:1", "matlab:1"),
        ("matlab:1;muri_gate:1", "matlab:1"),
        ("muri_gate", ""),
        ("muri_gate_2:1", "muri_gate_2:1"),
    ],
)
def test_a_users_licenses_are_kept_beside_muris(licenses, own):
    assert without_gate(licenses) == own
    assert without_gate(with_gate(licenses)) == own
    assert with_gate(with_gate(licenses)) == with_gate(licenses)


def test_a_group_starts_without_any_hold_or_release(make_controller):
    slurm = waiting(licenses="matlab:1")
    one_cycle(make_controller, slurm)
    assert slurm.calls == ["submit", *["modify"] * 4]
    slurm.tick()
    assert [slurm.jobs[n].state for n in (1, 2, 3, 4)] == [JobState.RUNNING] * 4
    assert slurm.jobs[1].licenses == "matlab:1"
    assert len(pilots(slurm)) == 1


def test_each_cycle_extends_the_lease_and_without_cycles_slurm_starts_every_job(make_controller):
    slurm = waiting(2, [make_node("n1", gpu_count=0, partitions=("other",)), make_node("n2", usable=False)])
    with make_controller(slurm, lease_s=900) as controller:
        controller.cycle()
        assert slurm.lease_end_s == slurm.now_s + 900
        slurm.now_s += 300
        controller.cycle()
        assert slurm.lease_end_s == slurm.now_s + 900
    slurm.nodes["n2"] = make_node("n2")
    slurm.tick(890)
    assert [slurm.jobs[n].state for n in (1, 2)] == [JobState.PENDING] * 2
    slurm.tick(20)
    assert [slurm.jobs[n].state for n in (1, 2)] == [JobState.RUNNING] * 2
    assert [slurm.jobs[n].gpu_count for n in (1, 2)] == [1, 1]


def test_without_the_license_in_slurm_conf_the_status_says_what_is_lost(make_controller):
    slurm = FakeSlurm([], one_gpu())
    with make_controller(slurm, gate="license") as controller:
        assert any(GATE_LICENSE in error for error in controller.cycle().errors)
    with make_controller(slurm, gate="hold") as controller:
        assert controller.cycle().errors == ()


@pytest.mark.parametrize("reason", HOLDS)
def test_a_hold_on_a_waiting_job_is_nobodys_but_its_owners(make_controller, reason):
    slurm = waiting(2, [make_node("n1")])
    slurm.jobs[1] = replace(slurm.jobs[1], held=True, priority=0, reason=reason)
    run_cycles(make_controller, slurm, 3, 400)
    assert (slurm.jobs[1].held, slurm.jobs[1].state) == (True, JobState.PENDING)
    assert read_job(slurm.jobs[1]).role is Role.USER_HELD
    slurm.release(1)
    assert read_job(slurm.jobs[1]).role is Role.CANDIDATE
    one_cycle(make_controller, slurm)
    assert GATE_LICENSE not in slurm.jobs[1].licenses


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        *((reason, word) for reason in (HOLDS[0], HOLDS[2]) for word in ("", " muri-gate:hold", " muri-gate:open")),
        *(("job_requeued_in_held_state", word) for word in (" muri-gate:hold", " muri-gate:open")),
    ],
)
def test_only_muris_own_hold_is_muris(make_controller, reason, word):
    job = make_job(1)
    slurm = FakeSlurm([replace(job, reason=reason, admin_comment=job.admin_comment + word)], one_gpu())
    one_cycle(make_controller, slurm, gate="hold")
    assert slurm.jobs[1].held


@pytest.mark.parametrize("word", ["", " muri-gate:hold", " muri-gate:open"])
@pytest.mark.parametrize("gate", ["hold", "license"])
def test_a_job_that_an_administrator_requeues_and_holds_stays_held(make_controller, gate, word):
    job = make_job(1, state=JobState.RUNNING, held=False, reason="", nodes="n1")
    slurm = FakeSlurm([replace(job, admin_comment=job.admin_comment + word)], one_gpu(), gate_license=gate == "license")
    if "open" not in word:
        one_cycle(make_controller, slurm, gate=gate)  # sees that it runs
    slurm.requeue_hold(1)
    slurm.tick(400)
    run_cycles(make_controller, slurm, 3, 400, gate=gate)
    assert slurm.jobs[1].held
    assert read_job(slurm.jobs[1]).role is Role.USER_HELD
    assert list(islice(drain_until_over(slurm, slurm.tagged, VirtualClock()), 2))[-1].is_over
    assert slurm.jobs[1].held


def test_a_job_that_runs_is_told_once_that_the_next_hold_is_not_muris(make_controller):
    slurm = FakeSlurm([make_job(1, state=JobState.RUNNING, held=False, reason="", nodes="n1")], one_gpu())
    run_cycles(make_controller, slurm, 2, gate="hold")
    assert slurm.calls == ["modify"]
    assert tags.token(slurm.jobs[1].admin_comment, tags.GATE_PREFIX) == "open"


@pytest.mark.parametrize("word", ["", " muri-gate:hold", " muri-gate:open"])
@pytest.mark.parametrize("user_hold", ["", " muri-hold:user"])
@pytest.mark.parametrize("died", [False, True])
def test_a_job_that_muri_stops_is_still_its_own(make_controller, word, user_hold, died):
    job = make_job(1, state=JobState.RUNNING, held=False, reason="", nodes="n1")
    slurm = FakeSlurm([replace(job, admin_comment=job.admin_comment + word + user_hold)], one_gpu())
    if died:
        with slurm.killing("before", 2), pytest.raises(Killed):
            stop(slurm, read_job(slurm.jobs[1]))
        one_cycle(make_controller, slurm, gate="hold")
        assert slurm.jobs[1].state is JobState.RUNNING
    stop(slurm, read_job(slurm.jobs[1]))
    assert read_job(slurm.jobs[1]).role is Role.CANDIDATE
    run_cycles(make_controller, slurm, 2, 0, gate="hold", grouping={"max_group_size": 1})
    assert not slurm.jobs[1].held
    slurm.tick(400)
    slurm.requeue_hold(1)
    assert read_job(slurm.jobs[1]).role is Role.USER_HELD


@pytest.mark.parametrize("word", ["", " muri-gate:hold", " muri-gate:open", " muri-gate:requeued"])
def test_a_member_that_puts_itself_back_held_is_muris(word):
    state = tags.format_state(tags.MemberState(9, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))
    comment = f"muri:on muri-state:{state}{word}"
    job = read_job(make_job(1, reason="job_requeued_in_held_state", restart_count=1, admin_comment=comment))
    assert (job.gated, job.held_by_others) == (True, False)


def test_a_users_hold_after_muri_lifted_its_own_stays(make_controller):
    slurm = FakeSlurm([make_job(1)], one_gpu())
    with make_controller(slurm, gate="hold", grouping={"max_group_size": 1}) as controller:
        controller.cycle()
        assert not slurm.jobs[1].held
        slurm.hold(1)
        controller.cycle()
    assert slurm.jobs[1].held


def test_members_are_put_behind_the_gate_as_soon_as_they_have_started(make_controller):
    slurm = waiting(2)
    with make_controller(slurm) as controller:
        controller.cycle()
        assert controller.close_gates()
        assert [GATE_LICENSE in slurm.jobs[n].licenses for n in (1, 2)] == [False, False]
        slurm.tick()
        assert not controller.close_gates()
    assert [GATE_LICENSE in slurm.jobs[n].licenses for n in (1, 2)] == [True, True]
    # Once they are back in the queue it has to be a change.
    assert all(with_gate(slurm.jobs[n].licenses) != slurm.jobs[n].licenses for n in (1, 2))
    assert [slurm.jobs[n].state for n in (1, 2)] == [JobState.RUNNING] * 2


@pytest.mark.parametrize("reason", ["JobHeldAdmin", "JobHeldUser"])
@pytest.mark.parametrize("gate", ["hold", "license"])
def test_of_a_group_that_ends_who_is_held_stays_so_and_the_others_run_alone(make_controller, gate, reason):
    slurm = waiting(2) if gate == "license" else FakeSlurm(four_jobs()[:2], one_gpu())
    run_cycles(make_controller, slurm, 1)
    one_cycle(make_controller, slurm)
    assert [slurm.jobs[n].state for n in (1, 2)] == [JobState.RUNNING] * 2
    slurm._update(1, held=True, reason=reason)
    slurm.end(pilots(slurm)[0].job_id, state=JobState.CANCELLED)
    for member in (1, 2):
        slurm._requeue(member)
    if gate == "license":
        slurm.tick(200)
        assert slurm.jobs[2].state is JobState.PENDING, "no member starts without its GPUs"
    run_cycles(make_controller, slurm, 3, 400)
    held, other = slurm.jobs[1], slurm.jobs[2]
    assert (held.held, held.reason, held.state) == (True, reason, JobState.PENDING)
    assert (held.gpu_count, held.dependency, held.required_nodes) == (1, "", "")
    assert (other.state, other.gpu_count, slurm.starts[2]) == (JobState.RUNNING, 1, 2)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_jobs_that_an_older_muri_holds_move_behind_the_license(make_controller, side, nth):
    slurm = FakeSlurm(
        [make_job(1, user="x"), make_job(2, user="y")], [make_node("n1", usable=False)], gate_license=True
    )
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.extend_lease(slurm.now_s + 600)
        with slurm.killing(side, nth), pytest.raises(Killed):
            controller.cycle()
        for _ in range(2):
            controller.cycle()
    for job_id in (1, 2):
        job = read_job(slurm.jobs[job_id])
        assert (job.gate, job.held, job.role) == ("license", False, Role.CANDIDATE)
        assert tags.token(job.admin_comment, tags.REQUEST_PREFIX)
    assert slurm.calls.count("hold") == 0


def test_where_muri_holds_jobs_none_moves_behind_a_lease_that_nobody_extends(make_controller):
    slurm = FakeSlurm([make_job(1)], [make_node("n1", usable=False)], gate_license=True)
    slurm.extend_lease(NOW_S + 600)  # of a controller that had gate: license
    one_cycle(make_controller, slurm, gate="hold")
    job = read_job(slurm.jobs[1])
    assert (job.gate, job.held, job.role, slurm.lease_end_s) == ("hold", True, Role.CANDIDATE, NOW_S + 600)


def impossible(job_id: int) -> Job:
    """A job of bob's on more nodes than there are, in which Slurm changes nothing."""
    return make_job(job_id, user="bob", uid=1002, node_count=2 * 10**9)


class RefusingSlurm(FakeSlurm):
    """Changes nothing in jobs 1 to 9."""

    def _modify(self, job_id, change):
        if job_id < 10:
            raise GatewayError(f"cannot change job {job_id}: Requested partition configuration not available now")
        super()._modify(job_id, change)


@pytest.fixture
def refusing() -> FakeSlurm:
    """Two jobs of alice's behind five that cannot be changed."""
    return behind_lease([*map(impossible, range(1, 6)), make_job(11), make_job(12)], [make_node("n1")], RefusingSlurm)


def test_jobs_that_slurm_refuses_to_let_go_come_last_and_are_not_tried_in_each_cycle(make_controller, refusing):
    slurm, asked = refusing, []
    slurm.before_call = asked.append
    with make_controller(slurm) as controller:
        first = controller.cycle()
        assert GATE_LICENSE not in slurm.jobs[11].licenses
        assert len(first.errors) == 5
        asked.clear()
        slurm.now_s += 60
        second = controller.cycle()
        assert (asked, second.errors) == ([], ())
        assert all("not available now" in job.reasons[0] for job in second.jobs if job.job_id < 10)
        slurm.now_s += 3600
        slurm.extend_lease(slurm.now_s + 600)
        assert len(controller.cycle().errors) == 5


def test_a_drain_ends_while_slurm_refuses_to_change_a_job_that_nothing_keeps_waiting(refusing):
    drained = list(islice(drain_until_over(refusing, refusing.tagged, VirtualClock()), 5))
    assert [each.failed for each in drained] == [()] * 2
    assert drained[0].released == (11, 12)
    assert drained[-1].is_over


def test_a_job_in_which_slurm_changes_nothing_takes_nobodys_place(make_controller):
    """Slurm finds no node for the memory that bob's older job asks for; Muri's plan may not know."""
    jobs = [make_job(1, user="bob", uid=1002, submit_s=NOW_S - 9000), make_job(12)]
    slurm = RefusingSlurm(map(behind_license, jobs), one_gpu(), gate_license=True)
    with make_controller(slurm) as controller:
        controller.cycle()
        assert GATE_LICENSE in slurm.jobs[12].licenses
        slurm.now_s += 60
        controller.cycle()
    assert GATE_LICENSE not in slurm.jobs[12].licenses


def test_a_release_that_fails_in_passing_is_tried_again_in_the_next_cycle(make_controller, monkeypatch):
    slurm = FakeSlurm([behind_license(make_job(1))], one_gpu(), gate_license=True)
    with make_controller(slurm) as controller:
        with monkeypatch.context() as patched:
            patched.setattr(slurm, "_modify", lambda *_: (_ for _ in ()).throw(GatewayError("Job is in transition")))
            assert controller.cycle().errors
        slurm.now_s += 60
        controller.cycle()
    assert GATE_LICENSE not in slurm.jobs[1].licenses
