"""Every member has a default process group of its own: three members, two gloo ranks each."""

import pytest
from launcher_harness import Launcher, ends
from ranks_harness import free_port

pytest.importorskip("torch", reason="the members train with PyTorch")

RANK = """
    import os, sys, threading
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    assert not dist.is_initialized(), "another member's group is visible"
    dist.init_process_group("gloo")
    rank, member = dist.get_rank(), int(os.environ["SLURM_JOB_ID"])
    seen = []
    thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
    thread.start(); thread.join()
    pair = dist.new_group([0, 1])
    torch.manual_seed(member)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(20):
        value = torch.tensor([float(member + rank)])
        dist.all_reduce(value, group=pair)
        assert value.item() == 2 * member + 1, value
        model(torch.randn(3, 4) + rank).sum().backward()
        total = model.module.weight.grad.clone(); dist.all_reduce(total)
        assert torch.equal(total, 2 * model.module.weight.grad), "gradients are not those of both ranks"
        model.zero_grad()
    all_reduce = torch.distributed._functional_collectives.all_reduce
    functional = all_reduce(torch.ones(1) * member, "sum", dist.group.WORLD).item()
    if "leave" in sys.argv:
        os._exit(0) if "hard" in sys.argv else sys.exit(0)
    dist.barrier()
    dist.destroy_process_group()
    print("done", seen, dist.is_initialized(), functional, flush=True)
"""
DROPS_MODELS = """
    import os, sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    for round in range(12):  # each with a store of its own: a rank that is ahead could still find the last one
        place = f"file://{sys.argv[1]}/{round}"
        dist.init_process_group("gloo", init_method=place, rank=int(os.environ["RANK"]), world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        model(torch.randn(3, 4)).sum().backward()
        total = model.module.weight.grad.clone()
        dist.all_reduce(total)
        del total  # from now on one of gloo's threads is the last to hold it
        dist.destroy_process_group()
        del model
    print("done")
"""


def _two_hosts(launcher: Launcher, tmp_path) -> tuple[Launcher, Launcher]:
    """A runtime for each rank, as on two nodes."""
    first = Launcher(tmp_path / "r0", launcher.run_dir / "a")
    second = Launcher(tmp_path / "r1", launcher.run_dir / "b")
    for host in (first, second):
        host.folder.mkdir()
        host.run_dir.mkdir(mode=0o700)
        # Two runtimes that know nothing of each other would grant their members the network in different orders.
        host.environment["MURI_AUTOMATIC"] = "0"
    return first, second


def test_three_members_with_two_ranks_each(launcher, tmp_path):
    script = launcher.script(RANK)
    hosts, members = _two_hosts(launcher, tmp_path), ("101", "102", "103")
    try:
        running = []
        ports = {member: str(free_port()) for member in members}
        for rank, host in enumerate(hosts):
            host.threads(*members)
            for member in members:
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[member], "WORLD_SIZE": "2"}
                running.append(host.member(member, script, RANK=str(rank), **place))
        codes = [ends(process) for process in running]
        assert codes == [0] * 6, [(host.err(m), host.out(m)) for host in hosts for m in members]
        for host in hosts:
            for member in members:
                assert host.out(member) == f"done [2] False {2.0 * int(member)}\n"
    finally:
        for host in hosts:
            host.close()


def test_dropping_a_model_after_its_process_group_stops_nobody(launcher, tmp_path):
    script = launcher.script(DROPS_MODELS)
    hosts = _two_hosts(launcher, tmp_path)
    try:
        for host in hosts:
            host.threads("101")
        members = [host.member("101", script, tmp_path, RANK=str(rank)) for rank, host in enumerate(hosts)]
        assert [ends(member) for member in members] == [0, 0], [host.err("101") for host in hosts]
        assert [host.out("101") for host in hosts] == ["done\n"] * 2
    finally:
        for host in hosts:
            host.close()


@pytest.mark.parametrize("way", [("leave",), ("leave", "hard")])
def test_a_member_that_ends_without_destroying_its_group_leaves_its_peer_an_error(launcher, tmp_path, way):
    script = launcher.script(RANK)
    hosts, port = _two_hosts(launcher, tmp_path), str(free_port())
    try:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        for host in hosts:
            host.threads("101")
        stays = hosts[0].member("101", script, RANK="0", **place)
        leaves = hosts[1].member("101", script, *way, RANK="1", **place)
        assert ends(leaves) == 0, hosts[1].err("101")
        assert ends(stays) == 1, "the peer hung or did not notice"
        assert "Error" in hosts[0].err("101")
        again = hosts[1].member(
            "101", launcher.script("import torch.distributed as d; print(d.is_initialized())", "i.py")
        )
        assert ends(again) == 0 and hosts[1].out("101") == "False\n"
    finally:
        for host in hosts:
            host.close()
