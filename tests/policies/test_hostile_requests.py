"""What one user asks for costs the others nothing: absurd sizes and figures, and as many partitions as jobs."""

import dataclasses
import math
import tracemalloc

import pytest
from policy_builders import KINDS, make_cluster_node, make_job, make_node, make_request

from muri.policies.cycle.queue import pools
from muri.policies.cycle.validation import RequestError, job_error
from muri.policies.registry import get_policy, policy_names
from muri.policies.traits import InterferenceTable, PairSpeed
from muri.policies.types import NodeShare, Running, sentences

PAIRS = InterferenceTable(tuple(PairSpeed(kind, kind, 0.9, 0.9) for kind in KINDS))
SIZES = [(2_000_000_000, 2_000_000_000), (10**9, 1), (2**32, 2**31), (4, 4), (2**20, 2**10)]
MIB = 2**20


def everyone_decided(plan):
    grouped = [job_id for group in plan.groups for job_id in group.members]
    return sorted(grouped + [item.job_id for item in (*plan.solo, *plan.sharers, *plan.waiting)])


@pytest.mark.parametrize("whole_sets_only", [True, False])
@pytest.mark.parametrize("name", policy_names())
def test_a_job_larger_than_its_partition_costs_nothing(name, whole_sets_only):
    nodes = [make_cluster_node(f"n{number}", 2) for number in range(2)]
    # Both nodes are taken, so that policies also look for groups that the large jobs could join.
    busy = [Running((make_job(90 + number, "gpu", gpu_count=2, remaining_s=1e5, gpu_utilization=0.1),),
                    (NodeShare(f"n{number}", 2, (0, 1)),)) for number in range(2)]  # fmt: skip
    nodes = [dataclasses.replace(node, free_gpus=0, islands=()) for node in nodes]
    jobs = [
        make_job(number, "gpu", gpu_count=gpus, node_count=count, remaining_s=10.0, gpu_utilization=0.1)
        for number, (gpus, count) in enumerate(SIZES, start=1)
    ]
    jobs.append(make_job(50, "cpu", gpu_utilization=0.1, remaining_s=10.0))
    request = make_request(
        jobs, nodes, running=tuple(busy), interference=PAIRS, whole_sets_only=whole_sets_only, now_s=1000.0
    )
    policy = get_policy(name)
    tracemalloc.start()
    try:
        plan = policy.plan(request)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 * MIB
    assert everyone_decided(plan) == [1, 2, 3, 4, 5, 50, 90, 91]


@pytest.mark.parametrize("name", ["auto", "horus", "sjf-bsbf", "antman", "fifo"])
def test_a_job_of_too_many_nodes_is_told_that_it_is_larger_than_its_partition(name):
    nodes = [make_cluster_node(f"n{number}", 2) for number in range(3)]
    job = make_job(1, "gpu", gpu_count=2_000_000_000, node_count=2_000_000_000, gpu_utilization=0.1)
    plan = get_policy(name).plan(make_request([job, make_job(2, "cpu", gpu_utilization=0.1)], nodes))
    (item,) = plan.waiting
    assert sentences(item.reasons)[0] == (
        "it is next in line; it is larger than the partition is now: it needs 2000000000 nodes, "
        "and 3 of partition main can be used"
    )


HOSTILE = {
    "gpu_count": (0, -1, 10**9, 2**32 + 1, 10**400),
    "node_count": (0, -3, 3, 2 * 10**9, 10**400),
    "submit_s": (math.nan, math.inf, -1.0, 1e300, 1e15),
    "attained_gpu_s": (math.nan, 1e308, 1e15),
    "remaining_s": (math.nan, -1.0, 1e308, 5e-324, 1e15),
    "restart_s": (math.nan, 1e308, 1e15),
    "waiting_since_s": (math.nan, 1e300, 1e15),
    "gpu_utilization": (math.nan, -0.1, 1e308, 1.0),
    "gpu_mem_request_gib": (math.nan, -1.0, 1e308, 1e9),
    "largest_group": (0, -1, 10**400, 1),
    "priority": (10**400, -(10**400), 2**32, -1),
    "domain": ("{}", "x" * 10_000),
    "partition": ("{0}", "gpu (--constraint=v100)", "main"),
}
FIGURES = [(name, value) for name, values in HOSTILE.items() for value in values]


@pytest.mark.parametrize(("name", "value"), FIGURES)
def test_one_odd_job_is_named_or_planned(name, value):
    """A caller can always leave out the job that a request is refused for, and plan again for the others."""
    odd = make_job(7, "gpu", **({"remaining_s": 1e4, "gpu_utilization": 0.2} | {name: value}))
    others = [make_job(number, kind, remaining_s=1e4, gpu_utilization=0.2) for number, kind in enumerate(KINDS)]
    request = make_request([*others, odd], [make_cluster_node("n1", 2)], interference=PAIRS, whole_sets_only=True)
    for policy in map(get_policy, policy_names()):
        try:
            plan = policy.plan(request)
        except RequestError as error:
            assert error.job_id == 7
            assert job_error(odd) is not None
            plan = policy.plan(dataclasses.replace(request, jobs=tuple(others)))
        else:
            assert job_error(odd) is None
        reasons = [
            reason for item in (*plan.groups, *plan.solo, *plan.sharers, *plan.waiting) for reason in item.reasons
        ]
        assert all(sentences(reasons))


class Name(str):
    """The name of a partition that counts how often it is looked at."""

    looked_at = 0
    __slots__ = ()

    def __hash__(self):
        Name.looked_at += 1
        return super().__hash__()

    def __eq__(self, other):
        Name.looked_at += 1
        return super().__eq__(other)


@pytest.mark.parametrize("name", ["auto", "horus", "sjf-bsbf", "antman", "drf", "synergy"])
@pytest.mark.parametrize("shared", [True, False])
def test_as_many_partitions_as_jobs_are_each_looked_at_a_few_times(name, shared):
    """Placement domains are named by what users ask for, so there can be thousands, with nodes or without any."""

    def work(count):
        names = [Name(f"gpu (--constraint=v{number})") for number in range(count)]
        nodes = [
            make_cluster_node(f"n{number}", 2, partitions=tuple(names) if shared else (names[0],)) for number in (1, 2)
        ]
        # Equal names are not one object, as those of jobs and nodes are not.
        jobs = [make_job(number, "gpu", partition=Name(str(name))) for number, name in enumerate(names)]
        request = make_request(jobs, nodes)
        Name.looked_at = 0
        assert len(pools(request)) == (1 if shared else count)
        plan = get_policy(name).plan(request)
        assert everyone_decided(plan) == list(range(count))
        return Name.looked_at

    assert work(800) < 6 * work(200)  # their square would be 16 times as much


def test_messages_read_well_with_a_placement_domain():
    domain = "gpu (--constraint=v100)"
    jobs = [make_job(number, "gpu", partition=domain) for number in (1, 2, 3)]
    plan = get_policy("fifo").plan(make_request(jobs, [make_cluster_node("n1", 1, 1, partitions=("gpu", domain))]))
    assert str(plan.solo[0].reasons[0]) == "1 GPU of partition gpu (--constraint=v100) can be given to it"
    assert [str(item.reasons[0]) for item in plan.waiting] == [
        "it is next in line and no GPU is free in partition gpu (--constraint=v100)",
        "1 job is ahead of it and no GPU is free in partition gpu (--constraint=v100)",
    ]
    nowhere = get_policy("fifo").plan(make_request(jobs[:1], [make_cluster_node("n1", 1, 1, partitions=("gpu",))]))
    assert "no node of partition gpu (--constraint=v100) can be used now" in str(nowhere.waiting[0].reasons[0])


def test_pools_share_no_node():
    nodes = [make_node("a", 1, partitions=("p", "q")), make_node("b", 1, partitions=("q", "r")), make_node("c", 1)]
    request = make_request([make_job(1, partition="lonely")], nodes)
    assert pools(request) == (frozenset({"lonely"}), frozenset({"main"}), frozenset({"p", "q", "r"}))
    assert pools(dataclasses.replace(request, jobs=(), nodes=())) == ()
