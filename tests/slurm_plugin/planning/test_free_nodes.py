"""CPUs, memory and GPUs of nodes that are free for a plan."""

import pytest
from fake_slurm import make_job, make_node

from muri.slurm_plugin.config import Config
from muri.slurm_plugin.planning.placement import Places, free_nodes
from muri.slurm_plugin.records.cluster import JobState, Snapshot
from muri.slurm_plugin.records.roles import view_of


def free(*nodes, jobs=()):
    """What Muri's plan takes for free."""
    view = view_of(Snapshot(1.0, "c", "26.05", jobs, nodes))
    return free_nodes(view, Config(), Places(view.snapshot))


def test_what_is_free_leaves_out_what_waiting_jobs_were_promised():
    released = make_job(
        1, held=False, cpu_count=6, cpus_per_task=6, mem_per_node_mib=10 * 1024, required_nodes="n2", gpu_count=1
    )
    running = make_job(2, held=False, state=JobState.RUNNING, nodes="n1")
    nodes = (
        make_node("n1", mem_mib=64 * 1024, cpus_allocated=4, gpus_allocated=1, mem_allocated_mib=1024),
        make_node("n2", mem_mib=64 * 1024),
        make_node("n3", mem_mib=64 * 1024),
    )
    found = {node.name: node for node in free(*nodes, jobs=(released, running))}
    assert {name: (node.free_gpus, node.free_cpus, node.free_mem_gib) for name, node in found.items()} == {
        "n1": (1, 12.0, 63.0),
        "n2": (1, 10.0, 54.0),
        "n3": (2, 16.0, 64.0),
    }
    assert all((node.cpu_count, node.mem_gib) == (16.0, 64.0) for node in found.values())


@pytest.mark.parametrize("request_", [{"cpu_count": 2 * 10**9}, {"gpu_count": 100}, {"node_count": 2 * 10**9}])
def test_a_job_that_no_nodes_could_hold_is_promised_nothing(request_):
    """Slurm shows "Priority" until it is the job's turn, and only then that it can never start."""
    released = make_job(1, held=False, reason="Priority", **request_)
    found = free(make_node("n1"), make_node("n2"), jobs=(released,))
    assert [(node.free_gpus, node.free_cpus) for node in found] == [(2, 16.0), (2, 16.0)]


PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("in_use", "allocated", "islands"),
    [
        ((), 0, PAIRS),
        ((0, 2), 2, ((1,), (3,))),
        ((0, 1), 2, ((2, 3),)),
        ((), 2, ()),  # Slurm does not show which
        ((0, 1, 2, 3), 4, ()),
    ],
)
def test_free_gpus_are_told_by_island(in_use, allocated, islands):
    node = make_node("n1", gpu_count=4, gpus_allocated=allocated, gpus_in_use=in_use, gpu_islands=PAIRS)
    (found,) = free(node)
    assert (found.islands, found.topology) == (islands, PAIRS)


def test_of_gpus_that_slurm_will_give_to_others_nobody_knows_which():
    released = make_job(1, held=False, gpu_count=1)
    node = make_node("n1", gpu_count=4, gpu_islands=PAIRS)
    (found,) = free(node, jobs=(released,))
    assert (found.free_gpus, found.islands) == (3, ())
