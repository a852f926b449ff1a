"""muri-hybrid in the controller's cycle: only measured pairs share without turns."""

from dataclasses import replace
from functools import partial

import at_work
import pytest
from at_work import measured_pair, of_kind
from fake_slurm import NOW_S, FakeSlurm, make_job, one_gpu, told

from muri.policies.registry import get_policy
from muri.policies.types import PlanRequest
from muri.profiler.interference import Interference
from muri.profiler.records import STAGES, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.actions import Join, Preempt, StartGroup
from muri.slurm_plugin.planning.decision import Decision
from muri.slurm_plugin.planning.model_traits import KnownTraits, with_measured_pairs
from muri.slurm_plugin.planning.slurm_requests import pilot_job
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import NewJob
from muri.slurm_plugin.records.comment_reports import speeds_token
from muri.slurm_plugin.records.comment_tags import MODE_PREFIX, mode_of
from muri.slurm_plugin.records.roles import Role, read_job

HYBRID = {"policy": "muri-hybrid"}
A, B = ProfileKey("a", 8, 1, "gpu"), ProfileKey("b", 8, 1, "gpu")
LOADER = ProfileKey("loader", 8, 1, "gpu")


def profile(key: ProfileKey, gpu: float = 1.0) -> StageProfile:
    """Of a second per iteration, as much as `gpu` on the GPU and the rest at the storage."""
    return StageProfile(key, 1 - gpu, 0.0, gpu, 0.0, iteration_s=1.0, iterations=20)


KNOWN = (profile(A), profile(B), profile(LOADER, 0.0))


pair = partial(measured_pair, ratio_a=1.25, ratio_b=1.6)


def job(job_id: int, model: str, batch_size: int = 8, **changes):
    return make_job(job_id, admin_comment=f"muri:model={model},batch-size={batch_size},duration=3600", **changes)


def decided(slurm: FakeSlurm, *pairs: Interference, known=KNOWN, **changes):
    seen, config = slurm.snapshot(), {**HYBRID, **changes}
    return at_work.decided(seen.jobs, seen.nodes, known=known, traits=KnownTraits(pairs=pairs), **config)


def starts(decision: Decision) -> list[StartGroup]:
    return of_kind(decision, StartGroup)


def two_jobs(*more) -> FakeSlurm:
    return FakeSlurm([job(1, "a"), job(2, "b"), *more], one_gpu())


def running_pair() -> FakeSlurm:
    """Two jobs at work, as a cycle that knew their pair has started them."""
    slurm = two_jobs()
    (start,) = starts(decided(slurm, pair(A, B)))
    pilot = slurm.submit(pilot_job(start, "0a1b", Config()))
    for member in start.members:
        state = tags.format_state(tags.MemberState(pilot, member.original))
        comment = tags.with_token(slurm.jobs[member.job_id].admin_comment, tags.STATE_PREFIX, state)
        comment = tags.with_token(comment, tags.GRANT_PREFIX, str(pilot))
        slurm.jobs[member.job_id] = replace(
            slurm.jobs[member.job_id], admin_comment=comment, gpu_count=0, required_nodes="n1", held=False
        )
    for _ in range(2):
        slurm.tick()
    assert all(slurm.jobs[each].nodes == "n1" for each in (1, 2, pilot))
    return slurm


def kinds(pilot: NewJob) -> set[str]:
    """How the members of a pilot job's group run."""
    return {member.isolation for member in told(pilot).members}


def turns_again(slurm: FakeSlurm) -> None:
    """Let the group that runs be one that takes turns."""
    for each in slurm.jobs.values():
        comment = tags.with_token(each.admin_comment, MODE_PREFIX, None)
        slurm.jobs[each.job_id] = replace(each, admin_comment=comment)


def test_a_measured_pair_starts_side_by_side_in_processes():
    (start,) = starts(decided(two_jobs(), pair(A, B)))
    assert (start.mode, {member.job_id: member.speed for member in start.members}) == ("plain", {1: 0.8, 2: 0.625})
    assert any("they share without turns" in reason for reason in start.reasons)
    pilot = pilot_job(start, "0a1b", Config())
    assert (told(pilot).discipline, kinds(pilot)) == ("plain", {"process"})
    assert (mode_of(pilot.admin_comment), tags.parse_pilot(pilot.admin_comment)) == ("plain", ("0a1b", (1, 2)))
    turns = pilot_job(replace(start, mode="interleave"), "0a1b", Config())
    assert (told(turns).discipline, kinds(turns)) == ("auto", {"process"})
    assert (mode_of(turns.admin_comment), turns.admin_comment) == ("interleave", "muri-pilot:0a1b:1,2")


def test_estimates_are_not_enough():
    known = (profile(A, 0.6), profile(B, 0.6))
    (start,) = starts(decided(two_jobs(), known=known))
    assert start.mode == "interleave"
    (start,) = starts(decided(two_jobs(), measured_pair(A, B, 1.0, 1.0), known=known))
    assert start.mode == "plain"
    (start,) = starts(decided(two_jobs()))
    assert len(start.members) == 1  # both want the GPU all the time: one after the other


@pytest.mark.parametrize(
    ("more", "pairs", "speeds"),
    [
        ([], [pair(A, B)], (0.8, 0.625)),
        ([], [measured_pair(B, A, 1.6, 1.25)], (0.8, 0.625)),
        ([], [pair(replace(A, batch_size=4), B)], None),
        ([], [pair(A, replace(B, gpu_type="other"))], None),
        ([job(3, "a", 16)], [pair(A, B)], None),  # which of the two batch sizes it is the table can't tell
        ([job(3, "a", 16)], [pair(A, B), measured_pair(replace(A, batch_size=16), B, 2.0, 1.25)], (0.5, 0.625)),
        ([job(3, "a", 8, gpu_count=2, gpu_request="gres/gpu:2")], [pair(A, B)], (0.8, 0.625)),
    ],
)
def test_a_pair_is_told_where_all_that_goes_by_these_names_was_measured(more, pairs, speeds):
    known = (*KNOWN, profile(replace(A, batch_size=16)), profile(replace(A, gpu_count=2)))
    table = decided(two_jobs(*more), *pairs, known=known).preparation.request.interference
    assert (None if table is None else table.speeds("a", "b")) == speeds


def test_two_jobs_of_one_model_share_if_that_was_measured():
    (start,) = starts(decided(FakeSlurm([job(1, "a"), job(2, "a")], one_gpu()), measured_pair(A, A, 1.25, 1.25)))
    assert (start.mode, [member.speed for member in start.members]) == ("plain", [0.8, 0.8])


def test_other_policies_hear_of_no_pairs():
    request = PlanRequest((), (), NOW_S)
    assert with_measured_pairs(request, get_policy("muri-jct"), (pair(A, B),)) is request
    decision = decided(two_jobs(), pair(A, B), policy="muri-jct")
    assert decision.preparation.request.interference is None
    assert [len(start.members) for start in starts(decision)] == [1]


def test_what_runs_without_turns_goes_on_so_and_nobody_joins_it():
    slurm = running_pair()
    decision = decided(slurm, pair(A, B), preemption={"enabled": True})
    (unit,) = decision.preparation.request.running
    assert (unit.mode, [member.job_id for member in unit.members]) == ("plain", [1, 2])
    assert of_kind(decision, Preempt) == []
    slurm.jobs[3] = job(3, "loader")
    assert of_kind(decided(slurm, pair(A, B)), Join) == []
    turns_again(slurm)
    assert [join.member.job_id for join in of_kind(decided(slurm, pair(A, B)), Join)] == [3]


def test_stages_slowed_down_side_by_side_make_no_profile_stale(make_controller, tmp_path):
    def marks_after_slow_cycles(slurm: FakeSlurm, discipline: str) -> set[str]:
        (pilot,) = (each for each in slurm.jobs.values() if read_job(each).role is Role.PILOT)
        slow = dict(zip(STAGES, (0.0, 0.0, 1.6, 0.0), strict=True))
        with make_controller(slurm, KNOWN, **HYBRID, tuning={"drift_after_s": 300}) as controller:
            for cycle in range(5):
                slurm.now_s += 100.0
                member = {"iterations": 100 * (cycle + 1), "iterations_per_s": 0.6, "stage_s": slow, "wait_s": slow}
                report = speeds_token({"members": {"1": member, "2": member}, "discipline": discipline})
                slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=report)
                controller.cycle()
        with ProfileStore(tmp_path / "profiles.db", read_only=True) as store:
            return {mark.key.model for mark in store.stale_marks()}

    slurm = running_pair()
    assert marks_after_slow_cycles(slurm, "plain") == set()
    turns_again(slurm)
    assert marks_after_slow_cycles(slurm, "plain") == set()  # auto has left the turns out
    assert marks_after_slow_cycles(slurm, "fair") == {"a", "b"}
