"""A member's losses in a group are those of its solo run, bit for bit, whatever the others do."""

import json
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends

pytest.importorskip("torch", reason="the members train with PyTorch")

TRAIN = """
    import argparse, random
    import numpy as np
    import torch
    from torch import nn
    import muri

    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--recurrent", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    random.seed(options.seed); np.random.seed(options.seed); torch.manual_seed(options.seed)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, index):
            noise = np.random.rand(6).astype(np.float64) + random.random() + torch.rand(1).item()
            return torch.full((6,), index / 48, dtype=dtype) + torch.from_numpy(noise).to(dtype)

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head = nn.LSTM(2, 16, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(16, 1)
        def forward(self, inputs):
            return self.head(self.cells(inputs.view(-1, 3, 2))[0][:, -1])

    model = Recurrent() if options.recurrent else nn.Sequential(
        nn.Linear(6, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 1))
    model.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=6, shuffle=True)
    for epoch in range(3):
        for batch in muri.batches(loader):
            with muri.stage("propagate"):
                batch = torch.native_dropout(batch, 0.1, True)[0] + torch.randn_like(batch) * 0.1
                loss = ((model(batch) - batch.mean(dim=1, keepdim=True)) ** 2).mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(loss.dtype, loss.item().hex(), random.random(), np.random.randint(1000), flush=True)
    print("end", torch.rand(2, dtype=dtype).tolist(), dtype)
"""

MEMBERS = {
    "101": ("--seed=1",),
    "102": ("--seed=2", "--recurrent"),
    "103": ("--seed=3", "--dtype=float64"),
    "104": ("--seed=1", "--dtype=float64", "--recurrent"),
}


def _solo(launcher: Launcher, script: Path) -> dict[str, str]:
    outputs = {}
    for member, arguments in MEMBERS.items():
        launcher.path(None, "out").unlink(missing_ok=True)
        outputs[member] = launcher.ran(None, script, *arguments)
    return outputs


def test_losses_in_groups_of_two_and_four_are_those_of_the_solo_runs(launcher):
    script = launcher.script(TRAIN)
    solo = _solo(launcher, script)
    assert len(set(solo.values())) == len(MEMBERS)
    for group in (("101", "102"), tuple(MEMBERS)):
        runtime = launcher.threads(*group)
        running = [launcher.member(member, script, *MEMBERS[member]) for member in group]
        codes = [ends(process) for process in running]
        assert codes == [0] * len(group), [launcher.err(member) for member in group]
        for member in group:
            assert launcher.out(member) == solo[member], f"member {member} in a group of {len(group)}"
            launcher.path(member, "out").unlink()
        runtime.terminate()
        ends(runtime)


def test_a_fresh_session_starts_with_seeds_of_its_own(launcher):
    script = launcher.script("""
        import json, random, numpy, torch
        print(json.dumps([random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()]))
    """)
    launcher.threads("101", "102", "103")
    drawn = [json.loads(launcher.ran(member, script)) for member in ("101", "102", "103")]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 3, "a later member went on with an earlier one's generator"


def test_a_seed_of_one_member_never_reaches_another_that_draws_dropout(launcher):
    script = launcher.script("""
        import sys, torch
        if sys.argv[1:] == ["seeds"]:
            for seed in range(30000):
                torch.manual_seed(seed)
        else:
            torch.manual_seed(1)
            ones = torch.ones(8)
            print([int(torch.native_dropout(ones, 0.5, True)[1].sum()) for _ in range(20000)])
        """)
    alone = launcher.ran(None, script)
    launcher.threads("101", "102")
    running = [launcher.member("101", script), launcher.member("102", script, "seeds")]
    assert [ends(process) for process in running] == [0, 0], [launcher.err("101"), launcher.err("102")]
    assert launcher.out("101") == alone


def test_functions_around_the_default_generator_are_as_alone(launcher):
    script = launcher.script("""
        import torch
        from torch.utils.data import random_split
        torch.manual_seed(5)
        state = torch.get_rng_state()
        drawn = torch.rand(3).tolist()
        torch.set_rng_state(state)
        print(torch.initial_seed(), torch.rand(3).tolist() == drawn, drawn)
        print([list(part.indices) for part in random_split(range(10), [5, 5])], torch.rand(1).item())
        with torch.random.fork_rng(devices=[]):
            print(torch.manual_seed(9).initial_seed(), torch.rand(1).item())
        print(torch.rand(1).item(), torch.seed() == torch.initial_seed() == torch.default_generator.initial_seed())
    """)
    alone = launcher.ran(None, script)
    launcher.threads("101")
    assert launcher.ran("101", script) == alone
