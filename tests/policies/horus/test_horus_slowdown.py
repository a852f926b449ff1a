"""Horus's fitted slow-down: the paper's figures where they hold, monotone everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.profiler.slowdown import UtilizationError, published_slowdown

PERCENT = st.floats(0, 1000)
GPU_TYPES = st.sampled_from(["rtx2080", "NVIDIA GeForce GTX 1080 Ti", "a100", ""])


@pytest.mark.parametrize(
    ("gpu_type", "percent", "expected"),
    [
        ("rtx2080", 100, 1.16664 - 0.302 + 0.4),
        ("gtx1080", 100, 1.32198 - 0.728 + 0.6),
        ("a100", 100, (1.26464 + 1.19398) / 2),
        ("rtx2080", 0, 1.16664 - 0.00302**2 / (4 * 4e-5)),
    ],
)
def test_the_fit_of_the_paper(gpu_type: str, percent: float, expected: float) -> None:
    assert published_slowdown(gpu_type)(percent) == pytest.approx(expected)


@given(PERCENT, PERCENT, GPU_TYPES)
def test_more_use_never_speeds_anybody_up(first: float, second: float, gpu_type: str) -> None:
    low, high = sorted((first, second))
    assert 1 <= published_slowdown(gpu_type)(low) <= published_slowdown(gpu_type)(high)


@pytest.mark.parametrize("percent", [-1.0, float("nan"), float("inf")])
def test_impossible_utilizations_are_refused(percent: float) -> None:
    with pytest.raises(UtilizationError, match="finite and ≥ 0"):
        published_slowdown()(percent)
