"""Domains, largest groups and promised speeds: no policy puts jobs together whose own limits forbid it."""

import dataclasses
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import KINDS, MERGING, company, make_cluster_node, make_job, make_node, make_request

from muri.policies.cycle.queue import groups_needed
from muri.policies.cycle.validation import broken_laws
from muri.policies.registry import get_policy, policy_names
from muri.policies.siblings.packed import with_promises
from muri.policies.traits import InterferenceTable, PairSpeed
from muri.policies.types import Group, NodeShare, Plan, Running, Sharer, sentences

PAIRS = InterferenceTable(
    tuple(PairSpeed(one, other, 0.9, 0.9) for number, one in enumerate(KINDS) for other in list(KINDS)[number:])
)
SHARING = [name for name in policy_names() if get_policy(name).rules.max_group_size > 1]


def four_kinds(gpu_count=1, **changes):
    """Jobs that are all worth grouping with each other, of which every other one is opportunistic, for antman."""
    fields = {"gpu_count": gpu_count, "remaining_s": 1e4, "gpu_utilization": 0.2, "preemptible": False}
    return [
        make_job(number, kind, opportunistic=number % 2 == 0, **(fields | changes))
        for number, kind in enumerate(KINDS, start=1)
    ]


def plan_of(name, jobs, running=(), options=None, **changes):
    held = len({gpu for unit in running for share in unit.gpus for gpu in share.gpu_ids})
    node = make_cluster_node("n1", 1, 1, gpu_mem_gib=40.0)
    if held:
        node = dataclasses.replace(node, free_gpus=0, islands=())
    frame = {"interference": PAIRS, "whole_sets_only": True, "running": tuple(running)}
    return get_policy(name, options).plan(make_request(jobs, [node], **(frame | changes)))


@pytest.mark.parametrize("name", SHARING)
def test_the_limits_are_what_keeps_these_jobs_apart(name):
    assert company(plan_of(name, four_kinds()))


@pytest.mark.parametrize("same_user", [True, False])
@pytest.mark.parametrize("name", SHARING)
def test_jobs_of_different_domains_share_no_gpu(name, same_user):
    jobs = [dataclasses.replace(job, domain=f"account {job.job_id}") for job in four_kinds()]
    assert company(plan_of(name, jobs, same_user=same_user)) == []


@pytest.mark.parametrize("largest", [1, 2, 3])
@pytest.mark.parametrize("name", SHARING)
def test_no_group_is_larger_than_its_members_may_be_in(name, largest):
    plan = plan_of(name, four_kinds(largest_group=largest))
    assert all(size <= largest for size in company(plan))
    assert bool(company(plan)) is (largest > 1)  # a limit that leaves room for a group is not a ban


@pytest.mark.parametrize("name", [name for name in SHARING if get_policy(name).supports_packing])
def test_who_runs_already_counts_when_one_joins(name):
    first, second, third, _ = four_kinds(largest_group=2)
    together = [Running((job,), (NodeShare("n1", 1, (0,)),)) for job in (first, second)]
    plan = plan_of(name, [third], together)
    assert [item.job_id for item in plan.waiting] == [3]
    assert company(plan_of(name, [third], together[:1])) == [2]


def test_the_higher_of_two_promises_counts():
    request = make_request([make_job(1, min_speed=0.9), make_job(2)], [])
    assert [job.min_speed for job in with_promises(request, 0.5).jobs] == [0.9, 0.5]


@pytest.mark.parametrize("name", [name for name in SHARING if not get_policy(name).elastic])
def test_who_was_promised_nearly_all_of_its_speed_shares_with_nobody(name):
    """Each of them uses the GPU for 60 % of its time."""
    stages = {"load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.6, "synchronize_s": 0.1, "iteration_s": 1.0}
    jobs = [
        dataclasses.replace(job, profile=dataclasses.replace(job.profile, **stages))
        for job in four_kinds(gpu_utilization=0.6)
    ]

    def beside(jobs, options=None):
        return company(plan_of(name, jobs, options=options))

    assert beside(jobs)
    assert beside(jobs, {"min_speed": 0.97}) == []
    assert beside([dataclasses.replace(job, min_speed=0.97) for job in jobs]) == []


def test_a_job_that_no_group_has_room_for_runs_alone_and_says_why():
    lonely = make_job(1, None, largest_group=1)  # it needs no profile either: nothing would come of one
    plan = get_policy("auto").plan(make_request([lonely, make_job(2, "cpu")], [make_node("n1", 1)]))
    (solo,) = plan.solo
    assert solo.job_id == 1
    assert "the site's limits leave no room for a group" in sentences(solo.reasons)


def test_a_reason_for_running_alone_names_the_domain():
    jobs = [make_job(1, domain="account hep, QOS normal"), make_job(2, "cpu", domain="account astro, QOS normal")]
    plan = get_policy("auto").plan(make_request(jobs, [make_node("n1", 1)]))
    assert "(user alice, account hep, QOS normal, partition main, 1 GPU)" in str(plan.solo[0].reasons[1])


@pytest.mark.parametrize("options", MERGING)
def test_a_small_group_takes_no_more_seats_than_it_has(options):
    """Two may be in pairs only: what comes behind them looks for GPUs of its own, ahead of less urgent jobs."""
    jobs = [make_job(1, "cpu", largest_group=2), make_job(2, "gpu", largest_group=2), make_job(3, "network")]
    jobs.append(make_job(4, "storage", user="bob"))
    plan = get_policy("auto", options).plan(make_request(jobs, [make_node("n1", 2)]))
    started = {job_id for group in plan.groups for job_id in group.members} | {solo.job_id for solo in plan.solo}
    assert started == {1, 2, 3}


def test_a_running_group_that_became_too_large_is_split_up_where_that_is_allowed():
    gpus = (NodeShare("n1", 1, (0,)),)
    for changes in ({"largest_group": 2}, {}):
        members = [
            make_job(number, kind, preemptible=True, remaining_s=1e5, **(changes if number == 2 else {}))
            for number, kind in enumerate(list(KINDS)[:3], start=1)
        ]
        node = dataclasses.replace(make_cluster_node("n1", 1, 1), free_gpus=0, islands=())
        request = make_request([], [node], running=(Running(tuple(members), gpus),))
        plan = get_policy("auto").plan(request)
        assert [len(group.members) for group in plan.groups] == [2 if changes else 3]
        assert not broken_laws(request, plan)
        # Where nothing may be stopped, what runs stays as it is, and breaks no law.
        stays = get_policy("auto", {"preemption": False}).plan(request)
        assert [group.kept for group in stays.groups] == [True]
        assert not broken_laws(request, stays)


@given(st.lists(st.integers(1, 4), max_size=7))
def test_the_fewest_groups_are_counted(largest):
    def fewest(left):
        """By trying every group that the first job can be in."""
        if not left:
            return 0
        (first, *others), best = left, len(left)
        for size in range(1, first + 1):
            # Of those that may be in a group of this size, who joins matters only by what is left: try all.
            for chosen in combinations(range(len(others)), size - 1):
                if all(others[index] >= size for index in chosen):
                    rest = [item for index, item in enumerate(others) if index not in chosen]
                    best = min(best, 1 + fewest(rest))
        return best

    assert groups_needed(Counter(largest)) == fewest(sorted(largest))


def test_a_broken_law_names_the_jobs_and_the_limit():
    gpus = (NodeShare("n1", 1, (0,)),)
    jobs = [make_job(1, domain="account hep"), make_job(2), make_job(3, largest_group=1), make_job(4)]
    request = make_request(jobs, [make_node("n1", 2)])
    groups = (Group((2, 1), gpus, 1, 1.0, 1.0, {}), Group((3, 4), gpus, 1, 1.0, 1.0, {}))
    assert [str(law) for law in broken_laws(request, Plan("site", groups))] == [
        "jobs 1, 2 must not share GPUs: they are of different domains (''; 'account hep')",
        "jobs 3, 4 must not share GPUs: they are 2, and job 3 may be in groups of 1 at most",
    ]
    sharers = tuple(Sharer(number, gpus) for number in (1, 2))
    assert [law.job_ids for law in broken_laws(request, Plan("site", sharers=sharers))] == [(1, 2)]
    kept = tuple(dataclasses.replace(sharer, kept=True) for sharer in sharers)
    assert not broken_laws(request, Plan("site", sharers=kept))
