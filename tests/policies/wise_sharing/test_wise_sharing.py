"""SJF-BSBF: when sharing pays, in how many steps, and what plans come of it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_builders import (
    PAIRS,
    batch_of,
    check_plan,
    feed_back,
    make_cluster_node,
    make_job,
    make_profile,
    make_request,
    shared_requests,
    shuffled,
)

from muri.policies.registry import get_policy
from muri.policies.siblings.partners import mean_after, mean_now, sub_batches
from muri.policies.types import NodeShare, Running

BSBF, FFS = get_policy("sjf-bsbf"), get_policy("sjf-ffs")
seconds, slowdowns = st.floats(1, 1e6), st.floats(1, 10)


def job(job_id, model="a", remaining_s=1000.0, *, mem_gib=1.0, **changes):
    profile = None if model is None else make_profile((0.1, 0.1, 1.0, 0.1), mem_gib=mem_gib, model=model)
    return make_job(job_id, None, profile=profile, remaining_s=remaining_s, **changes)


def runs(member, *gpu_ids, node="n1", steps=1):
    return Running((member,), (NodeShare(node, len(gpu_ids), gpu_ids),), accumulate_steps=steps)


def request(jobs, running=(), gpu_count=2, nodes=None, **changes):
    """Nodes whose GPUs are free unless a job runs on them."""
    held = {(share.node, gpu) for unit in running for share in unit.gpus for gpu in share.gpu_ids}
    every = nodes or [make_cluster_node("n1", gpu_count, 1)]
    left = []
    for node in every:
        free = tuple(gpu for gpu in node.topology[0] if (node.name, gpu) not in held)
        left.append(dataclasses.replace(node, free_gpus=len(free), islands=(free,) if free else ()))
    return make_request(jobs, left, running=tuple(running), **({"interference": PAIRS} | changes))


def where(plan):
    return {sharer.job_id: [(share.node, *share.gpu_ids) for share in sharer.gpus] for sharer in plan.sharers}


# Theorem 1: a job joins another now or after it, whatever takes less time on average


def completions(running_s, joining_s, running_slowdown, joining_slowdown, insert_s=0.0):
    """When both are done, by what each needs alone and ξ of each, if the second joins the first at a given time."""
    left_s = running_s - insert_s
    shared_s = min(running_slowdown * left_s, joining_slowdown * joining_s)
    return (
        insert_s + shared_s + left_s - shared_s / running_slowdown,
        insert_s + shared_s + joining_s - shared_s / joining_slowdown,
    )


def test_a_pair_worked_by_hand():
    """A needs 100 s, B 50 s, both run at two thirds beside each other.

    Now: B ends at 75, by when A has done 50 of its 100, and ends at 125. After: A ends at 100, B at 150.
    """
    assert completions(100.0, 50.0, 1.5, 1.5) == (125.0, 75.0)
    assert completions(100.0, 50.0, 1.5, 1.5, insert_s=100.0) == (100.0, 150.0)
    assert (mean_now(100.0, 50.0, 1.5, 1.5), mean_after(100.0, 50.0)) == (100.0, 125.0)
    # A joins 80 s later: B has done 20 when A ends at 110, and ends at 140.
    assert completions(100.0, 50.0, 1.5, 1.5, insert_s=80.0) == pytest.approx((110.0, 140.0))


@given(seconds, seconds, slowdowns, slowdowns)
def test_no_time_of_joining_beats_now_and_after(running_s, joining_s, running_xi, joining_xi):
    pair = (running_s, joining_s, running_xi, joining_xi)
    best = min(np.mean(completions(*pair, insert_s)) for insert_s in np.linspace(0, running_s, 101))
    now, after = mean_now(*pair), mean_after(running_s, joining_s)
    assert min(now, after) == pytest.approx(best)
    assert now == pytest.approx(np.mean(completions(*pair)))


# Sub-batches


def test_batches_are_halved_as_far_as_the_script_and_the_batch_allow():
    assert [way.accumulate_steps for way in sub_batches(job(1, batch=batch_of(max_steps=5)))] == [1, 2, 4]
    assert [way.accumulate_steps for way in sub_batches(job(1, batch=batch_of(3)))] == [1, 2]
    assert sub_batches(job(1)) == ((1, 1.0, 1.0),)


@given(
    batch=st.builds(
        batch_of,
        st.integers(1, 40),
        st.integers(1, 40),
        communicate_s=st.floats(0, 5),
        overlap_exponent=st.floats(1, 9),
    ),
    left_gib=st.floats(1, 30),
    remaining_s=st.tuples(seconds, seconds),
)
def test_the_best_step_count_that_fits_is_found(batch, left_gib, remaining_s):
    running, joining = job(1, "a", remaining_s[0], mem_gib=2.0), job(2, "b", remaining_s[1], batch=batch)
    nodes = [make_cluster_node("n1", 1, 1, gpu_mem_gib=2.0 + left_gib)]
    plan = BSBF.plan(request([joining], [runs(running, 0)], nodes=nodes))
    after_s = mean_after(*remaining_s)
    found = []
    for steps in (1, 2, 4, 8, 16, 32):
        possible = steps <= min(batch.max_accumulate_steps, batch.batch_size)
        if possible and batch.mem_gib(steps) <= (2.0 + left_gib) - 2.0:
            alone_s = remaining_s[1] / batch.speed(steps)
            found.append((np.mean(completions(remaining_s[0], alone_s, 1 / 0.9, 1 / 0.8)), steps))
    if not found:
        assert [item.job_id for item in plan.waiting] == [2]
        return
    best_s, _ = min(found)
    if abs(best_s - after_s) > 1e-6 * after_s:
        assert len(plan.sharers) == (2 if best_s < after_s else 1)
    for sharer in plan.sharers[1:]:
        assert min(mean for mean, steps in found if steps == sharer.accumulate_steps) == pytest.approx(best_s)


# Plans


def test_free_gpus_come_first_and_the_shortest_job_chooses():
    plan = BSBF.plan(request([job(1, remaining_s=900.0), job(2, remaining_s=100.0), job(3, "c", 500.0)]))
    assert where(plan) == {2: [("n1", 0)], 3: [("n1", 1)], 1: [("n1", 0)]}
    assert [sharer.speed for sharer in plan.sharers] == pytest.approx([0.7, 1.0, 0.7])


def test_a_job_joins_whom_it_ends_soonest_with():
    running = [runs(job(1, "a", 5000.0), 0), runs(job(2, "b", 3000.0), 1)]
    plan = BSBF.plan(request([job(3, "a", 1000.0)], running))
    assert where(plan) == {1: [("n1", 0)], 2: [("n1", 1)], 3: [("n1", 1)]}
    assert [sharer.kept for sharer in plan.sharers] == [True, True, False]
    assert [sharer.speed for sharer in plan.sharers] == pytest.approx([1.0, 0.8, 0.9])
    # Now: 3 ends after 1000/0.9 = 1111 s, 2 after 3000 + 1111·0.2 = 3222; after 2: 3000 and 4000 s.
    assert "sharing with job 2 now ends both after 36.1 min on average; one after the other it would be 58.3 min" in [
        str(reason) for reason in plan.sharers[2].reasons
    ]


def test_sharing_that_does_not_pay_is_refused_and_says_why():
    plan = BSBF.plan(request([job(2, "b", 1000.0)], [runs(job(1, "b", 1000.0), 0)], gpu_count=1))
    assert [item.job_id for item in plan.waiting] == [2]
    assert str(plan.waiting[0].reasons[1]) == (
        "sharing with job 1 now would end both after 37.0 min on average; waiting for it to end comes to 25.0 min"
    )
    shared = FFS.plan(request([job(2, "b", 1000.0)], [runs(job(1, "b", 1000.0), 0)], gpu_count=1))
    assert [sharer.job_id for sharer in shared.sharers] == [1, 2]


@pytest.mark.parametrize(
    ("waiting", "running", "changes", "why"),
    [
        ({"remaining_s": None}, {}, {}, "its remaining time is not known"),
        ({}, {"remaining_s": None}, {}, "no job of the same user and partition holds GPUs alone"),
        ({"model": None}, {}, {}, "its model has no profile"),
        ({"model": "new"}, {}, {}, "no job of the same user"),
        ({}, {"model": "new"}, {}, "no job of the same user"),
        ({"model": "c"}, {"model": "c"}, {}, "no job of the same user"),
        ({"user": "bob"}, {}, {}, "no job of the same user"),
        ({"partition": "debug"}, {}, {}, "no job of the same user"),
        ({"groupable": False, "alone_reason": "it asked to"}, {}, {}, "it asked to"),
        ({}, {"groupable": False}, {}, "no job of the same user"),
        ({"mem_gib": 12.0}, {"mem_gib": 5.0}, {}, "no job of the same user"),
        ({}, {}, {"interference": None}, "no job of the same user"),
    ],
)
def test_who_must_not_share(waiting, running, changes, why):
    nodes = [make_cluster_node("n1", 1, 1, gpu_mem_gib=16.0, partitions=("main", "debug"))]
    first = runs(job(1, **({"remaining_s": 5000.0} | running)), 0)
    plan = BSBF.plan(request([job(2, **({"remaining_s": 100.0} | waiting))], [first], nodes=nodes, **changes))
    assert [item.job_id for item in plan.waiting] == [2]
    assert why in str(plan.waiting[0].reasons[1])


@pytest.mark.parametrize("policy", [BSBF, FFS], ids=lambda policy: policy.name)
def test_a_job_leaves_free_gpus_to_others_where_those_of_its_partners_will_do(policy):
    """Five GPUs: two held by job 1, one by job 2, which is the better partner, and two free ones."""
    running = [runs(job(1, "a", 9000.0, gpu_count=2), 0, 1), runs(job(2, "b", 8000.0), 2)]
    plan = policy.plan(request([job(3, "a", 100.0, gpu_count=3), job(4, "a", 200.0)], running, 5))
    assert where(plan)[3] == [("n1", 0, 1, 2)]
    assert where(plan)[4] == [("n1", 3)]
    assert {sharer.job_id: sharer.speed for sharer in plan.sharers} == pytest.approx({1: 0.7, 2: 0.8, 3: 0.7, 4: 1.0})


def test_the_best_partners_come_first_and_free_gpus_last():
    running = [runs(job(1, "a", 9000.0, gpu_count=2), 0, 1), runs(job(2, "b", 8000.0), 2)]
    assert where(BSBF.plan(request([job(3, "a", 100.0, gpu_count=2)], running, 4)))[3] == [("n1", 0, 2)]
    # Four are asked for: both partners have three, so the free one goes along.
    assert where(BSBF.plan(request([job(3, "a", 100.0, gpu_count=4)], running, 4)))[3] == [("n1", 0, 1, 2, 3)]
    # On n1 both partners hold GPUs, on n2 only the better one: the free one stays free.
    running = [runs(job(1, "a", 9000.0), 0), runs(job(2, "b", 8000.0), 1), runs(job(5, "b", 8000.0), 0, node="n2")]
    nodes = [make_cluster_node(name, 2, 1) for name in ("n1", "n2")]
    assert where(BSBF.plan(request([job(3, "a", 100.0, gpu_count=2)], running, nodes=nodes)))[3] == [("n1", 0, 1)]


def test_gpus_that_a_job_is_still_alone_on_can_be_shared_too():
    """Job 1 runs at 0.7 beside job 2 on GPU 0, so 5000 s of work end after 7143; on GPU 1 it is alone."""
    running = [runs(job(1, "a", 5000.0, gpu_count=2), 0, 1), runs(job(2, "a", 9000.0), 0)]
    plan = BSBF.plan(request([job(3, "a", 700.0)], running))
    assert where(plan)[3] == [("n1", 1)]
    # Job 3 at 0.7 ends after 1000 s; job 1 is as slow as before. After job 1: 7143 and 7843 s.
    assert "now ends both after 1.1 h on average; one after the other it would be 2.1 h" in str(
        plan.sharers[2].reasons[1]
    )
    assert [sharer.speed for sharer in plan.sharers] == pytest.approx([0.7] * 3)


def test_a_partner_that_slows_the_others_case_is_left_out():
    """Job 3 (a) runs at 0.6 beside job 1 (c), which runs at 0.3, and at 0.9 beside job 2 (b)."""
    running = [runs(job(1, "c", 100.0), 0), runs(job(2, "b", 1e5), 1)]
    plan = BSBF.plan(request([job(3, "a", 1e4, gpu_count=2)], running, 2))
    assert [item.job_id for item in plan.waiting] == [3]


def test_whole_sets_only():
    running = [runs(job(1, "b", 5000.0, gpu_count=2), 0, 1), runs(job(2, "a", 9000.0, gpu_count=1), 2)]
    jobs = [job(3, remaining_s=100.0), job(4, remaining_s=200.0, gpu_count=2), job(5, remaining_s=300.0, gpu_count=2)]
    nodes = [make_cluster_node("n1", 3, 1)]
    plan = BSBF.plan(request(jobs, running, nodes=nodes, whole_sets_only=True))
    assert where(plan) == {1: [("n1", 0, 1)], 2: [("n1", 2)], 3: [("n1", 2)], 4: [("n1", 0, 1)]}
    assert [item.job_id for item in plan.waiting] == [5]
    free_one = BSBF.plan(request([jobs[1]], running[:1], nodes=nodes, whole_sets_only=True))
    assert where(free_one)[4] == [("n1", 0, 1)]


@pytest.mark.parametrize("larger", ["slurm", "whole-nodes"])
def test_jobs_larger_than_a_node(larger):
    nodes = [make_cluster_node(name, 2, 1) for name in ("n1", "n2", "n3")]
    running = [runs(job(1, "b", 9000.0), 0)]
    waiting = [job(2, remaining_s=50.0, gpu_count=5), job(3, remaining_s=60.0)]
    plan = BSBF.plan(request(waiting, running, nodes=nodes, larger_than_a_node=larger))
    if larger == "slurm":  # Slurm's job keeps all five free GPUs; job 3 joins job 1
        assert [(solo.job_id, solo.gpus) for solo in plan.solo] == [(2, ())]
        assert where(plan) == {1: [("n1", 0)], 3: [("n1", 0)]}
    else:
        assert where(plan)[2] == [("n1", 0), ("n2", 0, 1), ("n3", 0, 1)]


def test_a_batch_too_large_for_any_gpu_starts_divided():
    nodes = [make_cluster_node("n1", 1, 1, gpu_mem_gib=8.0)]
    plan = BSBF.plan(request([job(1, batch=batch_of())], nodes=nodes))
    assert (plan.sharers[0].accumulate_steps, plan.sharers[0].speed) == (2, batch_of().speed(2))
    assert "each batch is computed in 2 steps" in str(plan.sharers[0].reasons[1])


@st.composite
def packing_requests(draw):
    nodes = [make_cluster_node(f"n{index}", draw(st.sampled_from((1, 2, 4))), 1,
                               gpu_mem_gib=draw(st.sampled_from((0.0, 8.0, 16.0)))) for index in range(3)]  # fmt: skip
    jobs = []
    for job_id in range(1, draw(st.integers(1, 14)) + 1):
        batch = batch_of(max_steps=8) if draw(st.booleans()) else None
        jobs.append(
            job(
                job_id,
                draw(st.sampled_from(("a", "b", "c", "a", "b", None))),
                draw(st.none() | seconds),
                mem_gib=draw(st.sampled_from((0.0, 3.0, 7.0))),
                gpu_count=draw(st.sampled_from((1, 1, 2, 4, 6))),
                user=draw(st.sampled_from(("alice", "alice", "bob"))),
                groupable=draw(st.sampled_from((True, True, False))),
                domain=draw(st.sampled_from(("", "", "account hep"))),
                largest_group=draw(st.sampled_from((4, 2, 1))),
                batch=batch,
                min_speed=draw(st.sampled_from((0.0, 0.0, 0.5, 0.8))),
            )
        )
    return request(
        [item for item in jobs if item.gpu_count <= sum(node.gpu_count for node in nodes)],
        nodes=nodes,
        same_user=draw(st.booleans()),
        larger_than_a_node=draw(st.sampled_from(("slurm", "whole-nodes"))),
        whole_sets_only=draw(st.booleans()),
    )


@pytest.mark.parametrize("policy", [BSBF, FFS], ids=lambda policy: policy.name)
@settings(max_examples=100)
@given(first=packing_requests(), rng=st.randoms(use_true_random=False))
def test_every_plan_keeps_the_rules(policy, first, rng):
    """Jobs whose pairs are known, on few GPUs of sizes of their own: here they share often, and parts of sets, too."""
    plan = policy.plan(first)
    check_plan(first, plan, most=2, preemption=False)
    arrivals = [job(100 + number, model, 50.0 * number + 1) for number, model in enumerate("abcab")]
    second = feed_back(first, plan, new_jobs=arrivals)
    after = policy.plan(second)
    check_plan(second, after, most=2, preemption=False)
    assert policy.plan(shuffled(second, rng)) == after


@pytest.mark.parametrize("policy", [BSBF, FFS], ids=lambda policy: policy.name)
@settings(max_examples=50)
@given(first=shared_requests())
def test_another_cycle_on_the_same_cluster_changes_nothing(policy, first):
    first = dataclasses.replace(first, larger_than_a_node="whole-nodes")  # Slurm's jobs would be gone from the next
    plan = policy.plan(first)
    again = policy.plan(feed_back(first, plan))
    assert where(again) == where(plan) and all(sharer.kept for sharer in again.sharers)


@pytest.mark.parametrize("whole_sets_only", [False, True])
@pytest.mark.parametrize("policy", [BSBF, FFS])
def test_nobody_joins_a_job_whose_node_has_left_the_partition(policy, whole_sets_only):
    nodes = [make_cluster_node("n1", 2, 1, partitions=("debug",)), make_cluster_node("n2", 2, 1)]
    stays = runs(job(1, "a", remaining_s=9e5, gpu_count=2), 0, 1)
    alone = runs(job(3, "a", gpu_count=2, groupable=False), 0, 1, node="n2")
    waits = job(2, "b", gpu_count=2)
    plan = policy.plan(request([waits], [stays, alone], nodes=nodes, whole_sets_only=whole_sets_only))
    assert where(plan) == {1: [("n1", 0, 1)], 3: [("n2", 0, 1)]}
    assert [item.job_id for item in plan.waiting] == [2]
