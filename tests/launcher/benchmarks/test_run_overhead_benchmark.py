"""The arithmetic of the overhead benchmark: pairs, bars, and how long its blocks are."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_overhead

    return run_overhead


def blocks(ratio: float) -> list[tuple[float, float]]:
    """The machine gets slower and slower, which falls on all ways alike."""
    return [(0.02 * drift * ratio, 0.01 * drift * ratio) for drift in (1.0, 1.5, 2.0, 4.0, 8.0)]


def test_each_block_is_compared_with_the_plain_one_of_its_round(overhead) -> None:
    measured = {"plain": blocks(1.0), "muri run": blocks(1.004), "member": blocks(1.02)}
    starts = {"plain": [0.1, 0.2], "muri run": [0.3, 0.4], "member": [1.4, 1.5]}
    found = overhead.figures(measured, starts)
    assert found["wall_ratio"]["muri run"] == {"median": 1.004, "quartile_1": 1.004, "quartile_3": 1.004}
    assert found["later_start_s"]["member"]["median"] == pytest.approx(1.3)
    assert found["iteration_ms"] == 40.0
    assert [(bar.what, bar.passed) for bar in overhead.bars(found)] == [
        ("muri run: iteration / plain", True), ("member: iteration / plain", False),
        ("muri run: seconds later", True), ("member: seconds later", False),
    ]  # fmt: skip


def test_blocks_have_iterations_of_the_length_that_the_promise_is_for(overhead) -> None:
    class Trainer:
        def train(self, batch_size: int, iterations: int) -> tuple[float, float]:
            return 0.001 + 0.0003 * batch_size, 0.001

    batch_size, iterations = overhead._block_of(Trainer())
    iteration_s = 0.001 + 0.0003 * batch_size
    assert overhead.ITERATION_S <= iteration_s < 2 * overhead.ITERATION_S
    assert iterations * iteration_s == pytest.approx(overhead.BLOCK_S, rel=0.1)
