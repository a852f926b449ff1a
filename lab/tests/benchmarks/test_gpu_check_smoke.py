"""The GPU check's parts run in tiny sizes, with the packages of a lent machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muri_lab.benchmarks.gpu_check import page, training
from muri_lab.benchmarks.gpu_check.parts import PARTS

ROOT = Path(__file__).parents[3]
NO_SUCH_PYTHON = 3
ISOLATIONS = ("process", "thread")


def run_check(python: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run `scripts/gpu-check` under a Python."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MURI_", "PYTHON"))}
    command = [str(ROOT / "scripts" / "gpu-check"), *options]
    return subprocess.run(command, env=kept | {"PYTHON": python}, capture_output=True, text=True, check=False)


def python_with_little(version: str) -> str:
    """A Python that has what the check needs and nothing else."""
    command = [str(ROOT / "scripts" / "make-gpu-check-venv"), version]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode == NO_SUCH_PYTHON:
        pytest.skip(f"there is no Python {version} here")
    assert made.returncode == 0
    return made.stdout.strip()


def losses(found: dict[str, Any]) -> None:
    for isolation in ISOLATIONS:
        assert all(each["same"] and each["iterations"] >= 5 for each in found[isolation]["members"].values())


def stages(found: dict[str, Any]) -> None:
    assert found["alone"]["vgg16"]["stage_s"]["synchronize"] > 0


def throughput(found: dict[str, Any]) -> None:
    ways = {way: result for name in training.SETS for way, result in found.get(name, {"ways": {}})["ways"].items()}
    assert all(result["total"] > 0 for way, result in ways.items() if way != "mps")
    assert "mps" not in ways or training.mps_control() or "not installed" in ways["mps"]["error"]


def errors(found: dict[str, Any]) -> None:
    processes, threads = (found[isolation] for isolation in ISOLATIONS)
    assert [processes[kind]["exit_code"] for kind in ("memory", "access")] == [1, 1]
    for told in (processes["memory"], processes["access"], threads["memory"]):
        assert all(partner["exit_code"] is None for partner in told["partners"].values())
    assert processes["partners_have_same_losses"]
    assert "illegal memory access" in threads["access"]["fault"]["cause"]
    requeued = [threads["access"], *threads["access"]["partners"].values()]
    assert [each["exit_code"] for each in requeued] == [75] * len(requeued)


def demo(found: dict[str, Any]) -> None:
    assert {"one by one", "with Muri"} & found.keys()


def hand_over(found: dict[str, Any]) -> None:
    for isolation in ISOLATIONS:
        assert found[isolation]["count"] >= 1
        assert found[isolation]["overlapping"] == 0


def nvml(found: dict[str, Any]) -> None:
    assert {"unreadable", "members"} & found.keys()


REQUIRE: dict[str, Callable[[dict[str, Any]], None]] = {
    "losses": losses, "stages": stages, "throughput": throughput, "errors": errors, "demo": demo,
    "hand-over": hand_over, "nvml": nvml, "memory": lambda _found: None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("3.11", ("losses",)),
        ("3.11", ("hand-over", "nvml")),
        pytest.param("3.11", tuple(PARTS), marks=pytest.mark.thorough),
        pytest.param("3.12", tuple(PARTS), marks=pytest.mark.thorough),
    ],
)
def test_parts_run_in_tiny_sizes(version: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--smoke", "--out", str(tmp_path), "--commit", "abc1234", "--parts", *parts)
    done = run_check(python_with_little(version), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    files = {PARTS[part].file for part in parts}
    assert {path.name for path in tmp_path.iterdir()} == {f"gpu-{name}.json" for name in files}
    for name in files:
        figures = json.loads((tmp_path / f"gpu-{name}.json").read_text())
        assert (figures["gpu"], figures["machine"]["commit"]) == (None, "abc1234")
        assert not [key for key in figures if key.startswith("failed")], name
        assert page.lines_of(name, figures) or name == "memory"  # where NVML tells nothing, there is nothing to say
        REQUIRE[name](figures)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path: Path) -> None:
    done = run_check(sys.executable, "--out", str(tmp_path))
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert "finds no GPU" in done.stderr
    assert "--smoke" in done.stderr
