"""The virtual Slurm gives the same nodes as a sandbox of Slurm 26.05 with the same free nodes."""

from pathlib import Path

import pytest

from muri.slurm_plugin.config import Config
from muri_lab.twin.programs import Work
from muri_lab.twin.records import Need
from muri_lab.twin.schedule import Free, best_fit
from muri_lab.twin.sharing import Iteration
from muri_lab.twin.site import Site, plain_nodes
from muri_lab.twin.submission import FIRST_UID, Submission
from muri_lab.twin.twin import EPOCH_S, Twin

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


def started(node: Free, *cpus: int, layers: int = 4) -> list[bool]:
    return [node.take(Need(0, count, 0, layers)) is not None for count in cpus]


def test_cpus_are_given_out_in_layers_of_whole_jobs() -> None:
    """As Slurm 24.11 and 26.05 did with a pilot of one CPU and members on a node of four, OverSubscribe=YES:4."""
    for cpus, count in ((4, 3), (3, 4), (2, 7)):
        node = Free(gpus=1, mem_mib=0, cpu_count=4)
        assert started(node, 1, *[cpus] * 9) == [True] * (count + 1) + [False] * (9 - count)
        assert node.cpus == 0


def test_a_job_that_shares_no_cpus_keeps_those_that_do_off_its_node() -> None:
    node = Free(gpus=0, mem_mib=0, cpu_count=4)
    assert started(node, 2) == [True]
    plain = node.take(Need(0, 1, 0))
    assert plain is not None
    assert node.take(Need(0, 2, 0)) is None  # one CPU is idle
    assert started(node, 1) == [False]
    node.give(plain)
    assert started(node, 1, 4) == [True, True]


def test_an_ended_job_leaves_its_layer() -> None:
    node = Free(gpus=0, mem_mib=0, cpu_count=4)
    small = [node.take(Need(0, 2, 0, 2)) for _ in range(4)]
    assert started(node, 4, layers=2) == [False]
    for held in (small[0], small[3]):  # of both layers: what is left fits into one
        assert held is not None
        node.give(held)
    assert started(node, 4, layers=2) == [True]


def test_without_a_controller_a_waiting_job_starts_with_the_second_after_an_end(tmp_path: Path) -> None:
    twin = Twin(Site(plain_nodes(1, 1)), Config(), tmp_path)
    work = Work(Iteration((0.1, 0.1, 0.1, 0.1), 0.41), 10)
    twin.submit(Submission(EPOCH_S + 0.5, "alice", FIRST_UID, work) for _ in range(3))
    twin.run_without_controller()
    first, second, third = twin.courses
    assert not any(course.pilots for course in twin.courses)
    for before, after in ((first, second), (second, third)):
        assert before.end_s < after.starts_s[0] < before.end_s + 1
        assert after.starts_s[0] == round(after.starts_s[0])
