"""Two users with models of the same name: neither harms the other, by figures, by failures or by dry runs that hang."""

from dataclasses import replace

import pytest
from at_work import candidate
from fake_slurm import MEASURED, NOW_S, FakeSlurm, dry_runs, end_dry_run, make_node, one_gpu, pilots

from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState
from muri.slurm_plugin.records.journal import DRY_RUN_FAILED

pytestmark = pytest.mark.configuration(profiling={"mode": "dry-run"})

UIDS = {"alice": 1001, "bob": 1002, "carol": 1003}
DAY_S = 86400.0
THOROUGH = pytest.mark.thorough


def job_of(user: str, job_id: int, model: str = "resnet", **changes) -> Job:
    return candidate(job_id, model, user=user, uid=UIDS[user], **changes)


def known(user: str, model: str = "resnet", **changes) -> StageProfile:
    times = {"load_s": 0.1, "preprocess_s": 0.1, "propagate_s": 0.7, "synchronize_s": 0.1, "iteration_s": 1.0}
    return StageProfile(ProfileKey(model, 8, 1, "gpu", user), **(times | changes))


def cycles(slurm: FakeSlurm, make_controller, stored=(), /, count: int = 1, **changes):
    with make_controller(slurm, stored, **changes) as controller:
        for _ in range(count):
            status = controller.cycle()
            slurm.tick()
        return status, dict(controller._journal.facts(DRY_RUN_FAILED))


def test_one_users_figures_are_not_used_for_another(make_controller, store):
    slurm = FakeSlurm([job_of("bob", 1), job_of("alice", 2)], [make_node("n1", gpu_count=2)])
    cycles(slurm, make_controller)
    (bobs,) = dry_runs(slurm, "bob")
    end_dry_run(slurm, bobs, 1, **MEASURED)
    (alices,) = dry_runs(slurm, "alice")
    cycles(slurm, make_controller)
    assert slurm.jobs[2].held  # bob's measurement is not hers
    end_dry_run(slurm, alices, 2, **(MEASURED | {"load_s": 0.2}))
    cycles(slurm, make_controller)
    assert {item.key.user: item.load_s for item in store.list()} == {"bob": 0.9, "alice": 0.2}


def test_a_dry_run_that_has_not_run_has_no_result(make_controller, store):
    slurm = FakeSlurm([job_of("alice", 1)], one_gpu())
    cycles(slurm, make_controller)
    (run,) = dry_runs(slurm)
    end_dry_run(slurm, run, 1, **{name: seconds / 100 for name, seconds in MEASURED.items()})
    slurm.jobs[run.job_id] = replace(run, state=JobState.PENDING, start_s=0.0)
    cycles(slurm, make_controller)
    assert store.list() == ()


def test_ones_own_profile_comes_before_the_published_one(make_controller):
    slurm = FakeSlurm([job_of("alice", 1), job_of("bob", 2)], one_gpu())
    stored = (known("", iteration_s=1.0), known("alice", iteration_s=1.5), known("bob", "other"))
    with make_controller(slurm, stored) as controller:
        request = controller.decision().preparation.request
    assert {job.user: job.profile.iteration_s for job in request.jobs} == {"alice": 1.5, "bob": 1.0}
    assert {job.user: job.profile.key.user for job in request.jobs} == {"alice": "alice", "bob": ""}
    slurm.jobs[3] = job_of("carol", 3, "new")
    cycles(slurm, make_controller, stored)
    assert [run.user for run in dry_runs(slurm)] == ["carol"], "a published profile saves every user the dry run"


def test_failures_of_one_user_bar_no_other_and_expire(make_controller):
    slurm = FakeSlurm([job_of("bob", 1)], [make_node("n1", gpu_count=4)])
    for _ in range(3):
        _, failures = cycles(slurm, make_controller)
        for run in dry_runs(slurm):
            slurm.end(run.job_id, state=JobState.FAILED)
    assert not slurm.jobs[1].held  # it runs alone
    ((name, (count, why, last_s)),) = failures.items()
    assert (name, count, "without a result" in why) == ("resnet of bob (batch 8, 1 × gpu)", 2, True)
    assert NOW_S < last_s <= slurm.now_s
    slurm.jobs[9] = job_of("alice", 9, submit_s=slurm.now_s)
    cycles(slurm, make_controller)
    (alices,) = dry_runs(slurm, "alice")
    slurm.end(alices.job_id, state=JobState.FAILED)
    slurm.end(9)
    for job_id, after_s, runs in ((2, DAY_S - 1, 0), (3, DAY_S + 1, 1)):
        slurm.now_s = last_s + after_s
        slurm.jobs[job_id] = job_of("bob", job_id, submit_s=slurm.now_s)
        cycles(slurm, make_controller)
        assert len(dry_runs(slurm)) == runs
    slurm.end(dry_runs(slurm)[0].job_id, state=JobState.FAILED)
    _, failures = cycles(slurm, make_controller)
    assert failures[name][0] == 1  # the earlier ones no longer count


def test_a_dry_run_that_an_older_version_began_counts_for_its_user(make_controller, store):
    slurm = FakeSlurm([job_of("bob", 1)], one_gpu())
    cycles(slurm, make_controller)
    (run,) = dry_runs(slurm)
    with make_controller(slurm, ()) as controller:
        journal = controller._journal
        journal._connection.execute("UPDATE intents SET payload = json_remove(payload, '$.key.user')")
        (intent,) = journal.intents("begun")
        assert "user" not in intent.payload["key"]
        controller.cycle()
        assert dry_runs(slurm) == [slurm.jobs[run.job_id]]  # its script does not run twice
        end_dry_run(slurm, slurm.jobs[run.job_id], 1, **MEASURED)
        controller.cycle()
    assert [item.key.user for item in store.list()] == ["bob"]


@pytest.mark.parametrize(("others", "users"), [(["alice"], ["alice", "bob"]), ([], ["bob", "bob"])])
def test_nobody_has_two_dry_runs_while_others_wait(make_controller, others, users):
    jobs = [job_of("bob", number, f"b{number}") for number in (1, 2, 3)]
    jobs += [job_of(user, number, "a") for number, user in enumerate(others, 4)]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=8)])
    cycles(slurm, make_controller)
    assert sorted(run.user for run in dry_runs(slurm)) == users


def test_users_take_turns(make_controller):
    jobs = [job_of("bob", number, f"b{number}") for number in (1, 2, 3)]
    jobs += [job_of(user, number, user, submit_s=NOW_S) for number, user in ((4, "alice"), (5, "carol"))]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=8)])
    turns = []
    for _ in range(6):
        cycles(slurm, make_controller, profiling={"at_once": 1})
        (run,) = dry_runs(slurm)
        turns.append(run.user)
        slurm.end(run.job_id, state=JobState.FAILED)
    assert turns == ["bob", "alice", "carol"] * 2


@pytest.mark.parametrize("held", [True, False])
def test_dry_runs_that_do_not_start_make_way_and_count_against_no_model(make_controller, held):
    """Two of bob's take all the room: he holds them, or they can never start. One that runs is not one of these."""
    slurm = FakeSlurm([job_of("bob", number, f"b{number}") for number in (1, 2)], [make_node("n1", gpu_count=8)])
    with make_controller(slurm, ()) as controller:
        controller.cycle()
        stuck = [run.job_id for run in dry_runs(slurm)]
        assert len(stuck) == 2
        for job_id in stuck:
            slurm.jobs[job_id] = replace(slurm.jobs[job_id], held=held, reason="JobHeldUser" if held else "Resources")
        slurm.now_s += 60 if held else 601
        slurm.jobs[9] = job_of("alice", 9, submit_s=slurm.now_s)
        controller.cycle()
        assert [slurm.jobs[job_id].state for job_id in stuck] == [JobState.CANCELLED] * 2
        assert sorted(run.user for run in dry_runs(slurm)) == ["alice", "bob"]
        assert controller._journal.facts(DRY_RUN_FAILED) == {}
        slurm.tick()
        slurm.now_s += 10_000
        controller.cycle()
        assert {JobState.RUNNING} == {run.state for run in dry_runs(slurm)}


@pytest.mark.parametrize(
    "forged",
    [{"iterations": 10**19}, {"iterations": 1e200}, {"iteration_s": 1e308, "preprocess_s": 1.7976931348623157e308},
     {"load_s": 1e300}, {"iteration_s": 5e-324}, {"gpu_mem_gib": 1e200}, {"detail": {"busy_s": [5e-324] * 4}},
     {"detail": {"warmup_iterations": 10**30}}, {"detail": {"host_mem_gib": 1e300}}, {"load_s": [0.1]}],
)  # fmt: skip
@pytest.mark.parametrize(
    "policy", ["muri-l", "sjf-bsbf", *(pytest.param(each, marks=THOROUGH) for each in ("synergy", "horus"))]
)
def test_forged_results_of_a_dry_run_cost_nobody_the_cycle(make_controller, caplog, forged, policy):
    jobs = [job_of("bob", 1, "x"), job_of("alice", 2, "y"), job_of("bob", 3, "x")]
    slurm = FakeSlurm(jobs, [make_node("n1", gpu_count=1)])
    stored = (known("alice", "y"), known("", "z"))
    with make_controller(slurm, stored, policy=policy, policy_options={"order": "srtf"}) as controller:
        controller.cycle()
        for run in dry_runs(slurm, "bob"):
            for target in (1, 3):
                end_dry_run(slurm, run, target, **(MEASURED | forged))
        for _ in range(3):
            slurm.now_s += 400
            controller.cycle()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    "told",
    [{"n": 1e200, "t": 0.1, "s": [0.1] * 4, "w": [0] * 4}, {"n": 10**30, "t": 0.1, "s": [0.1] * 4, "w": [0] * 4},
     {"n": 10, "t": 5e-324, "s": [0.1] * 4, "w": [0] * 4}, {"n": 10, "t": 1e308, "s": [1e308] * 4, "w": [0] * 4},
     {"n": 10, "t": 0.1, "s": [0.1] * 400, "w": []}, 1e-320, 10**400, [1], "fast",
     {"n": 1, "t": 1, "s": [[1]] * 4, "w": [0] * 4}],
)  # fmt: skip
def test_forged_reports_of_a_pilot_cost_nobody_the_cycle(make_controller, store, told):
    slurm = FakeSlurm([job_of("bob", number, model) for number, model in ((1, "load"), (3, "gpu"))], one_gpu())
    stored = (known("", "gpu"), known("", "load", load_s=0.7, propagate_s=0.1))
    with make_controller(slurm, stored, tuning={"drift_after_s": 30}) as controller:
        controller.cycle()
        for _ in range(3):
            slurm.tick()
        (pilot,) = pilots(slurm)
        text = tags.SPEED_PREFIX + tags.format_json({"1": told, "3": told, "d": {"a": 1}})
        slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=text)
        for _ in range(4):
            slurm.now_s += 60
            assert controller.cycle().errors == ()
    assert store.observations(ProfileKey("load", 8, 1, "gpu", "bob")) == ()


def test_a_member_without_gpus_costs_nobody_the_estimates(make_controller, caplog):
    """Slurm shows a requeued member for a moment with neither its group nor its GPUs."""
    stray = job_of("bob", 1, "m", held=False, gpu_count=0, gpu_request="gres/gpu:0")
    stored = (known("", "m"), replace(known("", "n"), key=ProfileKey("n", 8, 2, "gpu")))
    slurm = FakeSlurm([stray, job_of("alice", 2, "n")], one_gpu())
    with make_controller(slurm, stored) as controller:
        request = controller.decision().preparation.request
    assert [job.profile.source for job in request.jobs] == ["scaled"]
    assert "estimate" not in caplog.text
