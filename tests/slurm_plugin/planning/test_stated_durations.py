"""Stated durations are believed as far as those of the same user's last jobs held."""

from dataclasses import replace

import pytest
from at_work import behind_pilot, candidate, cycle_of
from fake_slurm import NOW_S, FakeSlurm, make_job, make_node, one_cycle, one_gpu, speeds_report
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.planning.cycle_input import Claim, Claims, claim_facts, noted_claims, times_of
from muri.slurm_plugin.records.cluster import Job, JobState

DAY_S = 86400.0


def mine(
    job_id: int, stated_s: int, ran_s: float = 0.0, state: JobState = JobState.COMPLETED, **changes: object
) -> Job:
    """A job of alice's that began so long before now."""
    at_work = {"state": state, "held": False, "reason": "", "nodes": "n1", "start_s": NOW_S - ran_s, "end_s": NOW_S}
    return make_job(job_id, admin_comment=f"muri:model=m1,duration={stated_s}", **at_work)


def seen(*jobs: Job, known: Claims | None = None) -> tuple[Claim, ...]:
    return noted_claims(known or {}, cycle_of(jobs, [make_node("n1")]).view).get("alice", ())


@pytest.mark.parametrize(
    ("state", "stated_s", "ran_s", "times"),
    [
        (JobState.RUNNING, 1, 60.0, None),
        (JobState.RUNNING, 1, 3660.0, 3600.0),
        (JobState.COMPLETED, 1, 50.0, None),
        (JobState.COMPLETED, 600, 720.0, 1.0),
        (JobState.CANCELLED, 600, 300.0, None),
        (JobState.FAILED, 600, 1260.0, 2.0),
    ],
)
def test_a_job_tells_of_its_user_once_it_has_completed_or_overrun(state, stated_s, ran_s, times):
    assert [claim.times for claim in seen(mine(1, stated_s, ran_s, state))] == ([] if times is None else [times])


def test_a_member_tells_of_its_own_time_alone_as_far_as_that_can_be_true():
    pilot, member = behind_pilot(1, candidate(2001))  # 600 s at 0.9 of its speed, an iteration in 1 s

    def gpu_s(iterations: int) -> float:
        report = speeds_report({2001: 0.9}, iterations)
        (claim,) = seen(replace(pilot, comment=report), replace(member, state=JobState.COMPLETED, end_s=NOW_S))
        return claim.gpu_s

    assert [gpu_s(iterations) for iterations in (400, 10, 9999, 0)] == [400.0, 150.0, 540.0, 540.0]


CLAIMS = st.builds(
    Claim, st.integers(1, 99), st.sampled_from("ab"), st.floats(1.0, 1e6), st.floats(0.0, 1e9), st.just(NOW_S)
)


@given(st.lists(CLAIMS, max_size=16), st.integers(0, 15), st.floats(1.0, 10.0))
def test_nobody_gains_by_overrunning_more(claims, which, more):
    worse = [replace(each, times=each.times * more) if number == which else each for number, each in enumerate(claims)]
    assert 1.0 <= times_of(claims, "a") <= times_of(worse, "a")


@given(st.lists(st.tuples(st.integers(1, 100_000), st.floats(0.1, 1.1), st.floats(0.0, 60.0)), max_size=16))
def test_honest_users_are_believed(runs):
    jobs = [mine(number, stated, stated * share + late) for number, (stated, share, late) in enumerate(runs, start=1)]
    assert times_of(seen(*jobs), "") == 1.0


def test_jobs_count_by_their_gpu_time_and_those_of_the_same_model_fourfold():
    def claims(*told: tuple[str, float, float]) -> list[Claim]:
        return [Claim(number, model, times, gpu_s, NOW_S) for number, (model, times, gpu_s) in enumerate(told)]

    late, long, short = ("late", 3600.0, 3600.0), ("long", 1.0, 3600.0), ("short", 1.0, 61.0)
    covered, honest = claims(late, *[short] * 15), claims(late, long, long)
    assert [times_of(covered, model) for model in ("late", "short", "fresh")] == [3600.0] * 3
    assert [times_of(honest, model) for model in ("late", "long", "fresh")] == [3600.0, 1.0, 3600.0]
    assert times_of(claims(late, *[long] * 4), "fresh") == 1.0  # an accident


def test_the_last_sixteen_jobs_of_three_months_are_kept_and_a_suspended_one_tells_nothing_any_more():
    jobs = [mine(number, 1, 1000.0 * number) for number in range(1, 20)]
    first = seen(*jobs)
    assert [claim.job_id for claim in first] == list(range(16, 0, -1))
    assert {"alice": tuple(map(Claim.of, claim_facts({"alice": first})["alice"]))} == {"alice": first}
    known = {"alice": first}
    assert seen(*jobs, mine(1, 1, 1050.0), known=known) == first
    assert seen(mine(1, 1, 2000.0), known=known)[-1].times == 1940.0
    assert seen(known={"alice": (replace(first[0], start_s=NOW_S - 91 * DAY_S),)}) == ()
    suspended = {"alice": seen(mine(1, 1, 600.0, JobState.SUSPENDED))}
    assert times_of(seen(mine(1, 1, 6000.0), known=suspended), "") == 1.0


@pytest.mark.configuration(profiling={"mode": "dry-run"})  # else job 1 has a pilot, and may have had company
@pytest.mark.parametrize("policy", ["muri-s", "srsf"])
def test_after_jobs_that_overran_their_user_overtakes_nobody_under_a_fresh_name_either(make_controller, policy):
    slurm = FakeSlurm([make_job(1, admin_comment="muri:model=m1,duration=1")], one_gpu())
    for seconds in (10.0, 3600.0):
        one_cycle(make_controller, slurm, policy=policy, profiling={"at_once": 0})
        slurm.tick(seconds)
    slurm.end(1)
    slurm.jobs[2] = make_job(2, admin_comment="muri:model=fresh,duration=1")
    slurm.jobs[3] = make_job(3, admin_comment="muri:model=m9,duration=600", user="bob", uid=1002)
    told = one_cycle(make_controller, slurm, policy=policy, profiling={"at_once": 0})
    slurm.tick()
    assert [slurm.jobs[job].state for job in (1, 2, 3)] == [JobState.COMPLETED, JobState.PENDING, JobState.RUNNING]
    assert told[2].duration_factor == pytest.approx(3540.0)
    assert any(why.startswith("its duration=1s is taken as 59 min: ") for why in told[2].reasons)
