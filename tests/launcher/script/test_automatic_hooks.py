"""Hooks at work in scripts that run alone: loaders, failures, explicit stages, DDP."""

import sys

import own_time
import pytest
from launcher_harness import Launcher, ends

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

LOADERS = """
    import sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset
    from muri.launcher.script.script_clock import current_clock

    READ_S, TRANSFORM_S = 0.002, 0.003

    def slow(sample):
        time.sleep(TRANSFORM_S)
        return sample

    class Samples(Dataset):
        def __init__(self, transform=None):
            self.transform = transform
        def __len__(self):
            return 16
        def __getitem__(self, index):
            time.sleep(READ_S)
            if index == 99:
                raise LookupError("no such sample")
            sample = torch.zeros(4)
            return self.transform(sample) if self.transform else sample

    class Stream(IterableDataset):
        def __iter__(self):
            for _ in range(16):
                time.sleep(READ_S)
                yield torch.zeros(4)

    def main():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(batch):
            model(batch).sum().backward()
            optimizer.step()

        def measured(name, loop):
            clock = current_clock()
            count, before = clock.iterations, list(clock.stage_s)
            loop()
            load, preprocess = (after - earlier for after, earlier in zip(clock.stage_s[:2], before[:2]))
            print(name, clock.iterations - count, round(load, 4), round(preprocess, 4), flush=True)

        def each(loader, epochs=1):
            def loop():
                for _ in range(epochs):
                    for batch in loader:
                        train(batch)
            return loop

        def by_hand():
            iterator = iter(DataLoader(Samples(), batch_size=4))
            for _ in range(4):
                train(next(iterator))
            try:
                next(iterator)
            except StopIteration:
                pass

        def failing():
            loader = DataLoader(Samples(), batch_size=4, sampler=[0, 1, 2, 3, 99])
            try:
                each(loader)()
            except LookupError as error:
                assert str(error) == "no such sample"
            else:
                raise AssertionError

        def left():
            for _ in range(2):
                for number, batch in enumerate(DataLoader(Samples(), batch_size=4)):
                    train(batch)
                    if number == 1:
                        break

        def in_this_process():
            measured("map", each(DataLoader(Samples(slow), batch_size=4)))
            measured("iterable", each(DataLoader(Stream(), batch_size=4)))
            measured("unbatched", each(DataLoader(Samples(), batch_size=None)))
            measured("by_hand", by_hand)
            measured("failing", failing)
            measured("left", left)

        def in_workers():
            measured("forked", each(DataLoader(Samples(slow), batch_size=4, num_workers=2)))
            keeping = DataLoader(Samples(slow), batch_size=4, num_workers=1, persistent_workers=True, prefetch_factor=3)
            measured("persistent", each(keeping, epochs=2))
            spawned = DataLoader(Samples(slow), batch_size=4, num_workers=1, multiprocessing_context="spawn")
            measured("spawned", each(spawned))
            assert isinstance(keeping.dataset.transform, type(slow))

        train(torch.zeros(1, 4))
        in_workers() if "workers" in sys.argv else in_this_process()

    if __name__ == "__main__":
        main()
"""
SAMPLE_READ_S, SAMPLE_TRANSFORM_S = 0.002, 0.003
HERE = {  # iterations, samples read here or in workers, samples transformed, workers
    "map": (4, 16, 16, 1),
    "iterable": (4, 16, 0, 1),
    "unbatched": (16, 16, 0, 1),
    "by_hand": (4, 16, 0, 1),
    "failing": (1, 4, 0, 1),
    "left": (3, 16, 0, 1),  # the last of four ends when the next loop asks
}
WORKERS = {
    "forked": (4, 16, 16, 2),
    "persistent": (8, 32, 32, 1),
    "spawned": (4, 0, 0, 1),
}


def test_loaders_in_the_scripts_own_process(launcher: Launcher) -> None:
    command = [sys.executable, own_time.__file__, launcher.script(LOADERS)]
    environment = launcher.environment | ENVIRONMENT | {"MURI_TIMING": "1"}
    assert ends(launcher.start(None, command, environment)) == 0, launcher.err(None)
    require(launcher, HERE)


def test_loaders_with_workers(launcher: Launcher) -> None:
    launcher.ran(None, "--timing", launcher.script(LOADERS), "workers", **ENVIRONMENT)
    require(launcher, WORKERS)


def require(launcher: Launcher, expected: dict[str, tuple[int, int, int, int]]) -> None:
    """What the script measured must be what its loaders did."""
    assert "switched off" not in launcher.err(None)
    lines = {line.split()[0]: line.split()[1:] for line in launcher.out(None).splitlines()}
    assert lines.keys() == expected.keys(), launcher.err(None)
    for name, (iterations, read, transformed, workers) in expected.items():
        got_iterations, load_s, preprocess_s = int(lines[name][0]), float(lines[name][1]), float(lines[name][2])
        assert got_iterations == iterations, name
        assert load_s >= 0.9 * read * SAMPLE_READ_S / workers, name
        assert preprocess_s >= 0.9 * transformed * SAMPLE_TRANSFORM_S / workers, name
        if not transformed:
            assert preprocess_s <= 0.5 * load_s, name


@pytest.mark.parametrize(("options", "variables"), [(["--no-automatic"], {}), ([], {"MURI_AUTOMATIC": "0"})])
def test_hooks_can_be_left_out(launcher: Launcher, options: list[str], variables: dict[str, str]) -> None:
    launcher.warm = False  # where `muri run` has imported them before it became the script
    script = launcher.script("import sys; sys.exit('muri.launcher.script.hooks' in sys.modules)")
    launcher.ran(None, "--timing", *options, script, **variables)


def test_own_stages_of_the_script_win(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch, muri
        from muri.launcher.script.script_clock import current_clock
        model = torch.nn.Linear(2, 1)
        for batch in torch.utils.data.DataLoader([torch.ones(2)] * 5, batch_size=1):
            with muri.stage("preprocess"):
                pass
            model(batch).sum().backward()
        clock = current_clock()
        held = dict(zip(("load", "preprocess", "propagate", "synchronize"), clock.stage_s))
        print(clock.iterations, held["propagate"], held["preprocess"] > 0)
    """)
    assert launcher.ran(None, "--timing", script).split() == ["4", "0.0", "True"]


def test_hook_that_fails_is_reported_once_and_the_script_goes_on(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch
        from muri.launcher.job.stage_clock import StageClock
        def broken(*_): raise RuntimeError("broken on purpose")
        StageClock.enter = broken
        model = torch.nn.Linear(2, 1)
        for batch in torch.utils.data.DataLoader([torch.ones(2)] * 3, batch_size=1):
            model(batch).sum().backward()
        print("done")
    """)
    assert launcher.ran(None, "--timing", script) == "done\n"
    reports = [line for line in launcher.err(None).splitlines() if "switched off" in line]
    failed = sorted(line.split(" for ")[1].split(" failed")[0] for line in reports)
    assert failed == ["DataLoader", "backward", "forward"]


def test_compiled_traced_and_functional_code_still_works(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch
        from torch.utils.checkpoint import checkpoint
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        x = torch.ones(3, 2)
        plain = model(x)
        assert torch.equal(torch.compile(model, backend="eager")(x), plain)
        assert torch.equal(torch.jit.trace(model, x)(x), plain)
        assert torch.equal(torch.fx.symbolic_trace(model)(x), plain)
        values = dict(model.named_parameters())
        torch.func.grad(lambda p: torch.func.functional_call(model, p, x).sum())(values)
        checkpoint(model, x, use_reentrant=False).sum().backward()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss
        optimizer.step(closure)
        scaler = torch.amp.GradScaler("cpu")
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler.scale(model(x).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        print("done")
    """)
    assert launcher.ran(None, "--timing", script, **ENVIRONMENT) == "done\n"
    assert "switched off" not in launcher.err(None)


DATA_PARALLEL = """
    import hashlib, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(32, 300), nn.BatchNorm1d(300)
            self.second, self.last = nn.Linear(300, 300), nn.Linear(300, 1)
            self.seldom = nn.Linear(300, 300)
        def forward(self, inputs, use):
            hidden = self.second(self.norm(self.first(inputs)).relu())
            return self.last(hidden + self.seldom(hidden) if use else hidden)

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(sys.argv[1], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for case in ("plain", "unused", "static", "view", "accumulate", "hook", "builtin"):
        torch.manual_seed(0)
        options = {"unused": {"find_unused_parameters": True}, "static": {"static_graph": True},
                   "view": {"gradient_as_bucket_view": True}}.get(case, {})
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.05, **options)
        if case == "hook":
            model.register_comm_hook(None, fp16_compress_hook)
        if case == "builtin":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        generator = torch.Generator().manual_seed(rank)
        for step in range(6):
            inputs = torch.randn(16, 32, generator=generator)
            use = case != "unused" or (step + rank) % 2 == 0
            if case == "accumulate" and step % 3:
                with model.no_sync():
                    model(inputs, use).square().mean().backward()
                continue
            outputs = model(inputs, use)
            outputs.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = outputs.detach().mean()
            dist.all_reduce(mean)
            dist.all_reduce(mean, async_op=True).wait()
            everyone = [torch.zeros(()) for _ in range(ranks)]
            dist.all_gather(everyone, mean)
        content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        if rank == 0:
            print(case, hashlib.sha256(content).hexdigest(), mean.item(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""
RANKS = 3  # dividing by three is inexact: a division done otherwise would show


def test_data_parallel_training_is_bitwise_the_same(launcher: Launcher) -> None:
    script = launcher.script(DATA_PARALLEL)
    plain = {k: v for k, v in launcher.environment.items() if not k.startswith("MURI_")} | ENVIRONMENT
    results = []
    for runner, variables in (([], {}), (["-m", "muri.launcher.script.solo"], {"MURI_TIMING": "1"})):
        place = f"{len(results)}.store"
        command = [sys.executable, *runner, script, place]
        environment = plain | variables | {"WORLD_SIZE": str(RANKS)}
        ranks = [
            launcher.start(f"{len(results)}.{rank}", command, environment | {"RANK": str(rank)})
            for rank in range(RANKS)
        ]
        assert [ends(process) for process in ranks] == [0] * RANKS, launcher.err(f"{len(results)}.0")
        results.append(launcher.out(f"{len(results)}.0"))
    assert len(results[0].splitlines()) == 7
    assert results[1] == results[0]
    report = launcher.err("1.0")
    assert "switched off" not in report
    seconds = {line.split()[1]: float(line.split()[2]) for line in report.splitlines() if line.startswith("muri:   ")}
    assert min(seconds["synchronize"], seconds["propagate"]) > 0
