"""Algorithm 1 on small queues: what merges, what doesn't, and when it stops."""

import numpy as np
import pytest
from policy_builders import KINDS
from speed_builders import kinds_with

from muri.policies.grouping.engine import group_buckets
from muri.policies.grouping.problem import BucketProblem
from muri.policies.lockstep import speed_model
from muri.policies.options import PolicyOptions
from muri.policies.speed import Shape


def shape(stage_s, mem_gib=1.0):
    return Shape(tuple(stage_s), sum(stage_s), mem_gib)


FOUR = [shape(stage_s) for stage_s in KINDS.values()]
EIGHT = [*FOUR, *FOUR]


def groups_of(shapes, slots, *, memory_gib=float("inf"), **options):
    problem = BucketProblem(kinds_with(shapes), 1, slots, memory_gib)
    return group_buckets([problem], PolicyOptions(**options), speed_model("lockstep"))[0]


def test_four_complementary_jobs_make_one_group():
    assert groups_of(FOUR, 1).groups == ((0, 1, 2, 3),)


def test_equal_bottlenecks_are_not_worth_sharing():
    # Four jobs that only use the GPU take turns: total speed 1, as one after the other.
    found = groups_of([shape((0.0, 0.0, 1.0, 0.0))] * 4, 2)
    assert found.groups == ((0,), (1,))
    assert found.left == (2, 3)


@pytest.mark.parametrize(("size", "sizes"), [(1, [1, 1]), (2, [2, 2]), (3, [2, 2]), (4, [4, 4])])
def test_the_size_limit_holds(size, sizes):
    # Three can't be formed from pairs of pairs: Algorithm 1 stays with pairs here.
    found = groups_of(EIGHT, 2, max_group_size=size)
    assert [len(group) for group in found.groups] == sizes


@pytest.mark.parametrize("slots", range(2, 9))
def test_no_more_is_merged_than_it_takes_to_fit(slots):
    assert len(groups_of(EIGHT, slots).groups) == slots


def test_only_the_best_pairs_are_merged():
    jobs = random_shapes(12, seed=4)
    every = groups_of(jobs, 6, max_group_size=2, merge="whole-rounds").groups
    gamma = dict(zip(every, speed_model("lockstep").evaluate(jobs, np.array(every)).efficiency, strict=True))
    best = sorted(every, key=lambda pair: -gamma[pair])
    for slots in range(7, 12):
        pairs = {group for group in groups_of(jobs, slots, max_group_size=2).groups if len(group) == 2}
        assert pairs == set(best[: 12 - slots])


@pytest.mark.parametrize(("slots", "sizes"), [(8, [1] * 8), (7, [2] * 4), (5, [2] * 4), (3, [4, 4])])
def test_whole_rounds_merge_every_pair_of_a_round(slots, sizes):
    found = groups_of(EIGHT, slots, merge="whole-rounds")
    assert [len(group) for group in found.groups] == sizes


def test_whole_rounds_end_when_all_buckets_fit_together():
    # 4 + 2·4 GPUs are wanted and 6 are there. One round of all buckets leaves 2 + 2·2, which is enough,
    # although the second bucket by itself had room for one group only.
    problems = [BucketProblem(kinds_with(FOUR), 1, 4), BucketProblem(kinds_with(FOUR), 2, 1)]
    small, large = group_buckets(problems, PolicyOptions(merge="whole-rounds"), speed_model("lockstep"))
    assert [len(group) for group in small.groups] == [2, 2]
    assert [len(group) for group in large.groups] == [2, 2]


@pytest.mark.parametrize(("memory_gib", "size"), [(40.0, 4), (39.9, 2), (19.9, 1)])
@pytest.mark.parametrize("grouping", ["rounds", "optimal"])
def test_memory_must_fit(memory_gib, size, grouping):
    jobs = [shape(stage_s, mem_gib=10.0) for stage_s in KINDS.values()]
    found = groups_of(jobs, 1, memory_gib=memory_gib, grouping=grouping)
    assert [len(group) for group in found.groups] == ([size] if size != 2 or grouping == "rounds" else [3])


@pytest.mark.parametrize("grouping", ["rounds", "optimal"])
def test_a_margin_can_be_asked_for(grouping):
    jobs = [FOUR[2], FOUR[2]]  # T = 2.2 s for two iterations of 1.3 s: 1.18 times
    assert groups_of(jobs, 1, grouping=grouping).groups == ((0, 1),)
    assert groups_of(jobs, 1, grouping=grouping, min_speedup=1.18).groups == ((0, 1),)
    assert groups_of(jobs, 1, grouping=grouping, min_speedup=1.19).groups == ((0,),)


def random_shapes(count, seed):
    rng = np.random.default_rng(seed)
    return [shape(stage_s) for stage_s in np.round(rng.random((count, 4)), 3).tolist()]


def test_the_proven_bound_holds_for_every_method():
    jobs = random_shapes(24, seed=1)
    optimum = groups_of(jobs, 6, grouping="optimal").certificate
    for matching in ("certified", "rustworkx", "priority-order"):
        certificate = groups_of(jobs, 6, matching=matching).certificate
        assert certificate.value <= optimum.upper_bound + 1e-9
        assert certificate.upper_bound >= optimum.value - 1e-9


def test_the_most_urgent_jobs_are_in_a_group_and_the_rest_waits():
    gpu_only = shape((0.0, 0.0, 1.0, 0.0))
    cpu_only = shape((0.0, 1.0, 0.0, 0.0))
    found = groups_of([gpu_only, gpu_only, gpu_only, cpu_only], 2)
    assert found.groups in (((0, 3), (1,)), ((0,), (1, 3)))
    assert found.left == (2,)


@pytest.mark.parametrize("grouping", ["rounds", "optimal"])
def test_a_job_that_a_matching_leaves_alone_takes_a_partner_among_those_that_get_no_slot(grouping):
    # The two others are the better pair.
    jobs = [shape((0.5, 0.4, 0.1, 0.0)), shape((1.0, 0.0, 0.0, 0.0)), shape((0.0, 1.0, 0.0, 0.0))]
    assert groups_of(jobs, 1, grouping=grouping, max_group_size=2).groups == ((0, 2),)


def test_a_job_that_a_matching_leaves_alone_stays_so_where_no_partner_pays():
    jobs = [shape((1.0, 1.0, 0.0, 0.0)), shape((1.0, 0.0, 0.0, 0.0)), shape((0.0, 1.0, 0.0, 0.0))]
    assert groups_of(jobs, 1, max_group_size=2, min_speedup=1.6).groups == ((0,),)


@pytest.mark.parametrize("grouping", ["rounds", "optimal"])
@pytest.mark.parametrize(("worth", "partners"), [((1.0, 1.0), (0, 1)), ((1.0, 1 / 1.5), (0,))])
def test_a_short_job_is_not_slowed_for_a_long_one(grouping, worth, partners):
    # Both mostly use the GPU: together each runs at 0.59 of its speed (T = 2.2 s for iterations of 1.3 s). For two jobs
    # of equal remaining time that is worth it, for a short one and a long one it isn't: 0.59 + 0.59 / 1.5 < 1.
    problem = BucketProblem(kinds_with((FOUR[2], FOUR[2]), worth), 1, 1)
    options = PolicyOptions(objective="jct", grouping=grouping)
    assert group_buckets([problem], options, speed_model("lockstep"))[0].groups == (partners,)


@pytest.mark.parametrize("grouping", ["rounds", "optimal"])
@pytest.mark.parametrize("objective", ["efficiency", "throughput", "jct"])
def test_a_pair_slower_than_one_after_the_other_is_never_made(grouping, objective):
    gpu_only = shape((0.0, 0.0, 1.0, 0.0))
    problem = BucketProblem(kinds_with((gpu_only, gpu_only), (1.0, 100.0)), 1, 1)
    options = PolicyOptions(objective=objective, grouping=grouping)
    assert group_buckets([problem], options, speed_model("fair"))[0].groups == ((0,),)
