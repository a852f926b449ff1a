"""What every plan that gives out CPUs and memory must keep, under every mechanism."""

import dataclasses
import math
from collections import Counter

import pytest
from host_builders import host_requests, speed_ratios
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from policy_builders import check_plan, feed_back, given_of, shuffled

from muri.policies.registry import get_policy

POLICIES = (
    ("synergy", {"mechanism": "proportional", "order": "las"}),
    ("synergy", {"mechanism": "greedy", "order": "srtf"}),
    ("synergy", {}),
    ("synergy", {"order": "srtf"}),
    ("synergy-opt", {"order": "ftf"}),
    ("drf", {}),
    ("tetris", {}),
)
RESTING = (
    *(("synergy", {"mechanism": way}) for way in ("proportional", "greedy", "tune")),
    ("drf", {}),
    ("tetris", {}),
)
SLACK = 1e-6


def check_resources(request, plan):
    """No node gives more CPUs and memory than it has, and only to jobs that run on it."""
    used = Counter()
    for solo in plan.solo:
        shares = plan.cpu_mem_shares.get(solo.job_id, ())
        assert {share.node for share in shares} <= {share.node for share in solo.gpus}
        for share in shares:
            used[share.node, "cpus"] += share.cpus
            used[share.node, "mem"] += share.mem_gib
    for node in request.nodes:
        assert used[node.name, "cpus"] <= node.cpu_count + SLACK
        assert used[node.name, "mem"] <= node.mem_gib + SLACK
    assert not plan.cpu_mem_shares.keys() & {item.job_id for item in plan.waiting}


def check_kept(request, plan):
    """Jobs that have their earlier GPUs and shares count as kept."""
    held = {unit.members[0].job_id: unit for unit in request.running}
    for solo in plan.solo:
        unit = held.get(solo.job_id)
        same = unit is not None and unit.gpus == solo.gpus and unit.cpu_mem_shares == given_of(plan, solo)
        assert solo.kept == same


def check_speeds(request, plan):
    for reached, usual in speed_ratios(request, plan).values():
        assert reached >= usual * (1 - 1e-6)


@pytest.mark.parametrize(("name", "options"), POLICIES)
@examples(max_examples=25)
@given(case=host_requests(), rng=st.randoms(use_true_random=False))
def test_every_plan_of_three_rounds_whatever_the_order_of_jobs_and_nodes(name, options, case, rng):
    request, later = case
    policy = get_policy(name, {"max_wait_s": math.inf, **options})
    for new_jobs in (later, (), None):
        plan = policy.plan(request)
        check_plan(request, plan)
        check_resources(request, plan)
        check_kept(request, plan)
        if name.startswith("synergy"):
            check_speeds(request, plan)
        assert policy.plan(shuffled(request, rng)) == plan
        if new_jobs is not None:
            request = feed_back(request, plan, new_jobs=tuple(new_jobs), now_s=request.now_s + 300)


@pytest.mark.parametrize(("name", "options"), RESTING)
@examples(max_examples=12)
@given(case=host_requests())
def test_an_unchanged_cluster_comes_to_rest(name, options, case):
    """Restarts that pay take a round or two; then nothing moves."""
    request, later = case
    policy = get_policy(name, {"max_wait_s": math.inf, **options})
    request = dataclasses.replace(request, jobs=(*request.jobs, *later))
    for _ in range(4):
        plan = policy.plan(request)
        request = feed_back(request, plan)
    again = policy.plan(request)
    assert all(solo.kept for solo in again.solo if solo.gpus)
    assert again.cpu_mem_shares == plan.cpu_mem_shares


@examples(max_examples=25)
@given(case=host_requests())
def test_tune_runs_whoever_proportional_shares_would_run(case):
    request, _ = case
    tuned, plain = (get_policy("synergy", {"mechanism": way}).plan(request) for way in ("tune", "proportional"))
    assert {solo.job_id for solo in plain.solo} <= {solo.job_id for solo in tuned.solo}
