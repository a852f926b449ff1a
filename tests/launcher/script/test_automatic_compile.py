"""`torch.compile` under hooks: the same graphs and the same losses as under plain Python."""

import sys
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends

pytest.importorskip("torch", reason="the scripts train with PyTorch")

COMPILED = """
    import os
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.nn.parallel import DistributedDataParallel

    rank, ranks = int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    graphs, traced = [], []
    torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _new: traced.append(code.co_filename))

    def backend(module, inputs):
        graphs.append([str(node.target).split(" at 0x")[0] for node in module.graph.nodes])
        return module.forward

    class Net(nn.Module):
        def __init__(self, breaks=False):
            super().__init__()
            self.breaks = breaks
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
            self.layers[2].register_forward_hook(lambda module, inputs, output: output * 1.5)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                if self.breaks:
                    torch._dynamo.graph_break()
            return x

    def tell(name, call):
        if sys.argv[4:] and name not in sys.argv[4:]:
            return
        compiled = torch.compile(call, backend=backend)
        results = [compiled(torch.randn(4, 8)) for _ in range(5)]
        hooks = [path for path in traced if "launcher/script" in path]
        breaks = sum(counters["graph_break"].values())
        sums = [each.double().sum().item() for each in results]
        os.write(1, f"{name} {len(graphs)} {breaks} {sums} {graphs} {hooks}\\n".encode())  # all at once
        for seen in (graphs, traced, *counters.values()):
            seen.clear()
        torch._dynamo.reset()

    def trained(compiles_all=False, breaks=False, spread=DistributedDataParallel):
        model = spread(Net(breaks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        forward = model if compiles_all else torch.compile(model, backend=backend)
        def step(x):
            loss = forward(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()
        return step if compiles_all else torch.compiler.disable(step, recursive=False)

    def gathers(x):
        parts = torch.empty(4 * ranks, 8)
        dist.all_gather_into_tensor(parts, x * 2)
        return parts + 1

    def reduces(x, **options):
        y = x * 2
        work = dist.all_reduce(y, **options)
        if work is not None:
            work.wait()
        return y + 1

    def broadcasts(x):
        y = x * 2
        dist.broadcast(y, 0)
        dist.barrier()
        return y + 1

    def makes(x):
        model = DistributedDataParallel(Net())
        model.register_comm_hook(None, allreduce_hook)
        model(x).sum().backward()
        return model.module.layers[0].weight.grad + 1

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed._functional_collectives import all_reduce
    tell("model", trained())
    tell("whole step", trained(compiles_all=True))
    tell("layers", Net())
    tell("broken", trained(compiles_all=True, breaks=True, spread=lambda model: model))
    tell("made", makes)
    tell("all_reduce", reduces)
    tell("maximum", lambda x: reduces(x, op=dist.ReduceOp.MAX))
    tell("asynchronous", lambda x: reduces(x, async_op=True))
    tell("all_gather", gathers)
    tell("broadcast", broadcasts)
    tell("functional", lambda x: all_reduce(x * 2, "sum", dist.group.WORLD) + 1)
    dist.barrier()
    os._exit(0)  # gloo now and then aborts a plain process that exits
"""
EACH_OFFER = """
    import muri.launcher.script.hooks as watch
    watch.YIELD_INTERVAL_S = 0.0  # so that each layer would offer to yield
"""


FEW = ("layers", "broken", "model", "all_reduce", "broadcast")


def run_plainly(launcher: Launcher, script: Path, ranks: int, *cases: str) -> list[str]:
    """What the script's ranks say without Muri."""
    for rank in range(ranks):
        command = [sys.executable, script, launcher.folder / "plain.store", rank, ranks, *cases]
        launcher.start(f"plain{rank}", command, launcher.environment)
    assert [ends(process) for process in launcher.processes] == [0] * ranks
    return [line for rank in range(ranks) for line in launcher.out(f"plain{rank}").splitlines()]


def test_what_a_member_compiles_is_what_it_is_alone(launcher: Launcher) -> None:
    plain = run_plainly(launcher, launcher.script(COMPILED, "plain.py"), 1, *FEW)
    assert {"layers 1 0", "all_reduce 1 0"} <= {line.partition(" [")[0] for line in plain}, "the test shows nothing"
    launcher.runtime("101")
    script = launcher.script(EACH_OFFER + COMPILED)
    assert launcher.ran("101", script, launcher.folder / "store", 0, 1, *FEW).splitlines() == plain
    assert "switched off" not in launcher.err("101")
    assert "launcher/script" not in launcher.err("101")


@pytest.mark.thorough
@pytest.mark.parametrize("compiler_comes_first", [True, False])
def test_a_compiled_network_is_what_it_is_alone(launcher: Launcher, *, compiler_comes_first: bool) -> None:
    launcher.warm = compiler_comes_first  # warm processes have imported it when the hooks come
    script = launcher.script(COMPILED)
    plain = run_plainly(launcher, script, 2)
    ranks = [launcher.member(None, "--timing", script, launcher.folder / "store", rank, 2) for rank in range(2)]
    assert [ends(process) for process in ranks] == [0, 0], launcher.err(None)
    assert sorted(launcher.out(None).splitlines()) == sorted(plain)
    assert "switched off" not in launcher.err(None)


def test_hooks_are_hidden_when_a_script_first_compiles_something(launcher: Launcher) -> None:
    """Scripts that only import the compiler, as optimizers do, would pay for it in every call."""
    launcher.warm = False  # the hooks come first, as in users' scripts
    script = launcher.script("""
        import torch
        import torch._dynamo
        from muri.launcher.script import compute, network, hooks
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert compute.begin_propagate is hooks.begin_propagate
        assert network._begin.__module__ == network.__name__ and not hasattr(network._begin, "__wrapped__")
        begun = torch._dynamo.eval_frame.OptimizeContext.__init__
        torch.compile(model, backend="eager")(torch.ones(1, 2))
        assert compute.begin_propagate is not hooks.begin_propagate
        hidden = compute.begin_propagate
        torch.compile(torch.nn.Linear(2, 1), backend="eager")(torch.ones(1, 2))
        assert compute.begin_propagate is hidden
        assert torch._dynamo.eval_frame.OptimizeContext.__init__ is begun.__wrapped__
    """)
    launcher.ran(None, "--timing", script)


def test_gradients_that_the_compiler_sends_stay_with_it(launcher: Launcher) -> None:
    """DDP's `python_reducer` hands single gradients over, no buckets."""
    script = launcher.script("""
        import os
        import torch
        import torch.distributed as dist
        torch._dynamo.config.optimize_ddp = "python_reducer"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        torch.compile(model, backend="eager")(torch.ones(3, 2)).sum().backward()
        os.write(1, f"{model.module.weight.grad.tolist()}".encode())
        os._exit(0)
    """)
    assert launcher.ran(None, "--timing", script) == "[[3.0, 3.0]]"
