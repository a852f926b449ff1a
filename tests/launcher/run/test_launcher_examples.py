"""The examples are real training scripts: they run, learn, have their bottleneck, and share one runtime."""

import json
import sys
from pathlib import Path

import own_time
import psutil
import pytest
from launcher_harness import Launcher, ends
from polling import until

from muri.profiler.dryrun.messages import DryRunRequest

EXAMPLES = Path(__file__).parents[3] / "examples"
BOTTLENECKS = {"storage": "load", "cpu": "preprocess", "gpu": "propagate", "network": "synchronize"}


@pytest.mark.parametrize(("kind", "bottleneck"), BOTTLENECKS.items())
def test_example_alone_has_its_bottleneck(launcher: Launcher, kind: str, bottleneck: str) -> None:
    result = launcher.folder / "result.json"
    request = DryRunRequest.from_environment({"MURI_DRY_RUN": "13:5", "MURI_DRY_RUN_RESULT": str(result)})
    assert request is not None
    command = [sys.executable, own_time.__file__, str(EXAMPLES / f"train_{kind}.py")]
    err = launcher.path(None, "err")
    process = launcher.spawn(command, launcher.environment | request.environment(), stderr=err.open("wb"))
    assert ends(process) == 0, err.read_text()
    times = json.loads(result.read_text())
    assert times[f"{bottleneck}_s"] > 0.5 * times["iteration_s"]
    assert times["iterations"] == 8


def test_four_examples_share_a_runtime(launcher: Launcher) -> None:
    launcher.threads("101", "102", "103", "104", options=("--preload", "torch"))
    jobs = dict(zip(("101", "102", "103", "104"), BOTTLENECKS, strict=True))
    own = {"network": {"MURI_ISOLATION": "process"}}  # it starts a process, which a thread may not
    members = [
        launcher.member(job, EXAMPLES / f"train_{kind}.py", "--iterations", 10, "--seed", job, **own.get(kind, {}))
        for job, kind in jobs.items()
    ]
    assert [ends(member) for member in members] == [0, 0, 0, 0], [launcher.err(job) for job in jobs]
    for job in jobs:
        lines = launcher.out(job).splitlines()
        assert lines[0].startswith("iteration 10 loss ")
        assert lines[1:] == ["done: 10 iterations"]


def test_peer_of_the_network_example_dies_with_a_killed_job(launcher: Launcher) -> None:
    launcher.runtime("101")
    job = launcher.member("101", EXAMPLES / "train_network.py", "--iterations", 100_000)
    launcher.says("101", "iteration")
    (peer,) = (one for one in psutil.Process(job.pid).children() if "network_peer.py" in " ".join(one.cmdline()))
    job.kill()
    until(lambda: not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE, "the end of the peer")
