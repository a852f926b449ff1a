"""Fits of Horus's f: recovered points, refusals, the stored curve and the policies that use it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import make_profile
from profile_commands import muri_lab

from muri.profiler.errors import FitError
from muri.profiler.interference import Interference, Side, put
from muri.profiler.records import ProfileDetail
from muri.profiler.slowdown import Parabola, SlowdownFit, published_slowdown, slowdown_of
from muri.profiler.store import ProfileStore
from muri_lab.interference.fits import LEAST_PAIRS, PairPoint, fit_slowdown, gpu_percent, pair_points

TRUE = Parabola(1.0, 0.001, 5e-5)


def on(curve, noise=0.0, pairs=40, seed=3):
    """Two points of each pair, spread from 20 to 200 %."""
    generator = random.Random(seed)
    uses = [20 + 180 * number / (pairs - 1) for number in range(pairs) for _ in range(2)]
    return [PairPoint(use, max(1.0, curve(use) + generator.gauss(0, noise))) for use in uses]


def test_a_fit_finds_the_curve_that_made_the_points():
    fit = fit_slowdown(on(TRUE))
    assert fit.curve.constant == pytest.approx(1.0)
    assert fit.curve.linear == pytest.approx(0.001, rel=1e-6)
    assert fit.curve.square == pytest.approx(5e-5)
    assert fit.r_squared == pytest.approx(1.0)
    assert (fit.pairs, fit.least_percent, fit.most_percent) == (40, 20.0, 200.0)


def test_where_the_best_parabola_would_fall_first_the_best_rising_one_is_taken():
    points = on(lambda use: 1.5 + (use - 90) ** 2 / 1e4)
    fit = fit_slowdown(points)
    assert 0 < fit.r_squared < 0.9
    assert fit.curve(20.0) < fit.curve(90.0) < fit.curve(200.0)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], f"{LEAST_PAIRS} measured pairs"),
        (on(TRUE, pairs=LEAST_PAIRS - 1), f"not {LEAST_PAIRS - 1}"),
        ([PairPoint(100 + number, 1.5) for number in range(40)], "about the same"),
        ([PairPoint(use, 1.0 + use / 100) for use in (50.0, 150.0)] * 20, "3 or more different"),
        (on(lambda use: 2 - use / 300), "no curve explains"),
        (on(lambda use: 1.5), "no curve explains"),
        ([*on(TRUE), PairPoint(50.0, 0.5)], "cannot be true"),
        ([*on(TRUE), PairPoint(math.nan, 1.5)], "cannot be true"),
    ],
)
def test_what_no_curve_can_be_fitted_to_is_refused(points, message):
    with pytest.raises(FitError, match=message):
        fit_slowdown(points)


@given(st.lists(st.builds(PairPoint, st.floats(0, 400), st.floats(1, 20)), min_size=20, max_size=60))
def test_whatever_was_measured_more_use_never_speeds_anybody_up(points):
    try:
        curve = fit_slowdown(points).curve
    except FitError:
        return
    found = [curve(use) for use in range(0, 800, 25)]
    assert found == sorted(found)
    assert found[0] >= 1


def test_the_site_s_fit_goes_before_the_published_curves():
    fitted = {"rtx2080": TRUE}
    assert slowdown_of("rtx2080", fitted)(100.0) == TRUE(100.0)
    assert slowdown_of("gtx1080", fitted) == published_slowdown("gtx1080")
    assert slowdown_of("a100", fitted) == published_slowdown()


def test_use_is_what_telemetry_measured_else_the_propagate_share():
    assert gpu_percent(make_profile(propagate_s=0.12)) == pytest.approx(25.0)
    assert gpu_percent(make_profile(detail=ProfileDetail(gpu_utilization=0.9))) == 90.0


# The command


def filled(path, gpu_type="a100", pairs=12):
    """A store with models of rising use, each measured beside itself."""
    with ProfileStore(path) as store:
        for number in range(pairs):
            share = (number + 1) / pairs
            profile = make_profile(f"m{number}", gpu_type=gpu_type, detail=ProfileDetail(gpu_utilization=share))
            store.put(profile)
            ratio = TRUE(200 * share)
            side = Side(profile.key, 0.1, 0.1 * ratio, ratio, 0.01, 0.95, 40)
            put(store, Interference(side, side, 5, 20.0, "2026-03-01T12:00:00+00:00"))


def test_pairs_count_where_both_models_have_measured_profiles(path):
    filled(path)
    with ProfileStore(path) as store:
        assert len(pair_points(store, "a100")) == 24
        assert pair_points(store, "h100") == ()
        profile = store.list()[0]
        store.remove(profile.key)
        assert len(pair_points(store, "a100")) == 22
        store.put(make_profile("m0", gpu_type="a100", source="predicted"))
        assert len(pair_points(store, "a100")) == 22


def test_a_curve_is_fitted_shown_kept_and_forgotten(path, capsys):
    filled(path)
    code, out, _ = muri_lab(capsys, "slowdown", "a100")
    assert code == 0
    assert "R² 1.00 over 24 jobs of 12 pairs" in out
    assert all(len(line) <= 80 for line in out.splitlines())
    with ProfileStore(path) as store:
        (kept,) = store.documents("slowdown")
    assert kept.name == "a100"
    assert SlowdownFit.from_dict(kept.body).curve.square == pytest.approx(5e-5)
    assert muri_lab(capsys, "slowdown", "a100", "--forget")[0] == 0
    code, _, err = muri_lab(capsys, "slowdown", "a100", "--forget")
    assert code == 2
    assert "stored are: none" in err


def test_a_look_keeps_nothing(path, capsys):
    filled(path)
    code, out, _ = muri_lab(capsys, "slowdown", "a100", "--no-store", "--json")
    assert code == 0
    assert '"r_squared_of_published"' in out
    with ProfileStore(path) as store:
        assert not store.documents("slowdown")
