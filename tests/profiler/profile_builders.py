"""Profiles for the tests of the store and its commands."""

from dataclasses import replace

from hypothesis import strategies as st

from muri.profiler.interference import Interference, Side
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


OLD_KEY = {"model": "resnet18", "batch_size": 64, "gpu_count": 1, "gpu_type": "gpu"}
OLD_MEASUREMENT = OLD_KEY | {
    "load_s": 0.12, "preprocess_s": 0.05, "propagate_s": 0.3, "synchronize_s": 0.001, "iteration_s": 0.48,
    "gpu_mem_gib": 3.2, "iterations": 20, "measured_at": "2026-03-01T12:00:00Z", "source": "dry-run",
}  # fmt: skip
"""What `make_profile()` gives, as the columns of a store that knew no users."""


def insert_old(connection, table, **values):
    """A row of an older format, whose columns are told by name."""
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))


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
    gpu_utilization=_share,
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

A, B, C = (ProfileKey(name, 8, 1, "gpu") for name in "abc")
OTHER_GPU = ProfileKey("a", 8, 1, "a100")


def side(key, ratio=1.5, confidence=0.9):
    return Side(key, solo_s=0.1, shared_s=0.1 * ratio, ratio=ratio, spread=0.02, confidence=confidence, iterations=40)


def pair(a, b, ratio_a=1.5, ratio_b=1.2, confidence=0.9):
    return Interference(side(a, ratio_a, confidence), side(b, ratio_b), 5, 20.0, "2026-03-01T12:00:00+00:00")


def profile(shares, **changes):
    """A profile whose iteration takes 1 s and uses the resources for these shares of it."""
    return replace(
        make_profile(load_s=0.1, preprocess_s=0.1, propagate_s=0.1, synchronize_s=0.1, iteration_s=1.0),
        detail=ProfileDetail(busy_s=tuple(shares), **changes),
    )
