"""The controller's cycle: groups, solo releases, repairs, and being killed between any two calls."""

import pytest
from fake_slurm import FakeSlurm, Killed, four_jobs, make_job, make_node, one_cycle, one_gpu, pilots

from muri.profiler.records import ProfileKey
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.journal import EXCLUSION
from muri.slurm_plugin.records.roles import Role, read_job

# Submitting the pilot; changing and releasing four members, and noting that their holds are lifted.
CALLS_OF_A_START = 13


def test_four_kinds_share_one_gpu(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    one_cycle(make_controller, slurm)
    (pilot,) = pilots(slurm)
    assert tags.parse_pilot(pilot.admin_comment)[1] != ()
    assert set(tags.parse_pilot(pilot.admin_comment)[1]) == {1, 2, 3, 4}
    assert len(slurm.calls) == CALLS_OF_A_START
    slurm.tick()
    slurm.tick()
    assert all(slurm.jobs[i].state is JobState.RUNNING for i in (1, 2, 3, 4, pilot.job_id))
    assert slurm.free()["n1"] == 0


def test_enough_gpus_means_nobody_shares(make_controller):
    slurm = FakeSlurm(four_jobs(), [make_node("n1"), make_node("n2")])
    one_cycle(make_controller, slurm)
    assert sorted(read_job(pilot).pilot_tag.members for pilot in pilots(slurm)) == [(1,), (2,), (3,), (4,)]
    slurm.tick()
    slurm.tick()
    assert all(slurm.jobs[i].state is JobState.RUNNING for i in (1, 2, 3, 4))


def test_other_users_are_never_grouped_together(make_controller):
    jobs = [make_job(1), make_job(2, user="bob", uid=1002, admin_comment="muri:model=m2,batch-size=8,duration=100")]
    slurm = FakeSlurm(jobs, one_gpu())
    one_cycle(make_controller, slurm)
    assert [read_job(pilot).pilot_tag.members for pilot in pilots(slurm)] == [(1,)]


@pytest.mark.configuration(profiling={"mode": "dry-run"})
def test_an_unknown_model_gets_a_dry_run_and_its_result_is_kept(make_controller, tmp_path):
    job = make_job(1, admin_comment="muri:model=new,batch-size=8")
    slurm = FakeSlurm([job], one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        (run,) = [j for j in slurm.jobs.values() if read_job(j).role is Role.DRY_RUN]
        token = tags.token(run.admin_comment, tags.DRY_RUN_PREFIX)
        slurm.tick()
        slurm.tick()
        figures = {"load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.3, "synchronize_s": 0.0, "iteration_s": 0.6}
        comment = tags.PROFILE_PREFIX + tags.format_json({**figures, "iterations": 20, "token": token})
        slurm.jobs[1] = make_job(1, admin_comment=job.admin_comment, comment=f"my own words {comment}")
        slurm.end(run.job_id)
        controller.cycle()
    with ProfileStore(tmp_path / "profiles.db") as store:
        stored = store.get(ProfileKey("new", 8, 1, "gpu", "alice"))
        assert store.get(ProfileKey("new", 8, 1, "gpu")) is None  # it was not published
    assert stored is not None
    assert stored.stage_s == (0.1, 0.2, 0.3, 0.0)
    assert not slurm.jobs[1].held


@pytest.mark.configuration(profiling={"mode": "dry-run"})
@pytest.mark.parametrize("result", [None, {"error": "no stages"}, {"load_s": -1.0, "iteration_s": 0.1}])
def test_a_failed_dry_run_does_not_block_the_job(make_controller, result):
    job = make_job(1, admin_comment="muri:model=new,batch-size=8")
    slurm = FakeSlurm([job], one_gpu())
    with make_controller(slurm) as controller:
        for _ in range(6):
            controller.cycle()
            slurm.tick()
            for run in [j for j in slurm.jobs.values() if read_job(j).role is Role.DRY_RUN and j.state.is_active]:
                if result is not None:
                    token = tags.token(run.admin_comment, tags.DRY_RUN_PREFIX)
                    text = tags.PROFILE_PREFIX + tags.format_json({**result, "token": token})
                    slurm.jobs[1] = make_job(1, admin_comment=job.admin_comment, comment=text)
                slurm.end(run.job_id, JobState.FAILED)
        status = controller.cycle()
    assert slurm.starts.get(1) == 1
    assert "dry run failed" in " ".join(next(j for j in status.jobs if j.job_id == 1).reasons)


def test_a_requeued_member_gets_its_request_back_and_runs_alone(make_controller):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        slurm.tick()
        (pilot,) = pilots(slurm)
        slurm.end(pilot.job_id, JobState.FAILED)
        for i in (1, 2):
            slurm.requeue_hold(i)
        for i in (3, 4):
            slurm.end(i)
        for _ in range(4):
            controller.cycle()
            slurm.tick()
            for i in (1, 2):
                if slurm.jobs[i].state is JobState.RUNNING:
                    assert (slurm.jobs[i].gpu_count, slurm.jobs[i].required_nodes) == (1, "")
                    slurm.end(i)
    assert [slurm.jobs[i].state for i in (1, 2)] == [JobState.COMPLETED] * 2
    assert len(pilots(slurm)) == 1


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


def test_what_the_journal_knows_of_jobs_that_are_gone_is_forgotten(make_controller):
    """Slurm gives their numbers to other jobs one day."""
    slurm = FakeSlurm(four_jobs()[:1], [make_node("n1", usable=False)])
    with make_controller(slurm) as controller:
        for job_id in ("1", "7"):
            controller._journal.set_fact(EXCLUSION, job_id, "its group broke")
        controller.cycle()
        assert controller._journal.facts(EXCLUSION) == {"1": "its group broke"}


def run_to_the_end(slurm, make_controller):
    for _ in range(30):
        one_cycle(make_controller, slurm)
        if not any(job.state.is_active for job in slurm.jobs.values()):
            return
        slurm.tick()
        for job in list(slurm.jobs.values()):
            if read_job(job).role is Role.PILOT and job.state is JobState.RUNNING:
                members = tags.parse_pilot(job.admin_comment)[1]
                if not any(slurm.jobs[m].state.is_active for m in members):
                    slurm.end(job.job_id)
            elif job.state is JobState.RUNNING:
                state = tags.parse_state(job.admin_comment)
                pilot = slurm.jobs.get(state.pilot) if state else None
                if state and (pilot is None or not pilot.state.is_active):
                    slurm.requeue_hold(job.job_id)  # what `muri run` does when its runtime is gone
                    slurm.starts[job.job_id] -= 1
                else:
                    slurm.end(job.job_id)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", range(CALLS_OF_A_START))
def test_killed_at_any_call_loses_doubles_and_holds_nothing(make_controller, side, nth):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with pytest.raises(Killed), slurm.killing(side, nth + 1), make_controller(slurm) as controller:
        controller.cycle()
    run_to_the_end(slurm, make_controller)
    assert [slurm.jobs[i].state for i in (1, 2, 3, 4)] == [JobState.COMPLETED] * 4
    assert [slurm.starts[i] for i in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert not any(job.state.is_active for job in pilots(slurm))


def test_an_orphaned_pilot_is_cancelled_when_the_journal_is_lost(make_controller, tmp_path):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with pytest.raises(Killed), slurm.killing("after", 1), make_controller(slurm) as controller:
        controller.cycle()
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    run_to_the_end(slurm, make_controller)
    assert [slurm.jobs[i].state for i in (1, 2, 3, 4)] == [JobState.COMPLETED] * 4
