"""Algorithm 1 on small queues, against every possible grouping."""

import random
from itertools import combinations

import pytest
from policy_builders import KINDS, make_job, make_node, make_profile, make_request

from muri.policies.grouping.algorithm1 import GroupingRules, form_groups
from muri.policies.options import PolicyOptions
from muri.policies.priority import fifo, rank_jobs
from muri.policies.schedulers.muri import MuriL, MuriS
from muri.policies.speed.lockstep import interleave, shape_of


def rules(*, fits=lambda units: False, memory_gib=float("inf"), same_user=True, **options):
    return GroupingRules(
        options=PolicyOptions(**options),
        same_user=same_user,
        memory_limit_gib=lambda bucket: memory_gib,
        fits=fits,
    )


def groups_of(jobs, how):
    return [[member.job.job_id for member in unit.members] for unit in form_groups(rank_jobs(jobs, fifo), how)]


def random_jobs(count, seed):
    rng = random.Random(seed)
    return [
        make_job(number, profile=make_profile([round(rng.random(), 3) for _ in range(4)]))
        for number in range(1, count + 1)
    ]


def test_four_complementary_jobs_make_one_group():
    jobs = [make_job(number, kind) for number, kind in enumerate(KINDS, start=1)]
    assert groups_of(jobs, rules()) == [[1, 2, 3, 4]]


def test_equal_bottlenecks_are_not_worth_sharing():
    # Four jobs that only use the GPU take turns: total speed 1, as one after the other.
    profile = make_profile((0.0, 0.0, 1.0, 0.0))
    jobs = [make_job(number, profile=profile) for number in range(1, 5)]
    assert groups_of(jobs, rules()) == [[1], [2], [3], [4]]


@pytest.mark.parametrize(("size", "expected"), [(1, 8), (2, 4), (3, 4), (4, 2)])
def test_the_size_limit_holds(size, expected):
    # Three can't be formed from pairs of pairs: Algorithm 1 stays with pairs here.
    jobs = [make_job(number, kind) for number, kind in enumerate([*KINDS, *KINDS], start=1)]
    found = groups_of(jobs, rules(max_group_size=size))
    assert max(len(group) for group in found) <= size
    assert len(found) == expected


def test_no_more_is_merged_than_it_takes_to_fit():
    jobs = [make_job(number, kind) for number, kind in enumerate([*KINDS, *KINDS], start=1)]
    for room in range(2, 9):
        assert len(groups_of(jobs, rules(fits=lambda units, room=room: len(units) <= room))) == room


def test_small_jobs_stay_apart_when_merging_large_ones_makes_the_room():
    small = [make_job(number, kind) for number, kind in enumerate(("storage", "gpu"), start=1)]
    profile = make_profile((1.0, 0.5, 0.2, 0.2))  # less efficient than the small pair
    large = [make_job(number, profile=profile, gpu_count=4) for number in (3, 4)]

    def fits(units):
        return sum(unit.head.gpu_count for unit in units) <= 6

    assert groups_of([*small, *large], rules(fits=fits)) == [[1], [2], [3, 4]]


def test_memory_must_fit():
    jobs = [
        make_job(number, profile=make_profile(stage_s, mem_gib=10.0))
        for number, stage_s in enumerate(KINDS.values(), start=1)
    ]
    assert [len(group) for group in groups_of(jobs, rules(memory_gib=40.0))] == [4]
    assert [len(group) for group in groups_of(jobs, rules(memory_gib=39.9))] == [2, 2]
    assert [len(group) for group in groups_of(jobs, rules(memory_gib=19.9))] == [1, 1, 1, 1]


def test_a_margin_can_be_asked_for():
    jobs = [make_job(1, "gpu"), make_job(2, "gpu")]  # T = 2.2 s for two iterations of 1.3 s: 1.18 times
    assert groups_of(jobs, rules()) == [[1, 2]]
    assert groups_of(jobs, rules(min_speedup=1.18)) == [[1, 2]]
    assert groups_of(jobs, rules(min_speedup=1.19)) == [[1], [2]]


@pytest.mark.parametrize("difference", [{"user": "bob"}, {"partition": "debug"}, {"gpu_count": 2}])
def test_buckets_never_mix(difference):
    jobs = [make_job(1, "storage"), make_job(2, "gpu", **difference)]
    assert groups_of(jobs, rules()) == [[1], [2]]


def test_users_mix_only_when_allowed():
    jobs = [make_job(1, "storage"), make_job(2, "gpu", user="bob")]
    assert groups_of(jobs, rules(same_user=False)) == [[1, 2]]


def test_worst_ordering_is_worse_and_priority_order_no_better():
    jobs = random_jobs(8, seed=3)
    best = sum(unit.interleaving(PolicyOptions()).efficiency for unit in form_groups(rank_jobs(jobs, fifo), rules()))
    options = PolicyOptions(ordering="worst")
    worst_units = form_groups(rank_jobs(jobs, fifo), rules(ordering="worst"))
    assert sum(unit.interleaving(options).efficiency for unit in worst_units) < best
    pairs = {
        method: form_groups(rank_jobs(jobs, fifo), rules(max_group_size=2, matching=method))
        for method in ("rustworkx", "networkx", "priority-order")
    }
    assert pairs["rustworkx"] == pairs["networkx"]
    assert _efficiency(pairs["priority-order"]) < _efficiency(pairs["rustworkx"])


def _efficiency(units):
    """Sum of γ over the groups, the quantity that matching makes largest."""
    return sum(unit.interleaving(PolicyOptions()).efficiency for unit in units if unit.is_group)


def partitions_of(items, size):
    """All ways to split items into groups of at most `size`."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for count in range(size):
        for others in combinations(rest, count):
            remaining = [item for item in rest if item not in others]
            for tail in partitions_of(remaining, size):
                yield [(first, *others), *tail]


def _total(partition, shapes):
    """Sum of γ over real groups; None where a group gains nothing over its members' turns."""
    total = 0.0
    for group in partition:
        if len(group) == 1:
            continue
        found = interleave([shapes[job] for job in group])
        if sum(found.speed) <= 1:
            return None
        total += found.efficiency
    return total


@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_optimal(seed):
    jobs = random_jobs(4 + seed % 3, seed)
    shapes = {job.job_id: shape_of(job.profile) for job in jobs}
    totals = [_total(partition, shapes) for partition in partitions_of(list(shapes), 2)]
    best = max(total for total in totals if total is not None)
    units = form_groups(rank_jobs(jobs, fifo), rules(max_group_size=2))
    assert _efficiency(units) == pytest.approx(best, abs=1e-6)


def _fewest_gpus_best_speed(shapes, gpus):
    """The largest total speed that groups of ≤ 4 reach on so many GPUs."""
    return max(
        sum(sum(interleave([shapes[job] for job in group]).speed) for group in partition)
        for partition in partitions_of(list(shapes), 4)
        if len(partition) == gpus
    )


def test_groups_of_four_come_near_the_best_of_all_groupings():
    ratios = []
    for seed in range(20):
        jobs = random_jobs(6, seed)
        shapes = {job.job_id: shape_of(job.profile) for job in jobs}
        units = form_groups(rank_jobs(jobs, fifo), rules(fits=lambda units: len(units) <= 2))
        speed = sum(sum(unit.interleaving(PolicyOptions()).speed) for unit in units)
        ratios.append(speed / _fewest_gpus_best_speed(shapes, len(units)))
    assert max(ratios) <= 1 + 1e-9  # nothing beats brute force
    assert sum(ratios) / len(ratios) > 0.9


def test_groups_of_the_policies_carry_their_figures():
    jobs = [make_job(number, kind) for number, kind in enumerate(KINDS, start=1)]
    (group,) = MuriS().plan(make_request(jobs, [make_node("n1", 1)])).groups
    assert group.period_s == pytest.approx(1.3)
    assert group.efficiency == pytest.approx(1)
    assert list(group.speed) == [1, 2, 3, 4]
    assert all(speed == pytest.approx(1) for speed in group.speed.values())
    assert "γ = 1.00" in group.reasons[0]
    assert MuriL().plan(make_request(jobs, [make_node("n1", 1)])).groups == (group,)
