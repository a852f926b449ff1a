"""The controller's cycle: groups, solo releases, repairs, and being killed between any two calls."""

import pytest
from fake_slurm import (
    FakeSlurm,
    Killed,
    behind_lease,
    dry_runs,
    end_dry_run,
    four_jobs,
    make_job,
    make_node,
    one_cycle,
    one_gpu,
    pilots,
)

from muri.profiler.records import ProfileKey
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.journal import EXCLUSION, PYTHON
from muri.slurm_plugin.records.roles import read_job

# Submitting the pilot and changing four members; releasing them, and noting that their holds are lifted.
CALLS_OF_A_START = {"license": 5, "hold": 13}


def waiting_at(gate: str) -> FakeSlurm:
    """Four jobs for one GPU, kept waiting by the license or by a hold."""
    return FakeSlurm(four_jobs(), one_gpu()) if gate == "hold" else behind_lease(four_jobs(), one_gpu())


@pytest.mark.parametrize(("gate", "calls"), CALLS_OF_A_START.items())
def test_four_kinds_share_one_gpu(make_controller, gate, calls):
    slurm = waiting_at(gate)
    one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    assert set(tags.parse_pilot(pilot.admin_comment)[1]) == {1, 2, 3, 4}
    assert len(slurm.calls) == calls
    slurm.tick()
    assert all(slurm.jobs[i].state is JobState.RUNNING for i in (1, 2, 3, 4, pilot.job_id))
    assert slurm.free()["n1"] == 0


def test_enough_gpus_means_nobody_shares(make_controller):
    slurm = FakeSlurm(four_jobs(), [make_node("n1"), make_node("n2")])
    one_cycle(make_controller, slurm)
    assert sorted(read_job(pilot).pilot_tag.members for pilot in pilots(slurm)) == [(1,), (2,), (3,), (4,)]
    slurm.tick()
    assert all(slurm.jobs[i].state is JobState.RUNNING for i in (1, 2, 3, 4))


def test_other_users_are_never_grouped_together(make_controller):
    jobs = [make_job(1), make_job(2, user="bob", uid=1002, admin_comment="muri:model=m2,batch-size=8,duration=100")]
    slurm = FakeSlurm(jobs, one_gpu())
    one_cycle(make_controller, slurm)
    assert [read_job(pilot).pilot_tag.members for pilot in pilots(slurm)] == [(1,)]


@pytest.mark.configuration(profiling={"mode": "dry-run"})
def test_an_unknown_model_gets_a_dry_run_and_its_result_is_kept(make_controller, store):
    slurm = FakeSlurm([make_job(1, admin_comment="muri:model=new,batch-size=8")], one_gpu())
    one_cycle(make_controller, slurm)
    figures = {"load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.3, "synchronize_s": 0.0, "iteration_s": 0.6}
    (run,) = dry_runs(slurm)
    end_dry_run(slurm, run, 1, **figures)
    slurm._update(1, comment=f"my own words {slurm.jobs[1].comment}")
    one_cycle(make_controller, slurm)
    assert store.get(ProfileKey("new", 8, 1, "gpu", "alice")).stage_s == (0.1, 0.2, 0.3, 0.0)
    assert store.get(ProfileKey("new", 8, 1, "gpu")) is None  # it was not published
    assert not slurm.jobs[1].held


@pytest.mark.configuration(profiling={"mode": "dry-run"})
@pytest.mark.parametrize("result", [None, {"error": "no stages"}, {"load_s": -1.0, "iteration_s": 0.1}])
def test_a_failed_dry_run_does_not_block_the_job(make_controller, result):
    slurm = FakeSlurm([make_job(1, admin_comment="muri:model=new,batch-size=8")], one_gpu())
    for _ in range(6):
        one_cycle(make_controller, slurm)
        slurm.tick()
        for run in dry_runs(slurm):
            if result is None:
                slurm.end(run.job_id, state=JobState.FAILED)
            else:
                end_dry_run(slurm, run, 1, **result)
    told = one_cycle(make_controller, slurm)
    assert slurm.starts.get(1) == 1
    assert "dry run failed" in " ".join(told[1].reasons)


def test_a_pilot_that_cannot_start_sets_its_members_free_first(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.jobs[50] = make_job(50, held=False, admin_comment="", state=JobState.RUNNING, nodes="n1")
        slurm.now_s += 1000
        slurm.calls.clear()
        controller.cycle()
        assert slurm.calls.index("modify") < slurm.calls.index("cancel")
    assert all(slurm.jobs[i].gpu_count == 1 and not slurm.jobs[i].dependency for i in (1, 2, 3, 4))


def test_a_lone_member_that_slurm_refuses_to_change_starts_plain_and_its_pilot_ends(make_controller, monkeypatch):
    slurm = behind_lease(four_jobs()[:1], one_gpu())
    modify = slurm._modify

    def refuse(job_id, change):
        if change.gpu_request == "gres/gpu:0":
            raise GatewayError("cannot change job 1: Requested node configuration is not available")
        modify(job_id, change)

    monkeypatch.setattr(slurm, "_modify", refuse)
    one_cycle(make_controller, slurm)
    slurm.tick()
    assert [pilot.state for pilot in pilots(slurm)] == [JobState.CANCELLED]
    assert (slurm.jobs[1].state, slurm.jobs[1].gpu_count) == (JobState.RUNNING, 1)


def test_what_the_journal_knows_of_jobs_that_are_gone_is_forgotten(make_controller):
    """Slurm gives their numbers to other jobs one day."""
    slurm = FakeSlurm(four_jobs()[:1], [make_node("n1", usable=False)])
    with make_controller(slurm) as controller:
        for job_id in ("1", "7"):
            controller._journal.set_fact(EXCLUSION, job_id, "its group broke")
        controller.cycle()
        assert controller._journal.facts(EXCLUSION) == {"1": "its group broke"}


@pytest.mark.parametrize("told", [None, [], [{}, "", ""], [[1], 2, 3], ["gone of alice (batch 8, 1 × gpu)", "", ""]])
def test_a_python_that_says_nothing_of_a_known_model_is_forgotten_whatever_it_holds(make_controller, told):
    with make_controller(FakeSlurm([], one_gpu())) as controller:
        controller._journal.set_fact(PYTHON, "1", told)
        controller.cycle()
        assert controller._journal.facts(PYTHON) == {}


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(
    ("gate", "nth"),
    [(gate, nth) for gate, calls in CALLS_OF_A_START.items() for nth in range(1, calls + 1)],
)
def test_killed_at_any_call_loses_doubles_and_holds_nothing(make_controller, side, gate, nth):
    slurm = waiting_at(gate)
    with pytest.raises(Killed), slurm.killing(side, nth):
        one_cycle(make_controller, slurm)
    slurm.let_work(lambda: one_cycle(make_controller, slurm), (1, 2, 3, 4))
    assert [slurm.jobs[i].state for i in (1, 2, 3, 4)] == [JobState.COMPLETED] * 4
    assert [slurm.starts[i] for i in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert not any(job.state.is_active for job in pilots(slurm))


def test_an_orphaned_pilot_is_cancelled_when_the_journal_is_lost(make_controller, tmp_path):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with pytest.raises(Killed), slurm.killing("after", 1):
        one_cycle(make_controller, slurm)
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    slurm.let_work(lambda: one_cycle(make_controller, slurm), (1, 2, 3, 4))
    assert [slurm.jobs[i].state for i in (1, 2, 3, 4)] == [JobState.COMPLETED] * 4
