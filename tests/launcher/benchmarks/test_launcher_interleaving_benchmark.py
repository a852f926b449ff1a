"""The benchmark's arithmetic: bound, speeds, bars. The measuring itself is benchmarks/interleaving.py."""

import sys
from pathlib import Path

import pytest
from launcher_harness import Launcher

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import interleaving_synthetic

    return interleaving_synthetic


@pytest.fixture
def benchmark_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import interleaving

    return interleaving


def test_bound_of_members_that_share_nothing_and_everything(synthetic) -> None:
    apart = synthetic.ProfileSet("", ((1.0, 0, 0, 0), (0, 0.1, 0, 0), (0, 0, 5.0, 0), (0, 0, 0, 1.0)), 1, 1)
    same = synthetic.ProfileSet("", ((1.0, 0, 0, 0), (0.1, 0, 0, 0)), 1, 1)
    # One is half on the GPU, three are wholly: 0.5·s₁ + s₂ + s₃ + s₄ ≤ 1 gives 1 + 0.5.
    mixed = synthetic.ProfileSet("", ((1.0, 0, 1.0, 0), *[(0, 0, 0.3, 0)] * 3), 1, 1)
    assert apart.lp_bound == pytest.approx(4.0)
    assert same.lp_bound == pytest.approx(1.0)
    assert mixed.lp_bound == pytest.approx(1.5)


def test_drawn_members_are_what_they_are_said_to_be(synthetic) -> None:
    for seed in range(20):
        members = synthetic.unequal_iterations(seed).stages_s
        assert sorted(round(sum(stages), 6) for stages in members) == [0.02, 0.1, 0.4, 1.0]
        assert sorted(stages.index(max(stages)) for stages in members) == [0, 1, 2, 3]
        assert all(0.4 <= max(stages) / sum(stages) <= 0.7 for stages in members)
    assert synthetic.unequal_iterations(5) == synthetic.unequal_iterations(5)
    assert synthetic.equal_iterations().lp_bound == pytest.approx(4.0)


def test_speed_counts_whole_iterations_within_the_window(synthetic) -> None:
    ends_s = [float(index) for index in range(0, 100, 2)]  # iterations of one second take two
    assert synthetic._speed(ends_s, 1.0, begin_s=31.0) == pytest.approx(0.5)
    with pytest.raises(synthetic.BenchmarkError, match="only 2 iterations"):
        synthetic._speed(ends_s, 1.0, begin_s=95.0)


def figures(fair: float, lockstep: float, ratio: float) -> dict:
    good = {way: {"total": fair, "ratio": ratio} for way in ("fair", "fair-processes", "auto-processes")}
    return good | {"lockstep": {"total": lockstep}}


def test_bars_are_passed_and_missed(benchmark_command) -> None:
    good = benchmark_command.bars(
        {"equal": {"set": figures(3.9, 3.9, 0.97)}, "unequal": {"a": figures(3.0, 1.5, 0.86)}}
    )
    assert len(good) == 7
    assert all(bar.passed for bar in good)
    bad = benchmark_command.bars({"equal": {"set": figures(3.7, 4.0, 0.9)}, "unequal": {"a": figures(1.4, 1.5, 0.84)}})
    assert not any(bar.passed for bar in bad)
    leak = {"threads": [5, 6], "files": [10, 10], "memory_growth": 0.06}
    assert [bar.passed for bar in benchmark_command.bars({"soak": leak})] == [False, True, False]


def test_short_soak_in_a_real_runtime_leaves_nothing_behind(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import interleaving_soak

    found = interleaving_soak.measure(60, lambda text: print(text, file=sys.stderr))
    assert found["threads"][1] <= found["threads"][0]
    assert found["files"][1] <= found["files"][0]
