"""Figures with which an unknown model is planned."""

import pytest

from muri.profiler.estimates import GUESSED_SHARES, unknown_models
from muri.profiler.records import ProfileKey, StageProfile

KEY = ProfileKey("new", 8, 1, "a100", "alice")


def unknown_model(known: list[StageProfile], key: ProfileKey) -> StageProfile:
    return unknown_models(known, [key])[key]


def known(model: str, *stage_s: float, user: str = "", gpus: int = 1, iteration_s: float = 1.0, source: str = "import"):
    key = ProfileKey(model, 8, gpus, "a100", user)
    return StageProfile(key, *(iteration_s * each for each in stage_s), iteration_s=iteration_s, source=source)


def with_guess(count: int, *mean: float) -> list[float]:
    """The mean of so many models and the guess, in seconds of an iteration of one second."""
    return [(count * share + guess) / (count + 1) for share, guess in zip(mean, GUESSED_SHARES, strict=True)]


def on_one(shares: list[float]) -> list[float]:
    """The same on one GPU."""
    load, preprocess, propagate, synchronize = shares
    return [load, preprocess, propagate + synchronize, 0.0]


def test_an_empty_store_leaves_a_guess() -> None:
    one, two = unknown_model([], KEY), unknown_model([], ProfileKey("new", 8, 2, "a100", "alice"))
    assert (one.source, two.source) == ("guess", "guess")
    assert (one.bottleneck, two.bottleneck) == ("gpu", "gpu")
    assert one.synchronize_s == 0 < two.synchronize_s
    assert sum(one.stage_s) == pytest.approx(one.iteration_s)
    assert one.is_estimate
    assert one.says_nothing_of_model


def test_shares_are_averaged_so_that_a_slow_model_does_not_outweigh_the_others() -> None:
    models = [known("a", 0.8, 0.0, 0.2, 0.0), known("b", 0.2, 0.0, 0.6, 0.0, iteration_s=100.0)]
    found = unknown_model(models, KEY)
    assert found.source == "average"
    assert found.iteration_s == pytest.approx(10.0)
    assert found.stage_s == pytest.approx([10.0 * share for share in on_one(with_guess(2, 0.5, 0.0, 0.4, 0.0))])


def test_of_other_users_each_has_one_vote_and_none_makes_the_outcome() -> None:
    odd = [known(f"m{number}", 1.0, 0.0, 0.0, 0.0, user="bob", iteration_s=1000.0) for number in range(20)]
    usual = known("a", *GUESSED_SHARES, user="carol", iteration_s=0.3)
    found, own = unknown_model([*odd, usual], KEY), known("b", 0.2, 0.2, 0.6, 0.0, user="alice", iteration_s=2.0)
    assert found.iteration_s == pytest.approx(0.3)
    assert found.stage_s == pytest.approx([0.3 * share for share in on_one(list(GUESSED_SHARES))])
    hers = unknown_model([*odd, usual, own], KEY)
    assert hers.iteration_s == pytest.approx(2.0)
    assert hers.stage_s == pytest.approx([2.0 * share for share in on_one(with_guess(1, 0.2, 0.2, 0.6, 0.0))])


def test_models_on_as_many_gpus_go_before_others_and_one_gpu_has_no_network() -> None:
    models = [known("a", 0.5, 0.0, 0.3, 0.2, gpus=2), known("b", 0.0, 1.0, 0.0, 0.0, gpus=4)]
    two = with_guess(1, 0.5, 0.0, 0.3, 0.2)
    assert unknown_model(models, ProfileKey("new", 8, 2, "a100")).stage_s == pytest.approx(two)
    assert unknown_model(models[:1], KEY).stage_s == pytest.approx(on_one(two))


def test_estimates_are_no_measurements_and_overlapping_stages_fill_the_iteration() -> None:
    found = unknown_model([known("a", 0.8, 0.8, 0.4, 0.0), known("b", 1, 0, 0, 0, source="scaled")], KEY)
    shares = on_one(with_guess(1, 0.8, 0.8, 0.4, 0.0))
    assert found.stage_s == pytest.approx([share / sum(shares) for share in shares])
