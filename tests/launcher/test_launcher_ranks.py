"""Groups of several ranks: real runtimes, real gloo, two DDP members that share them."""

import os
import signal
from collections.abc import Iterator

import pytest
from launcher_harness import Launcher, ends, until
from ranks_harness import RankedLauncher

pytest.importorskip("torch", reason="DDP needs torch")

WORLD_SIZE = 4


@pytest.fixture
def ranked(launcher: Launcher) -> Iterator[RankedLauncher]:
    """A launcher of groups of four ranks."""
    return RankedLauncher(launcher, WORLD_SIZE)


@pytest.mark.parametrize("style", ["explicit", "automatic"])
def test_two_ddp_members_train_as_alone(ranked: RankedLauncher, style: str) -> None:
    ranked.start("101", "102", options=("--isolation", os.environ.get("ISO", "thread")))
    members = {job: ranked.member(job, seed, 200, -1, style) for job, seed in (("101", 1), ("102", 2))}
    for job, processes in members.items():
        for rank, process in enumerate(processes):
            assert ends(process) == 0, ranked.out(job, rank, "err")
    for seed, job in ((1, "101"), (2, "102")):
        alone = ranked.member(f"90{seed}", seed, 200, -1, style, alone=True)
        assert [ends(process) for process in alone] == [0] * WORLD_SIZE
        expected = ranked.out(f"90{seed}", 0)
        assert "199 " in expected
        assert [ranked.out(job, rank) for rank in range(WORLD_SIZE)] == [expected] * WORLD_SIZE
    ranked.end()
    assert [ends(runtime) for runtime in ranked.runtimes] == [0] * WORLD_SIZE
