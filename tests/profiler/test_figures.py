"""Figures that cannot be true are refused where they enter; whatever passes, nothing that computes with it fails."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import make_profile, profiles

from muri.policies.traits import Demand, derived_sensitivity
from muri.profiler.drift import DriftRule, find_drift
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.errors import FitError, InterferenceError, SensitivityError
from muri.profiler.estimates import Bandwidth, scale
from muri.profiler.interference import LinearFit, Side, estimated_ratio
from muri.profiler.records import STAGES, Document, ProfileDetail, ProfileError, ProfileKey
from muri.profiler.sensitivity import CpuSensitivity, Dataset, Point, SensitivityProfile
from muri.profiler.store import Observation

ABSURD = (math.nan, math.inf, -math.inf, -1.0, 1e17, 1e200, 1.7976931348623157e308, "1", None, True, [1])
absurd = pytest.mark.parametrize("value", ABSURD)


@absurd
@pytest.mark.parametrize("name", [*(f"{stage}_s" for stage in STAGES), "iteration_s", "gpu_mem_gib"])
def test_a_profile_refuses_what_no_script_measures(name, value):
    with pytest.raises(ProfileError, match="must be"):
        make_profile(**{name: value})


@pytest.mark.parametrize(
    "value",
    [-1, 10**12 + 1, 10**19, 1 << 20_000, 1e200, 1.5, math.inf, "7", None],
    ids=lambda value: type(value).__name__,
)
def test_a_profile_refuses_counts_that_nobody_counts(value):
    with pytest.raises(ProfileError, match="number of iterations"):
        make_profile(iterations=value)
    with pytest.raises(ProfileError, match="a dry run's result: number of iterations"):
        DryRunResult((0.1,) * 4, 0.4, iterations=value)


@pytest.mark.parametrize("changes", [{"gpu_count": 0}, {"gpu_count": 2**60}, {"batch_size": -1}, {"batch_size": 2**64}])
def test_a_profile_refuses_a_key_that_no_job_has(changes):
    with pytest.raises(ProfileError, match="it must be"):
        make_profile(**changes)


@absurd
@pytest.mark.parametrize(
    "name", [name for name in ProfileDetail.__dataclass_fields__ if name not in ("stage_p95_s", "stage_cv", "busy_s")]
)
def test_details_are_bounded_too(name, value):
    if value is None:
        return  # not measured
    with pytest.raises(ProfileError):
        ProfileDetail.from_dict({name: value})


KEPT = (
    (Bandwidth("gpu", 1, 1, 1.0, 0.0), ProfileError, ("nodes", "ranks_per_node", "mib_per_s", "latency_s")),
    (Side(ProfileKey("m", 8, 1, "gpu"), 0.1, 0.2, 2.0, None, 0.9, 40), InterferenceError,
     ("solo_s", "shared_s", "ratio", "confidence", "iterations")),
    (Point(2, 1.0), SensitivityError, ("cpus", "throughput", "spread")),
    (Dataset(1.0, 1.0, 1.0), SensitivityError, ("dataset_gib", "batch_mib", "storage_mib_per_s")),
)  # fmt: skip


@absurd
def test_what_else_is_kept_of_models_is_bounded_too(value):
    for name in ("stage_p95_s", "stage_cv", "busy_s"):
        with pytest.raises(ProfileError):
            ProfileDetail.from_dict({name: [0.1, value, 0.1, 0.1]})
    for good, error, names in KEPT:
        for name in names:
            with pytest.raises(error):
                replace(good, **{name: value})
    for impossible in ({"batch_mib": 2048.0}, {"overlap": 1.5}):
        with pytest.raises(SensitivityError):
            replace(Dataset(1.0, 1.0, 1.0), **impossible)
    with pytest.raises(ProfileError):
        Observation("2026-03-01T12:00:00Z", 1, 10, (0.1, value, 0.1, 0.1))
    body = {"fixed_s": 0.1, "per_unit_s": 0.1, "r_squared": 1.0, "residual_s": 0.0, "points": []}
    if value not in ("1", True):  # JSON numbers only differ in how they are written
        with pytest.raises(FitError):
            LinearFit.from_dict(body | {"fixed_s": value})


def test_a_stored_sensitivity_with_absurd_figures_is_refused():
    cpu = CpuSensitivity((Point(1, 1.0), Point(4, 3.0)), 4, 0, 2)
    good = SensitivityProfile("m", "", cpu, process_gib=1.0).to_document()
    for changes in ({"saturating_cpus": 0}, {"saturating_cpus": 1e300}, {"process_gib": 1e300}, {"process_gib": -1}):
        with pytest.raises(SensitivityError):
            SensitivityProfile.from_document(Document("m", "", {**good.body, **changes}))


tiny_or_huge = st.sampled_from((0.0, 5e-324, 1e-300, 1e-9, 1.0, 86400.0))
edge_profiles = st.builds(
    make_profile,
    load_s=tiny_or_huge,
    preprocess_s=tiny_or_huge,
    propagate_s=tiny_or_huge,
    synchronize_s=tiny_or_huge,
    iteration_s=st.sampled_from((1e-9, 1.0, 86400.0)),
    gpu_count=st.sampled_from((1, 10**6)),
    iterations=st.sampled_from((0, 10**12)),
    detail=st.builds(
        ProfileDetail,
        busy_s=st.none() | st.tuples(*[tiny_or_huge] * 4),
        stage_cv=st.none() | st.just((1e6,) * 4),
        iteration_cv=st.none() | st.just(1e6),
        gradient_mib=st.none() | st.sampled_from((0.0, 5e-324, 1e8)),
        host_mem_gib=st.none() | st.just(1e6),
    ),
)


@given(profiles | edge_profiles, profiles | edge_profiles)
def test_nothing_that_computes_with_what_passes_fails(one, other):
    assert 1 <= estimated_ratio(one, other) <= 5
    seen = [Observation(f"2027-01-01T0{hour}:00:00Z", 1, 100 * hour, other.stage_s) for hour in range(5)]
    drift = find_drift(one, seen, DriftRule())
    assert drift is None or math.isfinite(drift.difference)
    derived = derived_sensitivity(one, Demand(0.25, 1.0), 1e6)
    assert all(math.isfinite(value) and value > 0 for row in derived.throughput for value in row)
    for count in (1, 2, 10**6):
        found = scale([one], replace(one.key, gpu_count=count))
        assert found is None or found.profile.iteration_s > 0
