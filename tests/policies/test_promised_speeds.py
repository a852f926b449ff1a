"""No plan of any policy puts a job below the speed that it was promised beside others."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import KINDS, all_jobs, cluster_requests, company, make_cluster_node, make_job, make_request

from muri.policies.registry import get_policy, policy_names
from muri.policies.siblings.packed import keeps_promise, with_promises
from muri.policies.traits import InterferenceTable, PairSpeed

PROMISES = (0.0, 0.5, 0.8, 0.95)
SHARING = [
    name for name in policy_names() if get_policy(name).rules.max_group_size > 1 and not get_policy(name).elastic
]
SPEEDS = (0.95, 0.7, 0.55)
PAIRS = InterferenceTable(
    tuple(
        PairSpeed(one, other, SPEEDS[(number + index) % 3], SPEEDS[number * index % 3])
        for number, one in enumerate(KINDS)
        for index, other in enumerate(list(KINDS)[number:])
    )
)


def too_slow(request, plan, min_speed):
    """The jobs that a plan puts beside others at less than they were promised."""
    jobs = {job.job_id: job for job in all_jobs(with_promises(request, min_speed))}
    found = [
        job_id
        for group in plan.groups
        if not group.kept
        for job_id, speed in group.speed.items()
        if not keeps_promise(jobs[job_id], speed)
    ]
    places = [(share.node, gpu) for item in plan.sharers for share in item.gpus for gpu in share.gpu_ids]
    shared = {place for place, count in Counter(places).items() if count > 1}
    for item in plan.sharers:
        beside = any((share.node, gpu) in shared for share in item.gpus for gpu in share.gpu_ids)
        if beside and not item.kept and not keeps_promise(jobs[item.job_id], item.speed):
            found.append(item.job_id)
    return found


@pytest.mark.parametrize("name", SHARING)
@given(
    request=cluster_requests(),
    promises=st.lists(st.sampled_from(PROMISES), min_size=30, max_size=30),
    min_speed=st.sampled_from(PROMISES),
)
@settings(max_examples=12)
def test_no_new_plan_goes_below_a_promise(name, request, promises, min_speed):
    jobs = tuple(
        dataclasses.replace(job, min_speed=promise) for job, promise in zip(request.jobs, promises, strict=False)
    )
    request = dataclasses.replace(request, jobs=jobs, running=(), interference=PAIRS, whole_sets_only=True)
    plan = get_policy(name, {"min_speed": min_speed}).plan(request)
    assert too_slow(request, plan, min_speed) == []


def test_the_higher_of_two_promises_counts():
    request = make_request([make_job(1, min_speed=0.9), make_job(2)], [])
    assert [job.min_speed for job in with_promises(request, 0.5).jobs] == [0.9, 0.5]


@pytest.mark.parametrize("name", SHARING)
def test_who_was_promised_nearly_all_of_its_speed_shares_with_nobody(name):
    """Each of them uses the GPU for 60 % of its time."""
    jobs = [
        make_job(number, kind, remaining_s=1e4, gpu_utilization=0.6, opportunistic=number % 2 == 0)
        for number, kind in enumerate(KINDS, start=1)
    ]
    stages = {"load_s": 0.1, "preprocess_s": 0.2, "propagate_s": 0.6, "synchronize_s": 0.1, "iteration_s": 1.0}
    jobs = [dataclasses.replace(job, profile=dataclasses.replace(job.profile, **stages)) for job in jobs]
    node = make_cluster_node("n1", 1, 1, gpu_mem_gib=40.0)
    request = make_request(jobs, [node], interference=PAIRS, whole_sets_only=True)
    assert company(get_policy(name).plan(request))
    assert company(get_policy(name, {"min_speed": 0.97}).plan(request)) == []
    promised = dataclasses.replace(request, jobs=tuple(dataclasses.replace(job, min_speed=0.97) for job in jobs))
    assert company(get_policy(name).plan(promised)) == []
