"""Members with process groups: one that ends, or drops a model, stops nobody. Two gloo ranks each."""

import pytest
from launcher_harness import Launcher
from ranks_harness import RankedLauncher

pytest.importorskip("torch", reason="the members train with PyTorch")

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


def test_members_with_two_ranks_each_see_their_own_group(launcher: Launcher) -> None:
    ranked, jobs = RankedLauncher(launcher, 2), ("101", "102")
    ranked.script = launcher.script(RANK)
    ranked.start(*jobs)
    members = {job: ranked.member(job) for job in jobs}
    for job, processes in members.items():
        assert ranked.exit_codes(processes) == [0, 0], [ranked.out(job, rank, "err") for rank in range(2)]
        assert [ranked.out(job, rank) for rank in range(2)] == [f"done [2] False {2.0 * int(job)}\n"] * 2


def test_dropping_a_model_after_its_process_group_stops_nobody(launcher: Launcher) -> None:
    ranked = RankedLauncher(launcher, 2)
    ranked.script = launcher.script(DROPS_MODELS)
    ranked.start("101")
    processes = ranked.member("101", launcher.folder)
    assert ranked.exit_codes(processes) == [0, 0], [ranked.out("101", rank, "err") for rank in range(2)]
    assert [ranked.out("101", rank) for rank in range(2)] == ["done\n"] * 2
