"""`torch.compile` under hooks: the same graphs and the same losses as under plain Python."""

import subprocess
import sys

import pytest
from launcher_harness import Launcher, ends
from warm_start import ONE_THREAD

pytest.importorskip("torch", reason="the scripts train with PyTorch")

COMPILED = """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.relu(self.linear(self.norm(x)))

    class Net(nn.Module):
        def __init__(self, breaks):
            super().__init__()
            self.breaks = breaks
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 1)
            self.blocks[1].register_forward_hook(lambda module, inputs, output: output * 1.5)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                if self.breaks:
                    torch._dynamo.graph_break()
            return self.last(x)

    torch.manual_seed(int(sys.argv[1]))
    model, broken = Net(False), Net(True)
    optimizer = torch.optim.SGD([*model.parameters(), *broken.parameters()], lr=0.01)

    def step(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())

    compiled = torch.compile(model, backend="eager")
    whole = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    for train in (compiled, whole):
        for _ in range(3):
            step(train(torch.randn(4, 8)).square().mean())
    from torch._dynamo.utils import counters
    print(dict(counters["graph_break"]), dict(counters["frames"]), counters["stats"]["unique_graphs"])
    compiled = torch.compile(broken, backend="eager")
    whole = torch.compile(lambda x: step(broken(x).square().mean()), backend="eager")
    for _ in range(3):
        step(compiled(torch.randn(4, 8)).square().mean())
    for _ in range(3):
        whole(torch.randn(4, 8))
    print(sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"])
"""
EACH_OFFER = """
    import muri.launcher.automatic.watch as watch
    watch.YIELD_INTERVAL_S = 0.0  # so that each layer would offer to yield
"""


def test_compiled_models_give_what_they_give_alone(launcher: Launcher) -> None:
    plain_script, script = launcher.script(COMPILED, "plain.py"), launcher.script(EACH_OFFER + COMPILED)
    launcher.runtime("101", "102")
    members = [launcher.member(job, script, seed) for job, seed in (("101", 1), ("102", 2))]
    plain = [
        subprocess.run([sys.executable, plain_script, seed], env=launcher.environment | ONE_THREAD, check=True,
                       capture_output=True, text=True)
        for seed in ("1", "2")
    ]  # fmt: skip
    assert [ends(member) for member in members] == [0, 0], launcher.err("101")
    assert [launcher.out(job) for job in ("101", "102")] == [each.stdout for each in plain]
    assert "{} {'total': 2, 'ok': 2} 2" in plain[0].stdout, "no graph is split, or the test shows nothing"
    for job in ("101", "102"):
        assert "Dynamo does not know how to trace" not in launcher.err(job)
        assert "launcher/automatic" not in launcher.err(job)
    assert ends(launcher.member(None, "--timing", script, "1")) == 0
    assert launcher.out(None) == plain[0].stdout
