"""OBP and PAB, baselines of Horus: what PAB stops. What every plan keeps is tested with Horus."""

import dataclasses

import pytest
from policy_builders import busy, feed_back, make_cluster_node, make_request

from muri.policies.registry import get_policy


def test_pab_puts_back_the_latest_comer_who_then_waits_for_gpus_of_its_own():
    jobs = [busy(1, 1.0, preemptible=True), busy(2, 1.0, preemptible=True)]
    request = make_request(jobs, [make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)])
    pab = get_policy("pab")
    packed = pab.plan(request)
    assert len(packed.sharers) == 2
    after = feed_back(request, packed)
    plan = pab.plan(after)
    assert [item.job_id for item in plan.sharers] == [1]
    assert plan.waiting[0].job_id == 2
    assert plan.waiting[0].preempted
    assert "less than half" in str(plan.waiting[0].reasons[0])
    stopped = dataclasses.replace(feed_back(after, plan), jobs=(dataclasses.replace(jobs[1], attained_gpu_s=300.0),))
    again = pab.plan(stopped)
    assert [item.job_id for item in again.waiting] == [2]
    assert "GPUs of its own" in " ".join(str(reason) for reason in again.waiting[0].reasons)


@pytest.mark.parametrize(
    ("speeds", "stopped"),
    [
        ({1: 0.9, 2: 0.4}, [2]),
        ({1: 0.4, 2: 0.9}, [1]),
        ({1: 0.3, 2: 0.3}, [2]),  # the latest comer; what was measured of the other says nothing once it is gone
        ({1: 0.6, 2: 0.5}, []),
        ({1: 0.3}, [1]),
        ({}, []),
    ],
)
def test_pab_goes_by_measured_speeds_where_there_are_any(speeds, stopped):
    # By their use of the GPU each would be expected to get on at less than half.
    jobs = [busy(1, 1.0, preemptible=True), busy(2, 1.0, preemptible=True)]
    request = make_request(jobs, [make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)])
    pab = get_policy("pab")
    after = feed_back(request, pab.plan(request))
    units = tuple(dataclasses.replace(unit, measured=speeds) for unit in after.running)
    plan = pab.plan(dataclasses.replace(after, running=units))
    assert [item.job_id for item in plan.waiting if item.preempted] == stopped


def test_pab_stops_nothing_that_cannot_go_on():
    request = make_request([busy(1, 1.0), busy(2, 1.0)], [make_cluster_node("n1", 1, 1, gpu_mem_gib=24.0)])
    pab = get_policy("pab")
    assert len(pab.plan(feed_back(request, pab.plan(request))).sharers) == 2
