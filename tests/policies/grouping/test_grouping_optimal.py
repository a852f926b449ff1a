"""The choice among all groups, against every partition there is."""

import dataclasses
from functools import cache
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from speed_builders import kinds_with

from muri.policies.grouping import engine, kway
from muri.policies.grouping.engine import group_buckets
from muri.policies.grouping.kway import Limits, all_columns, choose_columns
from muri.policies.grouping.problem import BucketProblem
from muri.policies.lockstep import speed_model
from muri.policies.options import OBJECTIVES, PolicyOptions
from muri.policies.speed import Shape

_stage_s = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def shapes(draw, memory_gib=(0.0, 4.0, 9.0)):
    stage_s = draw(st.tuples(*[_stage_s] * 4).filter(lambda stages: sum(stages) > 0))
    return Shape(stage_s, sum(stage_s), draw(st.sampled_from(memory_gib)), "")


@st.composite
def problems(draw, most_jobs=8):
    pool = draw(st.lists(shapes(), min_size=1, max_size=5))
    jobs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=most_jobs))
    worth = draw(st.lists(st.sampled_from((0.1, 1.0, 7.0)), min_size=len(jobs), max_size=len(jobs)))
    slots = draw(st.integers(0, len(jobs)))
    limit = draw(st.sampled_from((float("inf"), 10.0, 20.0)))
    largest = draw(st.just([]) | st.lists(st.sampled_from((1, 2, 3, 4, 9)), min_size=len(jobs), max_size=len(jobs)))
    return BucketProblem(kinds_with(jobs, worth, largest), 1, slots, limit)


options = st.builds(
    PolicyOptions,
    max_group_size=st.integers(1, 4),
    grouping=st.just("optimal"),
    objective=st.sampled_from(OBJECTIVES),
    speed_model=st.sampled_from(("lockstep", "fair")),
    min_speedup=st.sampled_from((1.0, 1.2)),
)


def value_of(members, problem, how, model):
    """What one group is worth, None when it may not be formed; written without the code under test."""
    if len(members) > 1 and sum(problem.jobs[job].shape.gpu_mem_gib for job in members) > problem.memory_limit_gib:
        return None
    if len(members) > min(problem.jobs[job].largest for job in members):
        return None
    evaluation = model.evaluate([problem.jobs[job].shape for job in members], np.arange(len(members))[None])
    speed = evaluation.speed[0]
    if len(members) > 1 and speed.sum() <= how.min_speedup + 1e-9:
        return None
    if how.objective == "efficiency":
        return evaluation.efficiency[0]
    return sum(
        rate * (problem.jobs[job].worth if how.objective == "jct" else 1.0)
        for rate, job in zip(speed, members, strict=True)
    )


def best_value(problem, how, model):
    """The optimum by trying every choice of groups."""
    count = len(problem.jobs)
    worth = {
        members: value
        for size in range(1, how.max_group_size + 1)
        for members in combinations(range(count), size)
        if (value := value_of(members, problem, how, model)) is not None
    }

    @cache
    def best(job, used, slots):
        if job == count:
            return 0.0
        if used >> job & 1:
            return best(job + 1, used, slots)
        urgent = job < problem.slots
        found = -np.inf if urgent else best(job + 1, used | 1 << job, slots)
        if slots:
            for members, value in worth.items():
                bits = sum(1 << member for member in members)
                if members[0] == job and not used & bits:
                    found = max(found, value + best(job + 1, used | bits, slots - 1))
        return found

    return best(0, 0, problem.slots)


def check_limits(answer, problem, how):
    """Each job is placed or left out once, groups fit the slots, and no urgent job is left out."""
    assert sorted([*chain(*answer.groups), *answer.left]) == list(range(len(problem.jobs)))
    assert len(answer.groups) <= problem.slots
    assert not [job for job in answer.left if job < problem.slots]
    assert all(1 <= len(group) <= how.max_group_size and list(group) == sorted(group) for group in answer.groups)
    assert answer.certificate.upper_bound >= answer.certificate.value


@given(problems(), options)
@settings(max_examples=60, deadline=None)
def test_the_value_is_that_of_the_best_of_all_groupings(problem, how):
    model = speed_model(how.speed_model)
    (answer,) = group_buckets([problem], how, model)
    check_limits(answer, problem, how)
    total = sum(value_of(members, problem, how, model) for members in answer.groups)
    assert total == pytest.approx(answer.certificate.value, abs=1e-9)
    if len(problem.jobs) <= problem.slots:
        assert total == pytest.approx(answer.certificate.upper_bound)
        return
    if how.max_group_size > 1:
        assert total == pytest.approx(best_value(problem, how, model), rel=1e-6, abs=1e-9)
        assert answer.certificate.gap == pytest.approx(0.0, abs=1e-6)


@given(problems(), options)
@settings(max_examples=60, deadline=None)
def test_improving_the_groups_of_algorithm_1_keeps_every_limit(problem, how):
    model = speed_model(how.speed_model)
    rounds = group_buckets([problem], dataclasses.replace(how, grouping="rounds"), model)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "COLUMN_LIMIT", 0)  # as if there were too many kinds to list all groups
        (answer,) = group_buckets([problem], how, model)
    check_limits(rounds, problem, how)
    check_limits(answer, problem, how)
    worth = [value_of(members, problem, how, model) for members in answer.groups]
    assert sum(worth) == pytest.approx(answer.certificate.value)
    assert answer.certificate.value >= rounds.certificate.value - 1e-9
    if how.max_group_size > 1 and len(problem.jobs) > problem.slots:
        best = best_value(problem, how, model)
        assert min(found.certificate.upper_bound for found in (rounds, answer)) >= best - 1e-6


def test_improving_takes_pairs_apart_again():
    # The best pairs of the first round don't make the best fours.
    kinds = random_shapes(80, seed=5)
    problem = BucketProblem(kinds_with(kinds), 1, 20)
    rounds, improved = (
        group_buckets([problem], PolicyOptions(grouping=grouping), speed_model("fair"))[0].certificate.value
        for grouping in ("rounds", "optimal")
    )
    assert improved > 1.02 * rounds


def random_shapes(count, seed):
    rng = np.random.default_rng(seed)
    stage_s = np.round(rng.lognormal(-2.5, 0.8, (count, 4)), 4)
    return [Shape(tuple(row), sum(row)) for row in stage_s.tolist()]


@pytest.mark.parametrize("slots", [9, 100, 400])
def test_many_kinds_are_solved_to_a_small_proven_gap(slots):
    kinds = sorted(random_shapes(30, seed=2))
    columns = all_columns(kinds_with(kinds), [4] * 30, PolicyOptions(), speed_model("lockstep"), float("inf"))
    assert len(columns.value) > 20_000
    counts = np.bincount(np.random.default_rng(4).integers(0, 30, 4 * slots), minlength=30).astype(float)
    choice = choose_columns(columns, Limits(counts, np.zeros(30), slots))
    used = np.zeros(31)
    for column, count in zip(choice.columns, choice.counts, strict=True):
        np.add.at(used, columns.members[column], count)
    assert (used[:30] <= counts).all()
    assert choice.counts.sum() <= slots
    assert choice.value <= choice.upper_bound
    # The bound is for the relaxation: small problems keep a gap that whole numbers can't close.
    assert 1 - choice.value / choice.upper_bound < (0.05 if slots < 10 else 0.01)


@pytest.mark.parametrize("seed", range(5))
def test_trying_every_choice_and_the_program_agree(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    kinds = sorted(random_shapes(3, seed))
    counts, slots = rng.integers(1, 4, 3).astype(float), int(rng.integers(1, 3))
    urgent = np.minimum(counts, [slots, 0, 0])
    columns = all_columns(kinds_with(kinds), [2] * 3, PolicyOptions(), speed_model("fair"), float("inf"))
    monkeypatch.setattr(kway, "_relax", None)  # not asked for where there are few choices
    tried = choose_columns(columns, Limits(counts, urgent, slots))
    monkeypatch.undo()
    monkeypatch.setattr(kway, "_FEW_CHOICES", 0)
    solved = choose_columns(columns, Limits(counts, urgent, slots))
    assert tried.value == pytest.approx(solved.value)
    assert tried.upper_bound == tried.value


def test_groups_are_listed_again_only_when_jobs_come_or_go():
    kinds = sorted(random_shapes(9, seed=5))
    how, model = PolicyOptions(objective="jct"), speed_model("lockstep")

    def value_of_groups(worth):
        return all_columns(kinds_with(kinds, worth), [1] * 9, how, model, float("inf")).value

    before = kway._listing.cache_info().misses
    once, twice = value_of_groups([1.0] * 9), value_of_groups([2.0] * 9)
    assert kway._listing.cache_info().misses == before + 1
    np.testing.assert_allclose(twice, 2 * once)


def test_no_slot_stays_empty_beside_a_waiting_job():
    kinds = random_shapes(64, seed=6)
    jobs = tuple(kinds[index] for index in np.random.default_rng(2).integers(0, 64, 1000).tolist())
    problem = BucketProblem(kinds_with(jobs), 1, 250)
    (answer,) = group_buckets([problem], PolicyOptions(grouping="optimal"), speed_model("lockstep"))
    assert len(answer.groups) == 250
    assert answer.certificate.gap < 0.01
