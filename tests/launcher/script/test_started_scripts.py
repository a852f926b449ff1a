"""Scripts that torchrun and `accelerate launch` start are measured in their own processes."""

import sys
from types import SimpleNamespace

import pytest
from launcher_harness import Launcher

from muri.launcher.job.environment import AGENT_VARIABLE
from muri.launcher.script.solo import RUNNER, _reach_accelerate, _reach_ranks, under_runner

PYTHON = sys.executable
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([PYTHON, "-u", "train.py", "--lr", "1"], [PYTHON, "-u", *RUNNER, "train.py", "--lr", "1"]),
        ([PYTHON, "-u", "-m", "package.train", "x"], [PYTHON, "-u", *RUNNER, "-m", "package.train", "x"]),
        *[(as_it_is, as_it_is) for as_it_is in ([PYTHON, "-c", "print()"], [PYTHON, "-u"], ["/other/python", "a.py"])],
    ],
)
def test_runner_comes_before_the_script(command: list[str], expected: list[str]) -> None:
    assert under_runner(command) == expected


def test_what_torchrun_calls_itself_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_VARIABLE, raising=False)
    seen: list[object] = []
    api = SimpleNamespace(launch_agent=lambda *args, **named: seen.append((*args, named)))
    _reach_ranks(api)
    api.launch_agent("config", print, ["script.py"])
    api.launch_agent("config", "./train.sh", ["script.py"], health_check_server=None)
    assert seen == [("config", print, ["script.py"], {}),
                    ("config", "./train.sh", ["script.py"], {"health_check_server": None})]  # fmt: skip


def test_accelerate_starts_the_script_under_the_runner() -> None:
    launch = SimpleNamespace(prepare_simple_launcher_cmd_env=lambda args: ([PYTHON, "train.py", *args], {"A": "1"}))
    _reach_accelerate(launch)
    assert launch.prepare_simple_launcher_cmd_env(["x"]) == ([PYTHON, *RUNNER, "train.py", "x"], {"A": "1"})


RANKS = """
    import sys
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for batch in torch.utils.data.DataLoader(torch.ones(400, 64), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
        steps += 1
    # One write: torchrun's ranks have no buffer, and print would write each of its words and the end of the line.
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {steps} {sys.argv} {__name__}\\n")
    dist.destroy_process_group()
"""


def test_ranks_of_torchrun_are_measured(launcher: Launcher) -> None:
    script = launcher.script(RANKS)
    said = [f"rank {rank} of 2: 50 ['{script}', '--x'] __main__" for rank in (0, 1)]
    assert sorted(launcher.ran(None, "--timing", *TORCHRUN, script, "--x", **ENVIRONMENT).splitlines()) == said
    lines = launcher.err(None).splitlines()
    heads = sorted(line.split(", the last")[0] for line in lines if "iterations, the last" in line)
    assert heads == [f"muri: rank {rank}, 50 iterations" for rank in (0, 1)]
    held = [float(line.split()[2]) for line in lines if line.startswith("muri:   synchronize")]
    assert len(held) == 2
    assert min(held) > 0


def test_dry_run_ends_all_ranks(launcher: Launcher) -> None:
    """Rank 0 measures; the others would wait for its next all-reduce."""
    _code, times = launcher.dry_run("8:3", *TORCHRUN, launcher.script(RANKS), **ENVIRONMENT)
    assert "error" not in times
    assert times["propagate_s"] > 0
    assert sum(times[f"{stage}_s"] for stage in ("load", "preprocess", "propagate", "synchronize")) <= (
        times["iteration_s"] * (1 + 1e-9)
    )
    assert "rank" not in launcher.out(None)  # no rank went on to its end
