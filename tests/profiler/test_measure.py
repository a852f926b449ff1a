"""From samples to a profile."""

import pytest

from muri.profiler.measure import Circumstances, IterationSample, summarise
from muri.profiler.records import ProfileError, ProfileKey

KEY = ProfileKey("resnet18", 64, 1, "gpu")


def test_the_warm_up_does_not_count():
    slow = IterationSample((9.0, 9.0, 9.0, 9.0), 36.0)
    samples = [slow, slow, IterationSample((1.0, 0.0, 2.0, 0.5), 3.0), IterationSample((3.0, 0.0, 4.0, 0.5), 7.0)]
    profile = summarise(KEY, samples, warmup=2, circumstances=Circumstances(3.5, "2026-03-01T12:00:00Z"))
    assert profile.stage_s == (2.0, 0.0, 3.0, 0.5)
    assert (profile.iteration_s, profile.iterations) == (5.0, 2)
    assert (profile.gpu_mem_gib, profile.measured_at, profile.source) == (3.5, "2026-03-01T12:00:00Z", "dry-run")


def test_a_negligible_stage_counts_as_zero():
    profile = summarise(
        KEY, [IterationSample((0.0004, 0.006, 0.99, 0.0), 1.0)], warmup=0, circumstances=Circumstances()
    )
    assert profile.stage_s == (0.0, 0.006, 0.99, 0.0)


@pytest.mark.parametrize(("count", "warmup"), [(0, 0), (10, 10), (3, 10), (3, -1)])
def test_nothing_left_to_measure_is_an_error(count, warmup):
    samples = [IterationSample((1.0, 0.0, 0.0, 0.0), 1.0)] * count
    with pytest.raises(ProfileError, match="leave none to measure"):
        summarise(KEY, samples, warmup=warmup, circumstances=Circumstances())


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_samples_are_refused(bad):
    with pytest.raises(ProfileError, match="load time"):
        summarise(KEY, [IterationSample((bad, 0.0, 0.0, 0.0), 1.0)], warmup=0, circumstances=Circumstances())
