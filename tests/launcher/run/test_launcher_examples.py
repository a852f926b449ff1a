"""The examples are real training scripts: they run, learn, have their bottleneck, and share one runtime."""

import json
from pathlib import Path

import psutil
import pytest
from launcher_harness import Launcher, ends, until

EXAMPLES = Path(__file__).parents[3] / "examples"
BOTTLENECKS = {"storage": "load", "cpu": "preprocess", "gpu": "propagate", "network": "synchronize"}


@pytest.mark.parametrize("kind", BOTTLENECKS)
def test_example_is_short(kind: str) -> None:
    assert len((EXAMPLES / f"train_{kind}.py").read_text().splitlines()) < 80


@pytest.mark.parametrize(("kind", "bottleneck"), BOTTLENECKS.items())
def test_example_alone_has_its_bottleneck(launcher: Launcher, kind: str, bottleneck: str) -> None:
    result = launcher.folder / "result.json"
    variables = {"MURI_DRY_RUN": "25:5", "MURI_DRY_RUN_RESULT": str(result)}
    assert ends(launcher.member(None, EXAMPLES / f"train_{kind}.py", **variables)) == 0, launcher.err(None)
    times = json.loads(result.read_text())
    # On a quiet machine it takes more than half of the iteration; on a busy one the others take longer, too.
    assert max(BOTTLENECKS.values(), key=lambda stage: times[f"{stage}_s"]) == bottleneck
    assert times["iterations"] == 20


def test_four_examples_share_a_runtime(launcher: Launcher) -> None:
    runtime = launcher.runtime("101", "102", "103", "104", options=("--preload", "torch"))
    jobs = dict(zip(("101", "102", "103", "104"), BOTTLENECKS, strict=True))
    members = [
        launcher.member(job, EXAMPLES / f"train_{kind}.py", "--iterations", 20, "--seed", job)
        for job, kind in jobs.items()
    ]
    assert [ends(member) for member in members] == [0, 0, 0, 0], [launcher.err(job) for job in jobs]
    for job in jobs:
        lines = launcher.out(job).splitlines()
        assert [line.split()[:2] for line in lines[:2]] == [["iteration", "10"], ["iteration", "20"]]
        assert lines[2:] == ["done: 20 iterations"]
    until(lambda: not peers(psutil.Process(runtime.pid)), "the end of the network example's peer")


def peers(runtime: psutil.Process) -> list[psutil.Process]:
    """The other ends of network examples, among the runtime's children."""
    return [child for child in runtime.children() if "network_peer.py" in _command_line(child)]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it ended between the two questions
        return ""


def test_peer_of_the_network_example_dies_with_a_killed_job(launcher: Launcher) -> None:
    launcher.runtime("101", options=("--preload", "torch"))
    job = launcher.member("101", EXAMPLES / "train_network.py", "--iterations", 100_000)
    until(lambda: "iteration" in launcher.out("101"), "the first iterations")
    runtime = psutil.Process(launcher.status()["pid"])
    assert peers(runtime)
    job.kill()
    until(lambda: not peers(runtime), "the end of the peer")
