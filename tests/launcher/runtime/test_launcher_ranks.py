"""Groups of several ranks: real runtimes, real gloo, two DDP members that share them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends, launcher_in
from polling import until
from ranks_harness import TRAIN_DDP, RankedLauncher

pytest.importorskip("torch", reason="DDP needs torch")

ITERATIONS = 20


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedLauncher]:
    """The runtimes of two ranks with PyTorch loaded, for all tests that leave them running."""
    with launcher_in(tmp_path_factory.mktemp("two-ranks")) as launcher:
        ranked = RankedLauncher(launcher, 2)
        ranked.start(*map(str, range(101, 113)), options=("--preload", "torch"))
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


def test_members_that_look_for_unused_parameters_do_not_block_each_other(launcher: Launcher) -> None:
    """DDP talks to the other ranks once more, in C++, after the last bucket was sent."""
    ranked = RankedLauncher(launcher, 2)
    text = TRAIN_DDP.replace("torch.nn.Linear(32, 1)))", "torch.nn.Linear(32, 1)), find_unused_parameters=True)")
    assert text != TRAIN_DDP
    ranked.script.write_text(text)
    ranked.start("101", "102")
    require_as_alone(ranked, "automatic", "101", "102")
    assert "switched off" not in ranked.out("101", 0, "err") + ranked.out("102", 0, "err")


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
    assert [ends(process) for process in cancelled] == [-signal.SIGTERM] * 2
    assert [ends(process) for process in going_on] == [0, 0]
    assert "79 " in ranked.out("104", 0)


ONE_LEAVES = """
    import os, signal, sys, time
    import muri
    for step in muri.batches(range(2)):
        pass
    print("trained", flush=True)
    if os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "killed" else os._exit(0)
    time.sleep(15)
    print("saved", flush=True)
"""


def test_ranks_whose_peer_was_killed_are_ended_and_read_why_and_those_whose_peer_has_left_go_on(
    two_ranks: RankedLauncher,
) -> None:
    script = two_ranks.launcher.script(ONE_LEAVES, "one_leaves.py")
    killed, left = (two_ranks.member(job, way, script=script) for job, way in (("111", "killed"), ("112", "left")))
    assert [ends(process) for process in killed] == [-signal.SIGTERM, -signal.SIGKILL]
    assert [ends(process) for process in left] == [0, 0]
    assert "muri: rank 1 of job 111 was ended by a signal; rank 0 cannot go on" in two_ranks.out("111", 0, "err")
    assert [two_ranks.out(job, 0) for job in ("111", "112")] == ["trained\n", "trained\nsaved\n"]


def test_a_killed_runtime_ends_all_and_the_scripts_go_on_until_their_job_goes_back(launcher: Launcher) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.start("101", "102")
    processes = ranked.member("101", 1, 100000, -1, "explicit")
    processes += ranked.member("102", 2, 100000, -1, "explicit")
    until(lambda: all("9 " in ranked.out("101", rank) for rank in range(2)), "the first iterations")
    ranked.runtimes[1].send_signal(signal.SIGKILL)
    assert ends(ranked.runtimes[0]) == 1
    assert "rank 0 ends, and its members go back to the queue" in ranked.log(0)
    done = {(job, rank): ranked.out(job, rank).count("\n") for job in ("101", "102") for rank in range(2)}
    until(lambda: all(ranked.out(*place).count("\n") > count + 5 for place, count in done.items()), "more iterations")
    assert [process.poll() for process in processes] == [None] * 4


def test_a_member_that_is_not_one_process_per_gpu_is_refused(two_ranks: RankedLauncher) -> None:
    variables = {"MURI_REQUEUE_WAIT_S": "0.1", "MURI_JOB": "1", "SLURM_STEP_NUM_TASKS": "1"}
    process = two_ranks.launcher.member("107", two_ranks.script, **variables)
    assert ends(process) == 75
    assert "it runs as rank 0 of 1, but its group has one runtime per GPU" in two_ranks.launcher.err("107")


RANK = """
    import os, threading
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    assert not dist.is_initialized(), "another member's group is visible"
    dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=2)
    rank, member = dist.get_rank(), int(os.environ["SLURM_JOB_ID"])
    seen = []
    thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
    thread.start(); thread.join()
    pair = dist.new_group([0, 1])
    torch.manual_seed(member)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(10):
        value = torch.tensor([float(member + rank)])
        dist.all_reduce(value, group=pair)
        assert value.item() == 2 * member + 1, value
        model(torch.randn(3, 4) + rank).sum().backward()
        total = model.module.weight.grad.clone(); dist.all_reduce(total)
        assert torch.equal(total, 2 * model.module.weight.grad), "gradients are not those of both ranks"
        model.zero_grad()
    all_reduce = torch.distributed._functional_collectives.all_reduce
    functional = all_reduce(torch.ones(1) * member, "sum", dist.group.WORLD).item()
    dist.barrier()
    dist.destroy_process_group()
    print("done", seen, dist.is_initialized(), functional, flush=True)
"""
DROPS_MODELS = """
    import os, sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    for round in range(8):  # each with a store of its own: a rank that is ahead could still find the last one
        place = f"file://{sys.argv[1]}/{round}"
        dist.init_process_group("gloo", init_method=place, rank=int(os.environ["SLURM_PROCID"]), world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model(torch.randn(3, 4)).sum().backward()
        total = model.module.weight.grad.clone()
        dist.all_reduce(total)
        del total  # from now on one of gloo's threads is the last to hold it
        dist.destroy_process_group()
        del model
    print("done")
"""


def test_members_see_their_own_process_groups(two_ranks: RankedLauncher) -> None:
    script, jobs = two_ranks.launcher.script(RANK, "rank.py"), ("108", "109")
    members = {job: two_ranks.member(job, script=script) for job in jobs}
    for job, processes in members.items():
        assert two_ranks.exit_codes(processes) == [0, 0], [two_ranks.out(job, rank, "err") for rank in range(2)]
        assert [two_ranks.out(job, rank) for rank in range(2)] == [f"done [2] False {2.0 * int(job)}\n"] * 2


def test_dropping_a_model_after_its_process_group_stops_nobody(two_ranks: RankedLauncher, tmp_path: Path) -> None:
    processes = two_ranks.member("110", tmp_path, script=two_ranks.launcher.script(DROPS_MODELS, "drops.py"))
    assert two_ranks.exit_codes(processes) == [0, 0], [two_ranks.out("110", rank, "err") for rank in range(2)]
    assert [two_ranks.out("110", rank) for rank in range(2)] == ["done\n"] * 2
