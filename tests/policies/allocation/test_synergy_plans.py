"""What every plan that gives out CPUs and memory must keep, under every mechanism."""

import dataclasses
import math
from collections import Counter

import pytest
from host_builders import host_requests, speed_ratios
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from policy_builders import all_jobs, decided_ids, feed_back

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
    """No node gives more than it has, and no GPU is given out twice."""
    nodes = {node.name: node for node in request.nodes}
    used, named = Counter(), Counter()
    for solo in plan.solo:
        for share in solo.gpus:
            used[share.node, "gpus"] += share.gpu_count
            named.update((share.node, gpu) for gpu in share.gpu_ids)
    for shares in plan.cpu_mem_shares.values():
        for share in shares:
            used[share.node, "cpus"] += share.cpus
            used[share.node, "mem"] += share.mem_gib
    for name, node in nodes.items():
        assert used[name, "gpus"] <= node.gpu_count
        assert used[name, "cpus"] <= node.cpu_count + SLACK
        assert used[name, "mem"] <= node.mem_gib + SLACK
    assert all(count == 1 for count in named.values())


def check_frame(request, plan):
    """Everybody is decided on once, where he may be, and for a reason; shares are of nodes that a job is on."""
    assert sorted(decided_ids(plan)) == sorted(job.job_id for job in all_jobs(request))
    jobs = {job.job_id: job for job in all_jobs(request)}
    nodes = {node.name: node for node in request.nodes}
    running = {job.job_id for unit in request.running for job in unit.members}
    for solo in plan.solo:
        job = jobs[solo.job_id]
        assert not solo.gpus or sum(share.gpu_count for share in solo.gpus) == job.gpu_count
        assert all(job.partition in nodes[share.node].partitions for share in solo.gpus)
        assert job.node_count == 1 or len(solo.gpus) in (0, job.node_count)
        assert {share.node for share in plan.cpu_mem_shares.get(solo.job_id, ())} <= {share.node for share in solo.gpus}
    for item in plan.waiting:
        assert item.preempted == (item.job_id in running)
        assert not item.preempted or jobs[item.job_id].preemptible
        assert item.job_id not in plan.cpu_mem_shares
    for decision in (*plan.solo, *plan.waiting):
        assert decision.reasons
        assert all(str(reason).strip() for reason in decision.reasons)


def check_kept(request, plan):
    """Kept jobs have their earlier shares, and jobs that cannot be stopped are kept."""
    held = {unit.members[0].job_id: unit for unit in request.running}
    for solo in plan.solo:
        unit = held.get(solo.job_id)
        same = unit is not None and unit.gpus == solo.gpus and unit.cpu_mem_shares == shares_of(plan, solo.job_id)
        assert solo.kept == same
        assert unit is None or unit.members[0].preemptible or solo.kept


def shares_of(plan, job_id):
    return {job_id: plan.cpu_mem_shares[job_id]} if job_id in plan.cpu_mem_shares else {}


def check_speeds(request, plan):
    for reached, usual in speed_ratios(request, plan).values():
        assert reached >= usual * (1 - 1e-6)


@pytest.mark.parametrize(("name", "options"), POLICIES)
@examples(max_examples=25)
@given(case=host_requests())
def test_every_plan_of_three_rounds(name, options, case):
    request, later = case
    policy = get_policy(name, {"max_wait_s": math.inf, **options})
    for new_jobs in (later, (), None):
        plan = policy.plan(request)
        check_frame(request, plan)
        check_resources(request, plan)
        check_kept(request, plan)
        if name.startswith("synergy"):
            check_speeds(request, plan)
        if new_jobs is not None:
            request = feed_back(request, plan, new_jobs=tuple(new_jobs), now_s=request.now_s + 300)


@pytest.mark.parametrize(("name", "options"), POLICIES)
@examples(max_examples=12)
@given(case=host_requests(), rng=st.randoms(use_true_random=False))
def test_the_order_of_jobs_and_nodes_does_not_matter(name, options, case, rng):
    request, later = case
    policy = get_policy(name, options)
    request = feed_back(request, policy.plan(request), new_jobs=tuple(later))
    parts = {part: list(getattr(request, part)) for part in ("jobs", "nodes", "running")}
    for listed in parts.values():
        rng.shuffle(listed)
    shuffled = dataclasses.replace(request, **{part: tuple(listed) for part, listed in parts.items()})
    assert policy.plan(shuffled) == policy.plan(request)


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
