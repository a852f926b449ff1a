"""Models measured while their jobs train: planned with estimates at once, stored when sure, no dry run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import (
    FOUR_KINDS,
    NOW_S,
    FakeSlurm,
    dry_runs,
    four_jobs,
    group_at_work,
    make_job,
    make_node,
    one_cycle,
    one_gpu,
    pilots,
)

from muri.clock import text_of
from muri.profiler.records import IN_PLACE, ProfileDetail, ProfileKey, StageProfile
from muri.profiler.store import Author, ProfileStore
from muri.slurm_plugin.planning.actions import KeepProfile, NotMeasured
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.comment_reports import with_measured
from muri.slurm_plugin.records.journal import DRY_RUN_FAILED
from muri.slurm_plugin.records.roles import read_job

Make = Callable[..., Any]
M1 = ProfileKey("m1", 8, 1, "gpu", "alice")
OTHERS = FOUR_KINDS[1:]


def result(at_s: float = 0.0, **changes: Any) -> dict[str, Any]:
    """Return a pilot job's report of a member."""
    times = {"load_s": 0.6, "preprocess_s": 0.2, "propagate_s": 0.1, "synchronize_s": 0.05}
    detail = {"confidence": 0.97, "dangers": ["children"], "warmup_iterations": 2}
    rest = {"iteration_s": 1.0, "iterations": 14, "gpu_mem_gib": 3.5, "detail": detail, "stopped": "sure", "at": at_s}
    return times | rest | changes


def running(make_controller: Make, *known: StageProfile) -> FakeSlurm:
    """Four jobs in a group that runs."""
    slurm = group_at_work(make_controller, known or FOUR_KINDS)
    assert pilots(slurm)
    return slurm


def tell(slurm: FakeSlurm, job_id: int, found: dict[str, Any]) -> None:
    job = slurm.jobs[job_id]
    slurm.jobs[job_id] = replace(job, comment=with_measured(job.comment, found))


@pytest.mark.parametrize(
    ("known", "told"),
    [
        (OTHERS, "its profile is estimated (the mean of this site's models) until it has been measured"),
        ((), "a guess: no model of this site has been measured"),
    ],
)
def test_a_model_never_seen_is_planned_at_once_with_the_mean_of_the_others_or_a_guess(
    make_controller: Make, known: tuple[StageProfile, ...], told: str
) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    status = one_cycle(make_controller, slurm, known)
    assert not dry_runs(slurm)
    assert len(pilots(slurm)) == 1
    assert told in str(status[1])
    assert "waits for the dry run" not in str(status)


def test_what_a_model_never_seen_mostly_uses_is_not_told_as_a_fact(make_controller: Make) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    told = str(one_cycle(make_controller, slurm, OTHERS)[1])
    assert "what 1 mostly uses is not measured yet" in told
    assert " 1 mostly uses the " not in told.replace(";", " ")
    assert "2 mostly uses the cpu" in told


@pytest.mark.parametrize(("known", "shares"), [(OTHERS, False), (FOUR_KINDS, True)])
def test_a_script_that_does_not_call_muri_keeps_its_gpus_until_its_model_is_known(
    make_controller: Make, known: tuple[StageProfile, ...], shares: bool
) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    slurm.jobs[1] = replace(slurm.jobs[1], admin_comment=f"{slurm.jobs[1].admin_comment} muri-calls:no")
    status = one_cycle(make_controller, slurm, known)
    members = {job_id for pilot in pilots(slurm) if (tag := read_job(pilot).pilot_tag) for job_id in tag.members}
    assert (1 in members) == shares
    assert ("does not call `muri run` itself, without which it takes no turns" in str(status[1])) != shares


def test_where_the_site_names_the_gpus_memory_an_unknown_model_shares_with_nobody(make_controller: Make) -> None:
    slurm = FakeSlurm(four_jobs(), [make_node("n1", gpu_count=2)])
    others = tuple(replace(each, gpu_mem_gib=2.0) for each in OTHERS)
    one_cycle(make_controller, slurm, others, gpu_mem_gib={"gpu": 24.0})
    groups = [read_job(pilot).pilot_tag for pilot in pilots(slurm)]
    assert groups
    assert all(group is not None and (1 not in group.members or group.members == (1,)) for group in groups)


@pytest.mark.parametrize(("gpu_mem_gib", "together"), [({}, 2), ({"gpu": 24.0}, 1)])
def test_two_models_never_seen_share_at_once_where_no_memory_is_named(
    make_controller: Make, gpu_mem_gib: dict[str, float], together: int
) -> None:
    slurm = FakeSlurm(four_jobs(), one_gpu())
    one_cycle(make_controller, slurm, (), gpu_mem_gib=gpu_mem_gib)
    (group,) = [read_job(pilot).pilot_tag for pilot in pilots(slurm)]
    assert group is not None
    assert len(group.members) == together


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.COMPLETED])
def test_what_a_members_first_iterations_tell_is_stored_once(
    make_controller: Make, store: ProfileStore, state: JobState
) -> None:
    slurm = running(make_controller, *OTHERS)
    tell(slurm, 1, result(slurm.now_s - 30))
    slurm.jobs[1] = replace(slurm.jobs[1], state=state)
    older = with_measured("", result(slurm.now_s - 90, load_s=0.2))
    slurm.jobs[9] = replace(slurm.jobs[1], job_id=9, start_s=slurm.now_s - 300, comment=older)
    for _ in range(3):
        slurm.now_s += 60
        one_cycle(make_controller, slurm)
    found = store.get(M1)
    assert found is not None
    assert (found.source, found.measured_at) == (IN_PLACE, text_of(slurm.now_s - 210))
    assert (found.stage_s, found.iteration_s, found.iterations) == ((0.6, 0.2, 0.1, 0.05), 1.0, 14)
    assert (found.gpu_mem_gib, found.detail.dangers) == (3.5, ("children",))
    assert len(store.history(M1)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"load_s": -1.0},
        {"iteration_s": "long"},
        {"detail": {"confidence": 7.0}},
        {"iterations": 1000},  # more than it can have done since its start
        {"at": 1e300},
        {"at": 1e300, "error": "A" * 400},
    ],
)
def test_figures_that_cannot_be_true_are_refused_in_one_line_of_a_user(
    make_controller: Make, store: ProfileStore, changes: dict[str, Any]
) -> None:
    slurm = running(make_controller, *OTHERS)
    forged = tags.MEASURED_PREFIX + tags.format_json(result(slurm.now_s) | changes)
    for job_id in (1, 2):
        slurm.jobs[job_id] = replace(slurm.jobs[job_id], comment=forged)
    with make_controller(slurm, ()) as controller:
        for _ in range(2):
            slurm.now_s += 60
            status = controller.cycle()
        assert controller._journal.facts(DRY_RUN_FAILED) == {}
    (line,) = status.errors
    assert "its figures of its model cannot be true" in line
    assert line.endswith("(one of 2 faulty jobs of alice)")
    assert "cannot be true" in str([job.reasons for job in status.jobs if job.job_id == 2])
    assert store.get(M1) is None


@pytest.mark.parametrize("told", [{"error": "A" * 400}, {"a": 1}, result()])
@pytest.mark.parametrize("at_s", [1e300, -1e300, NOW_S])
def test_jobs_that_have_not_run_in_a_group_say_nothing_of_their_models(
    make_controller: Make, caplog: pytest.LogCaptureFixture, told: dict[str, Any], at_s: float
) -> None:
    forged = tags.MEASURED_PREFIX + tags.format_json(told | {"at": at_s})
    alone = {"start_s": NOW_S - 100, "nodes": "n1", "held": False}
    states = {JobState.PENDING: {}, JobState.CANCELLED: {}, JobState.RUNNING: alone, JobState.COMPLETED: alone}
    jobs = [make_job(number, comment=forged, state=each, **states[each]) for number, each in enumerate(states, 1)]
    state = f"muri-state:{tags.format_state(tags.MemberState(9, tags.Original('gres/gpu:1', '', 4, 1, 0, 3600)))}"
    jobs += [make_job(5, comment=forged, state=JobState.CANCELLED, admin_comment=f"muri:model=m1 {state}")]
    slurm = FakeSlurm([*jobs, make_job(9, admin_comment="muri-pilot:t:5")], one_gpu())
    with make_controller(slurm, OTHERS) as controller:
        decision = controller.decision()
    assert not [each for each in decision.repairs if isinstance(each, KeepProfile | NotMeasured)]
    assert decision.untrue == {}
    assert caplog.records == []


def test_a_model_of_which_runs_tell_too_little_runs_alone_for_a_day(make_controller: Make, store: ProfileStore) -> None:
    slurm = running(make_controller, *OTHERS)
    for number in range(2):
        tell(slurm, 1, {"error": "Muri saw 0 of its iterations, too few to measure it", "at": slurm.now_s - 30})
        for _ in range(3):  # a run counts once
            slurm.now_s += 60
            one_cycle(make_controller, slurm)
        slurm.jobs[50 + number] = make_job(50 + number, submit_s=slurm.now_s)
        said = str(one_cycle(make_controller, slurm)[50 + number])
        assert ("its profile is estimated" in said) == (number == 0)  # else it runs alone
    slurm.now_s += 2 * 86400
    slurm.jobs[60] = make_job(60, submit_s=slurm.now_s)
    assert "its profile is estimated" in str(one_cycle(make_controller, slurm)[60])
    assert store.get(M1) is None


KIND = replace(FOUR_KINDS[0], key=M1, measured_at=text_of(0))
UNSURE = replace(KIND, source="dry-run", detail=ProfileDetail(confidence=0.02))
EARLY = replace(KIND, source=IN_PLACE, detail=ProfileDetail(confidence=0.6))


@pytest.mark.parametrize(
    ("stored", "is_stale", "told_after_s", "confidence", "is_replaced"),
    [
        (KIND, True, 5.0, 0.97, True),
        (KIND, True, -5.0, 0.97, False),  # measured before it became stale
        (KIND, False, 5.0, 0.97, False),
        (UNSURE, False, 5.0, 0.97, True),
        (UNSURE, False, 5.0, 0.01, False),
        (replace(UNSURE, measured_at=text_of(2e9)), False, 5.0, 0.97, False),  # a newer one is known
        (EARLY, False, 5.0, 0.97, True),  # told at once, before it was sure
        (EARLY, False, 5.0, 0.5, False),
        (replace(EARLY, detail=ProfileDetail(confidence=0.96)), False, 5.0, 0.97, False),
    ],
)
def test_a_stale_or_unsure_profile_is_replaced_by_what_was_measured_since_and_is_surer(
    make_controller: Make, store: ProfileStore, stored: StageProfile, is_stale: bool, told_after_s: float,
    confidence: float, is_replaced: bool,
) -> None:  # fmt: skip
    slurm = running(make_controller, *OTHERS)
    store.put(stored)
    if is_stale:
        store.mark_stale(M1, "it drifted", Author("drift", text_of(slurm.now_s), "stale"))
    tell(slurm, 1, result(slurm.now_s + told_after_s, detail={"confidence": confidence}))
    slurm.now_s += 60
    one_cycle(make_controller, slurm)
    found = store.get(M1)
    assert found is not None
    assert (found.measured_at != stored.measured_at) == is_replaced
    assert bool(store.stale_marks()) == (is_stale and not is_replaced)


@pytest.mark.parametrize(
    ("policy", "words", "times"), [("auto", "", 1), ("auto", ",alone=1", 0), ("fifo", "", 0), ("synergy", "", 0)]
)
def test_who_may_share_is_told_once_of_an_estimate_and_nobody_else_is(
    make_controller: Make, policy: str, words: str, times: int
) -> None:
    comment = f"muri:model=new,batch-size=8,duration=100{words}"
    bobs = make_job(2, user="bob", uid=1002, admin_comment=comment)
    slurm = FakeSlurm([make_job(1, admin_comment=comment), bobs], one_gpu())
    status = one_cycle(make_controller, slurm, (), policy=policy)
    assert (status[1].state, status[2].state) == ("alone", "waiting")
    told = [sum("its profile is estimated" in why for why in status[number].reasons) for number in (1, 2)]
    assert told == [times, times]


def test_spare_nodes_make_dry_runs_for_which_nobody_waits(make_controller: Make) -> None:
    nodes = [make_node("n1", gpu_count=1), make_node("n2", gpu_count=1, partitions=("measure",))]
    slurm = FakeSlurm([make_job(5), make_job(6)], nodes)
    slurm.jobs[9] = make_job(9, admin_comment="", held=False, state=JobState.RUNNING, nodes="n1")
    with make_controller(slurm, (), profiling={"partition": "measure"}) as controller:
        controller.cycle()
        (run,) = dry_runs(slurm)
        assert run.partition == "measure"
        slurm.tick()
        slurm.end(9)
        controller.cycle()
    assert not slurm.jobs[5].held
    assert slurm.jobs[run.job_id].state is JobState.CANCELLED
    assert "release" not in slurm.calls[: slurm.calls.index("cancel")]
