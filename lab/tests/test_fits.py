"""Lines over gradient sizes, what to expect of a pair, and which to measure next."""

from dataclasses import replace

import pytest
from profile_builders import OTHER_GPU, A, B, C, make_profile, pair, profile

from muri.profiler.errors import FitError
from muri.profiler.estimates import estimated
from muri.profiler.interference import put
from muri.profiler.records import ProfileDetail, ProfileKey
from muri.profiler.store import ProfileStore
from muri_lab.interference.fits import best_known, expected, fit_communication, next_pairs


def test_communication_is_fitted_over_gradient_sizes_of_several_models():
    profiles = [
        replace(
            make_profile(name, gpu_count=2, synchronize_s=0.01 + 0.002 * mib), detail=ProfileDetail(gradient_mib=mib)
        )
        for name, mib in (("a", 10.0), ("b", 100.0), ("c", 400.0))
    ]
    fit = fit_communication(profiles)
    assert (fit.fixed_s, fit.per_unit_s) == (pytest.approx(0.01), pytest.approx(0.002))
    with pytest.raises(FitError, match="there are none"):
        fit_communication([make_profile()])
    with pytest.raises(FitError, match="one GPU count"):
        fit_communication([*profiles, replace(profiles[0], key=A)])


def test_what_to_expect_is_measured_else_estimated_else_unknown(tmp_path):
    with ProfileStore(tmp_path / "profiles.db") as store:
        profiles = [replace(profile((0, 0, share, 0)), key=key) for key, share in ((A, 1.0), (B, 0.5))]
        store.put_all(profiles)
        estimate = expected(store, A, B)
        assert (estimate.ratio_a, estimate.ratio_b, estimate.source) == (1.5, 1.5, "estimated")
        assert expected(store, A, C) is None
        put(store, pair(A, B, 1.7, 1.3))
        found = expected(store, B, A)
        assert (found.ratio_a, found.ratio_b, found.source, found.confidence) == (1.3, 1.7, "measured", 0.9)


def test_the_best_that_is_known_is_measured_else_estimated_and_of_the_same_user_first(tmp_path):
    one, four = (ProfileKey("resnet18", 64, count, "gpu", "alice") for count in (1, 4))
    bobs = replace(one, user="bob")
    with ProfileStore(tmp_path / "profiles.db") as store:
        assert best_known(store, one) is estimated(store, four) is None
        store.put(make_profile(user="bob", propagate_s=0.4))
        assert best_known(store, one) is estimated(store, four) is None  # another user's says nothing
        store.put(make_profile(propagate_s=0.2))
        assert [best_known(store, key).propagate_s for key in (one, bobs)] == [0.2, 0.4]
        assert (best_known(store, four).key, best_known(store, four).source) == (four, "scaled")
        measured = make_profile(gpu_count=4)
        store.put(measured)
        assert best_known(store, four) == measured
        assert estimated(store, four).profile.source == "scaled"


def test_the_next_pair_is_unknown_and_frequent():
    queue = [A, A, A, B, C, C, OTHER_GPU]
    chances = {(item.a, item.b): item.chances for item in next_pairs([], queue)}
    assert chances == {(A, C): 6, (A, A): 3, (A, B): 3, (B, C): 2, (C, C): 1}
    assert (next_pairs([], queue)[0].a, next_pairs([], queue)[0].b) == (A, C)
    known = [pair(A, C, confidence=0.95), pair(A, B, confidence=0.3)]
    found = [(item.a, item.b) for item in next_pairs(known, queue)]
    assert found == [(A, A), (B, C), (C, C), (A, B)]  # sure ones are done, uncertain ones come last
    assert len(next_pairs([], queue, most=2)) == 2
