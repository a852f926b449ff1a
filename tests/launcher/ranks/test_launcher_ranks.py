"""Groups of several ranks: real runtimes, real gloo, two DDP members that share them."""

import signal
from collections.abc import Iterator

import pytest
from launcher_harness import Launcher, ends, launcher_in
from polling import until
from ranks_harness import RankedLauncher

pytest.importorskip("torch", reason="DDP needs torch")

ITERATIONS = 20


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLauncher]:
    """The runtimes of two ranks with PyTorch loaded, for all tests that leave them running."""
    with launcher_in(tmp_path_factory.mktemp("two-ranks")) as launcher:
        ranked = RankedLauncher(launcher, 2)
        ranked.start(*map(str, range(101, 108)), options=("--preload", "torch"))
        yield ranked


def require_as_alone(ranked: RankedLauncher, style: str, *jobs: str) -> None:
    """Fail unless two members train beside each other as each of them does alone."""
    well = [0] * ranked.world_size
    members = {job: ranked.member(job, seed, ITERATIONS, -1, style) for seed, job in enumerate(jobs, 1)}
    for job, processes in members.items():
        assert ranked.exit_codes(processes) == well, [ranked.out(job, rank, "err") for rank in range(len(well))]
    for seed, job in enumerate(jobs, 1):
        alone = ranked.member(f"90{seed}", seed, ITERATIONS, -1, style, alone=True)
        assert ranked.exit_codes(alone) == well
        expected = ranked.out(f"90{seed}", 0)
        assert f"{ITERATIONS - 1} " in expected
        assert [ranked.out(job, rank) for rank in range(len(well))] == [expected] * len(well)


def test_two_ddp_members_train_as_alone(two_ranks: RankedLauncher) -> None:
    require_as_alone(two_ranks, "explicit", "105", "106")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("style", "world_size"), [("automatic", 2), pytest.param("explicit", 4, marks=pytest.mark.thorough)]
)
def test_members_without_marks_or_on_four_ranks_train_as_alone_and_their_group_ends(
    launcher: Launcher, style: str, world_size: int
) -> None:
    ranked = RankedLauncher(launcher, world_size)
    # The group of four as its host starts it; in the other one both members import PyTorch themselves at the same time.
    ranked.start("101", "102", options=("--preload", "torch") if world_size == 4 else ())
    require_as_alone(ranked, style, "101", "102")
    ranked.end()
    assert [ends(runtime) for runtime in ranked.runtimes] == [0] * world_size


def test_a_member_of_which_a_rank_fails_or_that_is_cancelled_ends_on_all_ranks_and_alone(
    two_ranks: RankedLauncher,
) -> None:
    ranked = two_ranks
    fail = [ranked.member(job, 1, 20, rank, "explicit") for rank, job in enumerate(("101", "102"))]
    cancelled, going_on = ranked.member("103", 1, 100000, -1, "explicit"), ranked.member("104", 2, 80, -1, "explicit")
    for rank, job in enumerate(("101", "102")):
        codes = [ends(process) for process in fail[rank]]
        assert codes[rank] == 1
        assert "this rank fails" in ranked.out(job, rank, "err")
        assert codes[1 - rank] != 0
        assert ranked.out(job, 1 - rank, "err"), "the other rank must say why it ended"
    until(lambda: all("9 " in ranked.out("103", rank) for rank in range(2)), "the first iterations")
    for process in cancelled:
        process.send_signal(signal.SIGTERM)
    assert [ends(process) for process in cancelled] == [128 + signal.SIGTERM] * 2
    assert [ends(process) for process in going_on] == [0, 0]
    assert "79 " in ranked.out("104", 0)


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


def test_a_member_that_is_not_one_process_per_gpu_is_refused(two_ranks: RankedLauncher) -> None:
    variables = {"MURI_REQUEUE_WAIT_S": "0.1", "MURI_JOB": "1", "SLURM_STEP_NUM_TASKS": "1"}
    process = two_ranks.launcher.member("107", two_ranks.script, **variables)
    assert ends(process) == 75
    assert "it runs as rank 0 of 1, but its group has one runtime per GPU" in two_ranks.launcher.err("107")
