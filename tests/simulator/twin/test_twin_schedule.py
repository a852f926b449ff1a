"""Which nodes the virtual Slurm gives: what a sandbox of Slurm 26.05 gave for the same free nodes."""

import pytest

from muri.simulator.twin.schedule import best_fit

ORDER = ["n1", "n2", "n3", "n4"]


@pytest.mark.parametrize(
    ("free_cpus", "count", "nodes"),
    [
        ({"n1": 16, "n2": 15, "n3": 16, "n4": 16}, 1, "n2"),  # the fullest node of a run
        ({"n1": 16, "n2": 16, "n4": 16}, 1, "n4"),  # the shorter run
        ({"n1": 16, "n3": 16, "n4": 15}, 1, "n1"),  # the run with fewer CPUs, not the fullest node
        ({"n1": 16, "n2": 16, "n3": 15, "n4": 16}, 2, "n1 n2"),  # several nodes: the first of the run
        ({"n1": 16, "n3": 16, "n4": 16}, 2, "n3 n4"),  # the run that suffices
        ({"n1": 16, "n3": 16, "n4": 16}, 3, "n3 n4 n1"),  # none does: the longest, and then the next
    ],
)
def test_nodes_are_chosen_as_cons_tres_does(free_cpus: dict[str, int], count: int, nodes: str) -> None:
    assert best_fit(ORDER, free_cpus, count) == tuple(nodes.split())
