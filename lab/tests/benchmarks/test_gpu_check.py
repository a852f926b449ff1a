"""The GPU check: what becomes of its parts' figures, and the sentences about them."""

import json
from pathlib import Path

import psutil
import pytest

from muri_lab.benchmarks.gpu_check import page, training
from muri_lab.benchmarks.gpu_check.check import Check, Figures
from muri_lab.benchmarks.gpu_check.device import gaps
from muri_lab.benchmarks.gpu_check.parts import start_part
from muri_lab.benchmarks.runtime_process import BenchmarkError

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.thorough


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


def test_results_of_a_smoke_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    (tmp_path / "gpu-losses.json").write_text(json.dumps({"gpu": None}))
    with pytest.raises(page.PageError, match=r"gpu-losses\.json is from a run without a GPU"):
        page.stored()
