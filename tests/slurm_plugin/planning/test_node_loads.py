"""What jobs find room on a node: CPUs that add up, layers of CPUs, memory, counted as Slurm does."""

from dataclasses import replace
from typing import Any

import pytest
from at_work import behind_pilot, candidate, cycle_of
from fake_slurm import FakeCpus, make_job, make_node
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.planning.gathered import gather
from muri.slurm_plugin.planning.node_loads import Need, NodeLoad, free_in_layers
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.limits import PartitionLimits, SiteLimits

GIB = 1024
SHARED = SiteLimits(partitions=(PartitionLimits("main", oversubscribe=4),))

jobs = st.lists(st.integers(1, 16), max_size=12)


@given(st.integers(1, 16), st.integers(2, 6), jobs)
def test_jobs_that_start_one_after_the_other_fit_just_as_they_do_in_slurm(cpu_count, layers, asked):
    slurm = FakeCpus(cpu_count)
    started = [slurm.start(number, cpus, layers) for number, cpus in enumerate(asked)]
    fits = free_in_layers(cpu_count, layers, asked)
    assert (fits is not None) == all(started)
    if fits is not None:
        assert (len(fits), sum(fits)) == (layers, layers * cpu_count - sum(asked))
        assert min(fits) >= 0


@given(st.integers(1, 16), jobs)
def test_in_one_layer_cpus_add_up(cpu_count, asked):
    assert (free_in_layers(cpu_count, 1, asked) is not None) == (sum(asked) <= cpu_count)


@given(st.integers(1, 16), st.integers(1, 6), jobs)
def test_another_job_or_a_layer_less_makes_no_room(cpu_count, layers, asked):
    if free_in_layers(cpu_count, layers, asked) is None:
        assert free_in_layers(cpu_count, layers, [*asked, 1]) is None
    if layers > 1 and free_in_layers(cpu_count, layers - 1, asked) is not None:
        assert free_in_layers(cpu_count, layers, asked) is not None


def load(**changes: Any) -> NodeLoad:
    return NodeLoad.of(make_node("n1", **{"cpu_count": 8, "mem_mib": 8 * GIB, **changes}))


def why_not(found: NodeLoad, *needs: tuple[int, int], layers: int = 1, counts_mem: bool = True) -> str:
    return found.why_not([Need(*need) for need in needs], layers, counts_mem=counts_mem)


def test_memory_adds_up_where_slurm_counts_it():
    found = load(mem_allocated_mib=4 * GIB)
    assert why_not(found, (1, 2 * GIB), (1, 2 * GIB)) == ""
    too_much = ((1, 2 * GIB), (1, 2 * GIB + 1))
    for layers in (1, 4):
        assert why_not(found, *too_much, layers=layers) == "has 4096 MiB of memory left, 4097 are needed"
        assert why_not(found, *too_much, layers=layers, counts_mem=False) == ""


def test_ordinary_jobs_have_their_cpus_to_themselves():
    found = load(cpus_allocated=2)
    assert why_not(found, (1, 0), (5, 0)) == ""
    assert why_not(found, (1, 0), (6, 0)) == "has 6 CPUs left, 7 are needed"
    found.take([Need(1, GIB), Need(5)], shares=False)
    assert (found.cpus, found.mem_mib, found.ordinary, found.sharing) == (0, 7 * GIB, True, [])


def test_jobs_that_share_need_a_layer_each_where_they_want_all_cpus():
    found = load()
    assert why_not(found, (1, 0), (8, 0), (8, 0), layers=3) == ""
    assert why_not(found, (1, 0), (8, 0), (8, 0), layers=2).startswith("has no layer of CPUs left for all (2 jobs")
    found.take([Need(1), Need(8)], shares=True)
    assert why_not(found, (8, 0), layers=3) == ""
    assert why_not(found, (7, 0), layers=2) == ""
    assert why_not(found, (8, 0), layers=2) != ""
    assert (found.cpus, found.ordinary) == (8, False)


def test_a_node_has_jobs_of_one_kind():
    ordinary, sharing = load(), load()
    ordinary.take([Need(1)], shares=False)
    sharing.take([Need(1)], shares=True)
    assert "an ordinary job" in why_not(ordinary, (1, 0), layers=4)
    assert "share CPUs" in why_not(sharing, (1, 0))
    assert why_not(ordinary, (1, 0)) == why_not(sharing, (1, 0), layers=4) == ""


def test_slurm_gives_out_whole_cores():
    found = load(threads_per_core=2)
    assert why_not(found, (1, 0), (3, 0), (1, 0)) == ""
    assert why_not(found, (1, 0), (3, 0), (3, 0)) == "has 8 CPUs left, 10 are needed"


def running(job_id: int, **changes: Any) -> Any:
    return make_job(
        job_id,
        **{"state": JobState.RUNNING, "held": False, "reason": "", "nodes": "n1", "admin_comment": "", **changes},
    )


@pytest.mark.parametrize(
    ("limits", "changes", "ordinary", "sharing"),
    [
        (SHARED, {"oversubscribe": True}, False, [4]),
        (SHARED, {}, True, []),
        (SHARED, {"oversubscribe": True, "partition": "other"}, True, []),
        (SHARED, {"oversubscribe": True, "nodes": "n[1-2]", "node_count": 2}, False, [2]),
        (SHARED, {"nodes": "n2"}, False, []),
        (SHARED, {"nodes": "a ruin["}, False, []),
        (SHARED, {"state": JobState.COMPLETED}, False, []),
        (SiteLimits(), {"oversubscribe": True}, False, []),  # no partition has layers
    ],
)
def test_what_runs_on_a_node_says_which_kind_it_has(limits, changes, ordinary, sharing):
    found = gather(cycle_of([running(1, **changes)], [make_node("n1")], limits=limits)).loads["n1"]
    assert (found.ordinary, found.sharing) == (ordinary, sharing)


def test_a_job_that_was_let_go_is_counted_with_the_cpus_that_come_with_its_gpus():
    alone = make_job(1, held=False, reason="Resources", cpu_count=1, cpus_per_gpu=8)
    assert gather(cycle_of([alone], [make_node("n1")])).loads["n1"].cpus == 24


def test_members_that_wait_for_their_pilot_are_counted_as_what_they_are():
    pilot, *members = behind_pilot(1, candidate(1), candidate(2, "m2"), oversubscribe=True)
    waiting = [
        replace(job, state=JobState.PENDING, nodes="", reason="Dependency", oversubscribe=True) for job in members
    ]
    found = gather(cycle_of([pilot, *waiting], [make_node("n1", cpus_allocated=1)], limits=SHARED)).loads["n1"]
    assert (found.sharing, found.ordinary, found.cpus) == ([1, 4, 4], False, 31)
