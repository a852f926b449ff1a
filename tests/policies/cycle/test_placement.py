"""Which GPUs are given out: best fit, close together, idle nodes for what is larger than one."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import make_cluster_node, make_node

from muri.policies.cycle.free_gpus import FreeGpus
from muri.policies.types import NodeShare


def naive_best_fit(nodes, free, partition, gpu_count, gpu_mem_gib):
    """The rule in one line, looking at every node."""
    fitting = [
        node
        for node in nodes
        if partition in node.partitions
        and free[node.name] >= gpu_count
        and (node.gpu_mem_gib == 0 or node.gpu_mem_gib >= gpu_mem_gib)
    ]
    return min(fitting, key=lambda node: (free[node.name], node.gpu_mem_gib or float("inf"), node.name), default=None)


@given(st.integers(0, 10_000))
def test_taking_and_giving_back_agrees_with_looking_at_every_node(seed):
    rng = random.Random(seed)
    nodes = [
        make_node(
            f"n{index}",
            rng.randint(0, 8),
            gpu_count=8,
            gpu_mem_gib=rng.choice((0.0, 16.0, 80.0)),
            partitions=rng.choice((("main",), ("debug",), ("main", "debug"))),
        )
        for index in range(rng.randint(0, 8))
    ]
    gpus = FreeGpus(nodes)
    free = {node.name: node.free_gpus for node in nodes}
    held = []
    for _ in range(30):
        if held and rng.random() < 0.3:
            shares = held.pop(rng.randrange(len(held)))
            gpus.give_back(shares)
            free[shares[0].node] += shares[0].gpu_count
            continue
        wanted = (rng.choice(("main", "debug", "gone")), rng.randint(1, 8), rng.choice((0.0, 10.0, 40.0)))
        best = naive_best_fit(nodes, free, *wanted)
        taken = gpus.take(*wanted)
        assert taken == (None if best is None else (NodeShare(best.name, wanted[1]),))
        if taken:
            free[best.name] -= wanted[1]
            held.append(taken)
        for partition in ("main", "debug"):
            mine = [free[node.name] for node in nodes if partition in node.partitions]
            assert gpus.total(partition) == sum(mine)
            assert gpus.most_on_one_node(partition) == max(mine, default=0)


def test_gpus_come_from_the_island_with_the_tightest_fit():
    node = make_node("a", 5, gpu_count=8, islands=((0, 1), (4, 5, 6)))
    gpus = FreeGpus([node])
    assert gpus.take("main", 2) == (NodeShare("a", 2, (0, 1)),)
    assert gpus.take("main", 2) == (NodeShare("a", 2, (4, 5)),)
    assert gpus.take("main", 1) == (NodeShare("a", 1, (6,)),)


def test_more_gpus_than_an_island_has_come_from_the_fewest():
    node = make_node("a", 6, gpu_count=8, islands=((0,), (2, 3), (4, 5, 6)))
    assert FreeGpus([node]).take("main", 4) == (NodeShare("a", 4, (0, 4, 5, 6)),)


def test_exactly_these_gpus_are_free_or_not():
    gpus = FreeGpus([make_cluster_node("a")])
    gpus.take_exactly((NodeShare("a", 1, (1,)),))
    assert gpus.are_free((NodeShare("a", 2, (0, 2)),))
    assert not gpus.are_free((NodeShare("a", 2, (0, 1)),))
    assert not gpus.are_free((NodeShare("a", 4),))


@pytest.mark.parametrize(
    ("gpu_count", "expected"),
    [
        (8, (("a", 8),)),
        (12, (("a", 8), ("c", 4))),
        (14, (("a", 8), ("b", 6))),
        (16, (("a", 8), ("b", 8))),
        (20, (("a", 8), ("b", 8), ("c", 4))),
        (24, None),
    ],
)
def test_whole_nodes_are_the_fewest_and_idle(gpu_count, expected):
    nodes = [make_node("a", 8), make_node("b", 8), make_node("c", 4, gpu_count=4), make_node("d", 3, gpu_count=4)]
    gpus = FreeGpus(nodes, whole_nodes=True)
    taken = gpus.take("main", gpu_count)
    assert (None if taken is None else tuple((share.node, share.gpu_count) for share in taken)) == expected
    if expected is None:  # and nothing is lost by trying
        assert gpus.total("main") == 23


def test_equal_shares_of_several_nodes():
    nodes = [make_node("a", 2), make_node("b", 4), make_node("c", 3), make_node("d", 1)]
    gpus = FreeGpus(nodes)
    assert gpus.take("main", 5, node_count=2) is None
    assert gpus.take("main", 10, node_count=5) is None
    assert gpus.take("main", 4, node_count=2) == (NodeShare("a", 2), NodeShare("c", 2))
    assert gpus.take("main", 4, node_count=2) is None
    assert gpus.take("main", 4) == (NodeShare("b", 4),)


SQUARE = ((0, 1), (2, 3))


def halves(name: str, *free: tuple[int, ...]):
    """A node of two islands, with these GPUs free."""
    return make_node(name, sum(map(len, free)), gpu_count=4, islands=free, topology=SQUARE)


def test_of_nodes_that_are_equal_else_one_whose_free_gpus_are_an_island_comes_first():
    gpus = FreeGpus([halves("a", (0,), (2,)), halves("b", (2, 3))])
    assert gpus.take("main", 2) == (NodeShare("b", 2, (2, 3)),)
    assert gpus.take("main", 2) == (NodeShare("a", 2, (0, 2)),)


def test_a_single_gpu_is_taken_where_it_breaks_no_island():
    gpus = FreeGpus([halves("a", (0, 1)), halves("b", (0,), (2,))])
    assert gpus.take("main", 1) == (NodeShare("b", 1, (0,)),)


def test_a_job_on_several_nodes_gets_islands_of_them():
    nodes = [halves("a", (0,), (2,)), halves("b", (2, 3)), halves("c", (0, 1))]
    assert [share.node for share in FreeGpus(nodes).take("main", 4, node_count=2)] == ["b", "c"]


@given(st.integers(0, 10_000))
def test_islands_never_change_how_many_jobs_fit(seed):
    rng = random.Random(seed)
    nodes = [
        halves(f"n{index}", *filter(None, (tuple(gpu for gpu in half if rng.random() < 0.6) for half in SQUARE)))
        for index in range(rng.randint(1, 6))
    ]
    gpus = FreeGpus(nodes)
    counted = gpus.copy()
    for _ in range(12):
        size = rng.randint(1, 3)
        taken = gpus.take("main", size)
        assert (taken is None) == (counted.take("main", size) is None)
        assert taken is None or len(taken[0].gpu_ids) == size


def test_where_slurm_gives_gpus_in_order_the_node_counts_on_which_that_gives_an_island():
    """On the first node it would give 1 and 2, although 2 and 3 are free, too."""
    nodes = [
        replace(halves(name, *free), in_order=True) for name, free in (("a", ((1,), (2, 3))), ("b", ((0, 1), (2,))))
    ]
    gpus = FreeGpus(nodes)
    assert gpus.take("main", 2) == (NodeShare("b", 2, (0, 1)),)
    assert gpus.take("main", 2) == (NodeShare("a", 2, (1, 2)),)
