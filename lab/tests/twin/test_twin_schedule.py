"""The virtual Slurm gives the same nodes as a sandbox of Slurm 26.05 with the same free nodes."""

from pathlib import Path

import pytest

from muri.slurm_plugin.config import Config
from muri_lab.twin.programs import Work
from muri_lab.twin.schedule import best_fit
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
