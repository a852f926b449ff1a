"""Both solvers find the maximum, and the same one."""

import random
from itertools import combinations

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.policies.matching.blossom import Edge, match, whole_weight
from muri.policies.options import OptionsError


@st.composite
def graphs(draw, largest=60):
    size = draw(st.integers(2, largest))
    seed = draw(st.integers(0, 2**32))
    density = draw(st.floats(0.05, 1))
    levels = draw(st.sampled_from((1, 2, 5, 10_000)))  # few levels: many ties
    rng = random.Random(seed)
    return [
        Edge(first, second, rng.randint(0, levels) / levels)
        for first, second in combinations(range(size), 2)
        if rng.random() < density
    ]


def weight_of(pairs, edges):
    weights = {(edge.first, edge.second): edge.weight for edge in edges}
    return sum(weights[pair] for pair in pairs)


@given(graphs())
def test_the_weight_is_that_of_an_independent_networkx_matching(edges):
    graph = networkx.Graph()
    graph.add_weighted_edges_from(edges)
    oracle = sum(graph.edges[pair]["weight"] for pair in networkx.max_weight_matching(graph))
    assert weight_of(match(edges), edges) == pytest.approx(oracle, abs=1e-6)


@given(graphs(largest=30))
def test_both_solvers_find_the_same_pairs(edges):
    assert match(edges, "rustworkx") == match(edges, "networkx")


@given(graphs(largest=20), st.randoms(use_true_random=False))
def test_the_order_of_the_edges_does_not_matter(edges, rng):
    shuffled = list(edges)
    rng.shuffle(shuffled)
    for method in ("rustworkx", "networkx", "priority-order"):
        assert match(shuffled, method) == match(edges, method)


@given(graphs(largest=20), st.sampled_from(("rustworkx", "networkx", "priority-order")))
def test_nobody_has_two_partners(edges, method):
    pairs = match(edges, method)
    members = [member for pair in pairs for member in pair]
    assert len(members) == len(set(members))
    assert set(pairs) <= {(edge.first, edge.second) for edge in edges}


def test_equal_weights_have_one_optimum():
    edges = [Edge(first, second, 0.5) for first, second in combinations(range(8), 2)]
    assert len({whole_weight(edge) for edge in edges}) == len(edges)


def test_tie_breakers_never_outweigh_a_real_difference():
    # 500 pairs, each with the largest possible tie-breaker, against one step of the ninth digit.
    assert whole_weight(Edge(0, 1, 2e-9)) - whole_weight(Edge(0, 2, 1e-9)) > 0
    assert (1 << 60) > 500 * (1 << 40)


def test_priority_order_pairs_neighbours():
    edges = [Edge(0, 3, 1.0), Edge(0, 1, 0.1), Edge(2, 3, 0.1), Edge(1, 2, 1.0)]
    assert match(edges, "priority-order") == ((0, 1), (2, 3))
    assert match(edges, "rustworkx") == ((0, 3), (1, 2))


def test_no_edges_no_pairs():
    assert match([]) == ()


def test_an_unknown_method_names_the_valid_ones():
    with pytest.raises(OptionsError, match="rustworkx, networkx, priority-order"):
        match([], "blossom")
