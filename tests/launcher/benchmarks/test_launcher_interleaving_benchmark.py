"""The interleaving benchmark: its bound, and its soak."""

import sys

import pytest

pytestmark = pytest.mark.thorough


def test_bound_of_members_that_share_nothing_and_everything(benchmark) -> None:
    synthetic = benchmark("interleaving_synthetic")
    apart = synthetic.ProfileSet("", ((1.0, 0, 0, 0), (0, 0.1, 0, 0), (0, 0, 5.0, 0), (0, 0, 0, 1.0)), 1, 1)
    same = synthetic.ProfileSet("", ((1.0, 0, 0, 0), (0.1, 0, 0, 0)), 1, 1)
    # One is half on the GPU, three are wholly: 0.5·s₁ + s₂ + s₃ + s₄ ≤ 1 gives 1 + 0.5.
    mixed = synthetic.ProfileSet("", ((1.0, 0, 1.0, 0), *[(0, 0, 0.3, 0)] * 3), 1, 1)
    assert apart.lp_bound == pytest.approx(4.0)
    assert same.lp_bound == pytest.approx(1.0)
    assert mixed.lp_bound == pytest.approx(1.5)


def test_short_soak_in_a_real_runtime_leaves_nothing_behind(benchmark) -> None:
    found = benchmark("interleaving_soak").measure(60, lambda text: print(text, file=sys.stderr))
    assert found["threads"][1] <= found["threads"][0]
    assert found["files"][1] <= found["files"][0]
