"""The GPU check in tiny sizes, with the packages of a lent machine, and the sentences about its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu_check import page, training
from benchmarks.gpu_check.check import Check, Figures
from benchmarks.gpu_check.device import gaps
from benchmarks.gpu_check.parts import PARTS, start_part
from benchmarks.runtime_process import BenchmarkError

ROOT = Path(__file__).parents[3]
NO_SUCH_PYTHON = 3


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


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_every_part_runs_in_tiny_sizes(version: str, tmp_path: Path) -> None:
    done = run_check(python_with_little(version), "--smoke", "--out", str(tmp_path), "--commit", "abc1234")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: json.loads((tmp_path / f"gpu-{name}.json").read_text()) for name in page.FILES}
    assert {path.name for path in tmp_path.iterdir()} == {f"gpu-{name}.json" for name in page.FILES}
    for name, figures in found.items():
        assert (figures["gpu"], figures["machine"]["commit"]) == (None, "abc1234")
        assert not [key for key in figures if key.startswith("failed")], name
        assert page.lines_of(name, figures) or name == "memory"  # where NVML tells nothing, there is nothing to say

    for isolation in ("process", "thread"):
        members = found["losses"][isolation]["members"]
        assert all(each["same"] and each["iterations"] >= 5 for each in members.values())
        assert found["hand-over"][isolation]["count"] >= 1
        assert found["hand-over"][isolation]["overlapping"] == 0
    assert found["stages"]["in_place"]["vgg16"]["stage_s"]["synchronize"] > 0
    throughput = found["throughput"]
    ways = {(name, way): result for name in training.SETS for way, result in throughput[name]["ways"].items()}
    assert all(result["total"] > 0 for (_, way), result in ways.items() if way != "mps")
    assert training.mps_control() or "not installed" in ways["gpu-bound", "mps"]["error"]

    processes, threads = found["errors"]["process"], found["errors"]["thread"]
    assert [processes[kind]["exit_code"] for kind in ("memory", "access")] == [1, 1]
    for told in (processes["memory"], processes["access"], threads["memory"]):
        assert all(partner["exit_code"] is None for partner in told["partners"].values())
    assert processes["partners_have_same_losses"]
    assert "illegal memory access" in threads["access"]["fault"]["cause"]
    requeued = [threads["access"], *threads["access"]["partners"].values()]
    assert [each["exit_code"] for each in requeued] == [75] * len(requeued)
    assert {"unreadable", "members"} & found["nvml"].keys()
    assert {"one by one", "with Muri"} <= found["demo"].keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path: Path) -> None:
    done = run_check(sys.executable, "--out", str(tmp_path))
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert "finds no GPU" in done.stderr
    assert "--smoke" in done.stderr


def test_without_its_packages_it_names_them_and_the_python(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    done = run_check(str(bare / "bin" / "python"), "--smoke", "--out", str(tmp_path / "out"))
    lacks = f"gpu-check: {bare}/bin/python lacks torch, psutil, numpy, scipy, click, rich; PYTHON="
    assert (done.returncode, done.stderr[: len(lacks)]) == (1, lacks)


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    check = Check(tmp_path, tmp_path, smoke=True, head={"begun": "now"})
    assert not start_part(check, "hand-over", 0.0)
    assert not start_part(check, "hand-over", 2.0)
    left = [each.cmdline() for each in psutil.Process().children(recursive=True)]
    assert not [command for command in left if str(tmp_path) in " ".join(command)]


def test_parts_of_a_run_share_a_file_and_another_run_begins_it_anew(tmp_path: Path) -> None:
    first = Check(tmp_path, tmp_path, smoke=True, head={"begun": "first", "gpu": "H100"})
    Figures(first, "demo").add("one by one", 1)
    Figures(first, "demo").add("with Muri", 2)
    assert first.earlier("demo") == {"begun": "first", "gpu": "H100", "one by one": 1, "with Muri": 2}
    second = Check(tmp_path, tmp_path, smoke=True, head={"begun": "second"})
    assert second.earlier("demo") == {}
    Figures(second, "demo").add("with Muri", 3)
    assert json.loads((tmp_path / "gpu-demo.json").read_text()) == {"begun": "second", "with Muri": 3}


def test_what_cannot_be_measured_costs_nothing_else(tmp_path: Path) -> None:
    def fail() -> None:
        raise BenchmarkError("no GPU changed hands")

    figures = Figures(Check(tmp_path, tmp_path, smoke=True, head={"begun": "now"}), "hand-over")
    figures.add_measured("process", fail)
    figures.add_measured("thread", lambda: 2)
    found = json.loads((tmp_path / "gpu-hand-over.json").read_text())
    assert figures.failed
    assert found == {"begun": "now", "failed: process": "no GPU changed hands", "thread": 2}


def test_parts_that_need_each_model_alone_say_so(tmp_path: Path) -> None:
    check = Check(tmp_path, tmp_path, smoke=True, head={"begun": "now"})
    with pytest.raises(BenchmarkError, match="`stages` has to be run before"):
        PARTS["bottlenecks"].run(check, Figures(check, "throughput"))


def test_losses_differ_in_any_digit() -> None:
    assert training.compared([1.0, 0.5, 0.25], [1.0, 0.5]) == {
        "iterations": 2, "same": True, "first_difference": None, "largest_difference": 0.0,
    }  # fmt: skip
    found = training.compared([1.0, 0.5], [1.0, 0.5 + 2**-53])
    assert (found["same"], found["first_difference"], found["largest_difference"]) == (False, 1, 2**-53)
    with pytest.raises(BenchmarkError, match="no losses"):
        training.compared([], [1.0])


def test_hand_overs_are_changes_of_the_member() -> None:
    first = [(0, 2_000), (2_010, 4_000), (6_400, 8_000)]
    second = [(4_300, 6_000), (7_900, 9_000)]
    found = gaps([first, second])  # 4,000 to 4,300; 6,000 to 6,400; 8,000 to 7,900
    assert found == {"count": 3, "p50_us": 0.3, "p99_us": 0.3, "overlapping": 1}
    assert gaps([first])["count"] == 2  # of one member, all
    with pytest.raises(BenchmarkError, match="never changed hands"):
        gaps([first, []])


def test_bound_of_the_linear_program() -> None:
    shares = [(0.0, 1.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.8, 0.2)]
    assert training.lp_bound(shares, 1) == pytest.approx(2.0)
    assert training.lp_bound(shares, 2) == pytest.approx(3.0)


def result(**figures: Any) -> dict[str, Any]:
    """A result as from a machine with a GPU."""
    return {
        "gpu": "NVIDIA H100",
        "torch": "2.11.0",
        "begun": "2026-11-27T01:02:03Z",
        "machine": {"commit": "abc1234"},
    } | figures


def test_pages_are_as_the_stored_results_say() -> None:
    results = page.stored()
    for name in page.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert page.renewed(name, text, results) == text, "run python -m benchmarks.gpu_check.page"


def test_pages_tell_what_was_measured_and_nothing_else() -> None:
    members = {
        "gpt2": {"iterations": 40, "same": False, "first_difference": 3, "largest_difference": 0.125, "speed": 0.5}
    }
    losses = result(process={"members": members, "total": 0.5}, **{"failed: losses": "BenchmarkError: no"})
    text = page.marked("docs/gpu.md", {"losses": losses, "memory": result(context_mib=[510.0, 498.4])})
    assert "measured on one GPU** (NVIDIA H100, PyTorch 2.11.0, commit abc1234)" in text
    assert "gpt2 DIFFERS from iteration 4 on, by 0.12 at most" in text
    assert "FAILED: losses: BenchmarkError: no" in text
    assert "CUDA context number 2: 498 MiB" in text
    assert "threads" not in text
    assert "NVIDIA H100" in page.marked("README.md", {"losses": losses})
    assert "Nothing has run on a GPU yet" in page.marked("README.md", {})


def test_errors_of_stage_times_are_shares_of_the_iteration() -> None:
    alone = {"iteration_s": 0.1, "stage_s": {"load": 0.02, "propagate": 0.06}, "profiler_s": {"kernels": 0.05}}
    hooks_s = {"load": 0.03, "preprocess": 0.01, "propagate": 0.055, "synchronize": 0.0, "iteration": 0.11}
    found = training._against(alone, hooks_s)
    assert found["errors"] == pytest.approx({"load": 0.1, "preprocess": 0.1, "propagate": -0.05, "synchronize": 0.0})
    assert (found["iteration_error"], found["profiler_error"]) == pytest.approx((0.1, 0.05))
    lines = page.lines_of("stages", result(alone={"gpt2": alone}, hooks={"gpt2": found}, in_place={"gpt2": None}))
    assert "gpt2 alone, kernels by torch.profiler: 50.0 ms" in lines
    assert "propagate of gpt2 by hooks, alone, less the profiler's kernels: +5.0%" in lines
    assert "gpt2 in place, in company: not measured in time" in lines
    without = training._against(alone | {"profiler_s": {"kernels": 0.0}}, hooks_s)
    told = page.lines_of("stages", result(alone={}, hooks={"gpt2": without}))
    assert not [line for line in told if "profiler" in line]


def test_results_of_a_smoke_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "ROOT", tmp_path)
    (tmp_path / "gpu-losses.json").write_text(json.dumps({"gpu": None}))
    with pytest.raises(page.PageError, match=r"gpu-losses\.json is from a run without a GPU"):
        page.stored()


def test_full_size_models_have_the_published_number_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu_jobs")
    import models

    with torch.device("meta"):
        made = {"resnet18": models.resnet18(), "vgg16": models.vgg16(), "gpt2": models.Gpt2()}
    counts = {name: sum(each.numel() for each in model.parameters()) for name, model in made.items()}
    assert counts == {"resnet18": 11_689_512, "vgg16": 138_357_544, "gpt2": 124_439_808}
