"""Profiles for the tests of the store and its commands."""

from hypothesis import strategies as st

from muri.profiler.records import ProfileDetail, ProfileKey, StageProfile


def make_profile(model="resnet18", *, batch_size=64, gpu_count=1, gpu_type="gpu", user="", load_s=0.12, **changes):
    fields = {
        "preprocess_s": 0.05,
        "propagate_s": 0.3,
        "synchronize_s": 0.001,
        "iteration_s": 0.48,
        "gpu_mem_gib": 3.2,
        "iterations": 20,
        "measured_at": "2026-03-01T12:00:00Z",
        "source": "dry-run",
    }
    return StageProfile(ProfileKey(model, batch_size, gpu_count, gpu_type, user), load_s, **(fields | changes))


_seconds = st.floats(0, 86400)
_names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)

_per_stage = st.none() | st.tuples(*[_seconds] * 4)
_share = st.none() | st.floats(0, 1)
details = st.builds(
    ProfileDetail,
    stage_p95_s=_per_stage,
    stage_cv=_per_stage,
    busy_s=_per_stage,
    iteration_p95_s=st.none() | _seconds,
    host_mem_gib=st.none() | _seconds,
    gpu_utilisation=_share,
    confidence=_share,
    warmup_iterations=st.none() | st.integers(0, 1000),
)

profiles = st.builds(
    make_profile,
    _names,
    batch_size=st.integers(0, 2**40),
    gpu_count=st.integers(1, 4096),
    gpu_type=_names,
    user=st.sampled_from(("", "alice", "bob")),
    load_s=_seconds,
    preprocess_s=_seconds,
    propagate_s=_seconds,
    synchronize_s=_seconds,
    iteration_s=st.floats(1e-9, 86400),
    gpu_mem_gib=_seconds,
    iterations=st.integers(0, 10**12),
    measured_at=st.sampled_from(("", "2026-03-01T12:00:00Z", "2026-03-01T12:00:00+02:00")),
    source=st.sampled_from(("dry-run", "import", "run")),
    detail=details,
)
