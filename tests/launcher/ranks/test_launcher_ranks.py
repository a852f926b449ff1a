"""Groups of several ranks: real runtimes, real gloo, two DDP members that share them."""

import signal
from collections.abc import Iterator

import pytest
from launcher_harness import Launcher, ends, launcher_in
from polling import until
from ranks_harness import RankedLauncher

pytest.importorskip("torch", reason="DDP needs torch")

ITERATIONS = 40


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLauncher]:
    """The runtimes of two ranks with PyTorch loaded, for all tests that leave them running."""
    with launcher_in(tmp_path_factory.mktemp("two-ranks")) as launcher:
        ranked = RankedLauncher(launcher, 2)
        ranked.start(*map(str, range(101, 107)), options=("--preload", "torch"))
        yield ranked


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("style", "world_size"), [("explicit", 4), ("automatic", 2)])
def test_two_ddp_members_train_as_alone(launcher: Launcher, style: str, world_size: int) -> None:
    ranked = RankedLauncher(launcher, world_size)
    # The group of four as its host starts it; in the other one both members import PyTorch themselves at the same time.
    ranked.start("101", "102", options=("--preload", "torch") if world_size == 4 else ())
    members = {job: ranked.member(job, seed, ITERATIONS, -1, style) for job, seed in (("101", 1), ("102", 2))}
    for job, processes in members.items():
        assert ranked.exit_codes(processes) == [0] * world_size, [ranked.out(job, r, "err") for r in range(world_size)]
    for seed, job in ((1, "101"), (2, "102")):
        alone = ranked.member(f"90{seed}", seed, ITERATIONS, -1, style, alone=True)
        assert ranked.exit_codes(alone) == [0] * world_size
        expected = ranked.out(f"90{seed}", 0)
        assert f"{ITERATIONS - 1} " in expected
        assert [ranked.out(job, rank) for rank in range(world_size)] == [expected] * world_size
    ranked.end()
    assert [ends(runtime) for runtime in ranked.runtimes] == [0] * world_size


@pytest.mark.parametrize(("fails", "job", "other"), [(0, "101", "102"), (1, "103", "104")])
def test_a_rank_that_fails_ends_its_member_only(two_ranks: RankedLauncher, fails: int, job: str, other: str) -> None:
    ranked = two_ranks
    failing, going_on = ranked.member(job, 1, 40, fails, "explicit"), ranked.member(other, 2, 60, -1, "explicit")
    codes = [ends(process) for process in failing]
    assert codes[fails] == 1
    assert "this rank fails" in ranked.out(job, fails, "err")
    assert codes[1 - fails] != 0
    assert ranked.out(job, 1 - fails, "err"), "the other rank must say why it ended"
    assert [ends(process) for process in going_on] == [0, 0]
    assert "59 " in ranked.out(other, 0)


def test_a_cancelled_member_ends_on_all_ranks(two_ranks: RankedLauncher) -> None:
    ranked = two_ranks
    cancelled, going_on = ranked.member("105", 1, 100000, -1, "explicit"), ranked.member("106", 2, 60, -1, "explicit")
    until(lambda: all("9 " in ranked.out("105", rank) for rank in range(2)), "the first iterations")
    for process in cancelled:
        process.send_signal(signal.SIGTERM)
    assert [ends(process) for process in cancelled] == [128 + signal.SIGTERM] * 2
    assert [ends(process) for process in going_on] == [0, 0]


def test_a_killed_runtime_ends_all_and_no_script_counts_as_done(launcher: Launcher) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.start("101", "102")
    processes = ranked.member("101", 1, 100000, -1, "explicit")
    processes += ranked.member("102", 2, 100000, -1, "explicit")
    until(lambda: all("9 " in ranked.out("101", rank) for rank in range(2)), "the first iterations")
    ranked.runtimes[1].send_signal(signal.SIGKILL)
    assert ends(ranked.runtimes[0]) == 1
    assert "rank 0 ends, and its members go back to the queue" in ranked.log(0)
    assert [ends(process) for process in processes] == [75] * 4


def test_a_member_that_is_not_one_process_per_gpu_is_refused(launcher: Launcher) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.start("101")
    process = launcher.member("101", ranked.script, MURI_REQUEUE_WAIT_S="0.1", MURI_JOB="1", SLURM_STEP_NUM_TASKS="1")
    assert ends(process) == 75
    assert "it runs as rank 0 of 1, but its group has one runtime per GPU" in launcher.err("101")
