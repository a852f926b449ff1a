"""DDP members of a group of two ranks under automatic stages."""

import pytest
from launcher_harness import Launcher, ends
from ranks_harness import TRAIN_DDP, RankedLauncher

pytest.importorskip("torch", reason="DDP needs torch")

ITERATIONS = 20


def test_members_that_look_for_unused_parameters_do_not_block_each_other(launcher: Launcher) -> None:
    """DDP talks to the other ranks once more, in C++, after the last bucket was sent."""
    ranked = RankedLauncher(launcher, 2)
    text = TRAIN_DDP.replace("torch.nn.Linear(32, 1)))", "torch.nn.Linear(32, 1)), find_unused_parameters=True)")
    assert text != TRAIN_DDP
    ranked.script.write_text(text)
    ranked.start("101", "102")
    members = [ranked.member(job, seed, ITERATIONS, -1, "automatic") for job, seed in (("101", 1), ("102", 2))]
    for job, processes in zip(("101", "102"), members, strict=True):
        assert [ends(process) for process in processes] == [0, 0], ranked.out(job, 0, "err")
        assert f"{ITERATIONS - 1} " in ranked.out(job, 0)
        assert ranked.out(job, 0) == ranked.out(job, 1)
        assert "switched off" not in ranked.out(job, 0, "err")
