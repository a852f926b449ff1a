"""The controller's watch over its groups: drift marks a profile, one dry run measures it again, jobs don't wait."""

from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import (
    FOUR_KINDS,
    MEASURED,
    FakeSlurm,
    dry_runs,
    end_dry_run,
    four_jobs,
    group_at_work,
    make_job,
    one_gpu,
    pilots,
)

from muri.profiler.errors import CorruptStoreError
from muri.profiler.records import STAGES, ProfileDetail, ProfileKey
from muri.profiler.store import Author, ProfileStore
from muri.slurm_plugin.config import Profiling
from muri.slurm_plugin.controller.assemble import open_controller, read_config
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import speeds_token
from muri.slurm_plugin.records.roles import Role, read_job

M1 = ProfileKey("m1", 8, 1, "gpu", "alice")
ALICES = tuple(replace(each, key=replace(each.key, user="alice")) for each in FOUR_KINDS)
WATCH = {"tuning": {"drift_after_s": 300, "drift_again_s": 10_000}}
CYCLE_S = 100.0
DRY_RUN = pytest.mark.configuration(profiling={"mode": "dry-run"})


def report(slurm, cycle, **slow):
    """Let the pilot tell of its members: as profiled, or slower by a factor."""
    members = {}
    for kind in FOUR_KINDS:
        factor = slow.get(kind.key.model, 1.0)
        times = {stage: factor * value for stage, value in zip(STAGES, kind.stage_s, strict=True)}
        members[kind.key.model.removeprefix("m")] = {
            "iterations": 100 * (cycle + 1), "iterations_per_s": 1.0, "stage_s": times, "wait_s": times,
        }  # fmt: skip
    (pilot,) = pilots(slurm)
    slurm.jobs[pilot.job_id] = replace(pilot, comment=speeds_token({"members": members}))


def cycles(slurm, make_controller, count, begin=0, slow=None, **changes):
    with make_controller(slurm, **(WATCH | changes)) as controller:
        for cycle in range(begin, begin + count):
            slurm.now_s += CYCLE_S
            report(slurm, cycle, **(slow or {}))
            controller.cycle()


def marks(store):
    return {mark.key.model: mark for mark in store.stale_marks()}


def test_a_member_that_is_slower_for_long_makes_its_users_profile_stale_until_it_is_back_to_normal(
    make_controller, store
):
    slurm = group_at_work(make_controller, **WATCH)
    cycles(slurm, make_controller, 3, slow={"m1": 1.5})
    assert marks(store) == {}  # 200 s, not 300
    cycles(slurm, make_controller, 1, begin=3, slow={"m1": 1.5})
    (mark,) = marks(store).values()
    assert (mark.key, mark.who) == (M1, "drift")
    assert "load took 1050.0 ms per iteration instead of 700.0 ms over 300 iterations" in mark.reason
    assert len(store.observations(M1)) == 4
    assert store.observations(M1.published) == ()
    cycles(slurm, make_controller, 3, begin=4, slow={"m1": 1.15})
    assert "m1" in marks(store)  # below the limit, above half of it
    cycles(slurm, make_controller, 4, begin=7)
    assert marks(store) == {}


@pytest.mark.parametrize(("slow", "limit"), [(1.1, {}), (3.0, {"drift_limit": 0})])
def test_members_as_fast_as_profiled_mark_nothing_and_the_watch_can_be_turned_off(make_controller, store, slow, limit):
    slurm = group_at_work(make_controller, **WATCH)
    cycles(slurm, make_controller, 8, slow={"m1": slow}, tuning={"drift_after_s": 300, **limit})
    assert marks(store) == {}


def test_what_jobs_report_replaces_what_a_dry_run_was_not_sure_of(make_controller, store):
    slurm = group_at_work(make_controller, **WATCH)
    unsure = replace(ALICES[0], detail=ProfileDetail(confidence=0.03, gradient_mib=5.0), source="dry-run")
    store.put(unsure)
    cycles(slurm, make_controller, 3, slow={"m1": 1.5})
    assert store.get(M1) == unsure  # 200 s, not 300
    cycles(slurm, make_controller, 1, begin=3, slow={"m1": 1.5})
    found = store.get(M1)
    published = store.get(M1.published)
    assert (found.source, found.detail.confidence, found.detail.gradient_mib) == ("run", None, 5.0)
    assert found.stage_s == pytest.approx([1.5 * seconds for seconds in unsure.stage_s])
    assert published == FOUR_KINDS[0], "one user's jobs say nothing of what is published"
    cycles(slurm, make_controller, 6, begin=4, slow={"m1": 1.5})
    assert marks(store) == {}, "what the jobs do now is what is expected of them"


def test_a_mark_by_hand_is_not_taken_back(make_controller, store):
    slurm = group_at_work(make_controller, **WATCH)
    store.mark_stale(M1, "new loader", Author("bob", "2026-11-21T20:30:00Z", "stale"))
    cycles(slurm, make_controller, 6)
    assert marks(store)["m1"].who == "bob"


def test_a_measurement_that_did_not_help_is_not_repeated_at_once(make_controller, store):
    slurm = group_at_work(make_controller, **WATCH)
    cycles(slurm, make_controller, 4, slow={"m1": 1.5})
    store.put(ALICES[0])  # the dry run found the same as before
    cycles(slurm, make_controller, 8, begin=4, slow={"m1": 1.5})
    assert marks(store) == {}
    slurm.now_s += 10_000
    cycles(slurm, make_controller, 6, begin=12, slow={"m1": 1.5})
    assert "m1" in marks(store)


def stale_m1(store):
    store.put_all(ALICES)
    store.mark_stale(M1, "drifted", Author("drift", "2026-11-21T20:30:00Z", "stale"))


@DRY_RUN
def test_one_dry_run_for_a_stale_profile_and_its_other_jobs_start_meanwhile(make_controller, store):
    stale_m1(store)
    slurm = FakeSlurm([make_job(number) for number in (1, 2, 3)], one_gpu())
    with make_controller(slurm) as controller:
        for _ in range(3):
            controller.cycle()
            assert len(dry_runs(slurm)) == 1
            assert slurm.jobs[1].held  # its own script is being measured
        assert not all(slurm.jobs[number].held for number in (2, 3))  # the old profile serves
        (run,) = dry_runs(slurm)
        slurm.tick()
        end_dry_run(slurm, run, 1, **MEASURED)
        controller.cycle()
        controller.cycle()
    assert dry_runs(slurm) == []
    assert marks(store) == {}
    assert store.get(M1).load_s == 0.9


@DRY_RUN
def test_the_result_counts_when_the_measured_job_has_ended_first(make_controller, store):
    stale_m1(store)
    slurm = FakeSlurm([make_job(1)], one_gpu())
    with make_controller(slurm) as controller:
        controller.cycle()
        (run,) = dry_runs(slurm)
        slurm.jobs[1] = replace(slurm.jobs[1], state=JobState.COMPLETED, held=False)
        controller.cycle()
        assert slurm.jobs[run.job_id].state.is_active  # not cancelled
        end_dry_run(slurm, run, run.job_id, **MEASURED)
        controller.cycle()
    assert marks(store) == {}


@DRY_RUN
def test_new_models_are_measured_before_stale_ones(make_controller, store):
    stale_m1(store)
    new = make_job(2, admin_comment="muri:model=new,batch-size=8")
    slurm = FakeSlurm([make_job(1), new], one_gpu())
    with make_controller(slurm, profiling={"at_once": 1}) as controller:
        planned = controller.decision().preparation.dry_runs
    assert [(run.key, run.again) for run in planned] == [("new of alice (batch 8, 1 × gpu)", False)]


def damage(path: Path) -> bytes:
    content = b"no database at all" * 1000
    path.write_bytes(content)
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    return content


def test_a_damaged_store_is_set_aside_at_the_start_and_the_next_cycle_goes_on(make_controller, tmp_path, caplog):
    with ProfileStore(tmp_path / "profiles.db"):
        pass
    content = damage(tmp_path / "profiles.db")
    slurm = FakeSlurm(four_jobs(), one_gpu(), gate_license=True)
    changes = {"state_dir": tmp_path, "policy": "muri-s", "profiling": Profiling(mode="dry-run")}
    config = read_config(None).model_copy(update=changes)
    with open_controller(config, slurm) as controller:
        controller.cycle()
        assert dry_runs(slurm) == []  # what Slurm told may be older than a group, and no profile says so
        assert controller.has_more
        assert slurm.lease_end_s == 0.0
        controller.cycle()
        assert not controller.has_more
        assert slurm.lease_end_s > 0.0
    (place,) = tmp_path.glob("profiles.db.damaged-*")
    assert place.read_bytes() == content
    assert "it was set aside as" in caplog.text
    assert len(dry_runs(slurm)) == 2  # measured again, as many at once as the site allows
    assert len([job for job in slurm.jobs.values() if read_job(job).role is Role.CANDIDATE]) == 4  # no job is lost


@DRY_RUN
@pytest.mark.parametrize("table", ["measurement", "document"])
def test_a_store_that_is_damaged_while_the_controller_runs_is_set_aside(make_controller, tmp_path, caplog, table):
    slurm = FakeSlurm(four_jobs(), one_gpu())
    with make_controller(slurm) as controller:
        controller._store._connection.execute(f"DROP TABLE {table}")
        status = controller.cycle()
        assert status.errors == ()
        controller.cycle()
    assert len(list(tmp_path.glob("profiles.db.damaged-*"))) == 1
    assert "is damaged" in caplog.text
    assert len(dry_runs(slurm)) == 2


def test_whoever_only_looks_sets_nothing_aside(tmp_path):
    content = damage(tmp_path / "profiles.db")
    config = read_config(None).model_copy(update={"state_dir": tmp_path})
    with pytest.raises(CorruptStoreError), open_controller(config, FakeSlurm([], one_gpu()), look_only=True):
        pass
    assert (tmp_path / "profiles.db").read_bytes() == content
