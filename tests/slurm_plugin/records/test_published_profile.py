"""A dry run's result in the comment of the job that it was measured for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.profiler.dangers import DANGERS
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import ProfileDetail, ProfileError, ProfileKey
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import MOST_BYTES, comment_with, profile_in

FOUR = (0.1234, 0.2345, 0.3456, 0.4567)
KEY = ProfileKey("m", 8, 1, "gpu")
AT = "2026-03-01T12:00:00+00:00"
seconds = st.floats(1e-9, 86400)
four = st.tuples(seconds, seconds, seconds, seconds)
results = st.builds(
    DryRunResult,
    four,
    seconds,
    seconds,
    st.integers(1, 10**6),
    st.builds(
        ProfileDetail,
        **dict.fromkeys(("stage_p95_s", "stage_cv", "busy_s"), four),
        **dict.fromkeys(("iteration_p95_s", "iteration_cv", "host_mem_gib", "cpu_cores", "gradient_mib"), seconds),
        gpu_utilisation=st.floats(0, 1),
        confidence=st.floats(0, 1),
        warmup_iterations=st.integers(0, 10**4),
        dangers=st.none() | st.sets(st.sampled_from(sorted(DANGERS))).map(tuple),
    ),
    st.text(max_size=100),
)


def read(comment):
    return tags.parse_json(tags.token(comment, tags.PROFILE_PREFIX))


@given(results)
def test_every_detail_survives_the_comment(result):
    comment = comment_with("my own words", "token-1", result.to_dict())
    assert len(comment.encode()) <= MOST_BYTES
    assert comment.startswith("my own words ")
    found, measured = profile_in(read(comment), KEY, AT), result.profile(KEY, AT)
    assert read(comment)["token"] == "token-1"
    assert found.stage_s == pytest.approx(measured.stage_s, rel=1e-3)
    assert (found.iterations, found.measured_at, found.source) == (measured.iterations, AT, "dry-run")
    assert found.detail.dangers == measured.detail.dangers
    assert found.detail.figures()
    for (name, mine), (other, theirs) in zip(found.detail.figures(), measured.detail.figures(), strict=True):
        assert name == other
        assert mine == pytest.approx(theirs, rel=1e-3)


def test_where_a_long_comment_leaves_no_room_details_go_first():
    detail = ProfileDetail(stage_p95_s=FOUR, stage_cv=FOUR, busy_s=FOUR, confidence=0.93)
    result = DryRunResult((0.1, 0.2, 0.3, 0.4), 1.0, detail=detail)
    comment = comment_with("x" * 750, "t", result.to_dict())
    assert len(comment.encode()) <= MOST_BYTES
    found = profile_in(read(comment), KEY, AT)
    assert found.stage_s == result.stage_s
    assert found.detail.confidence == 0.93
    assert found.detail.stage_p95_s is None
    assert profile_in(read(comment_with("x" * 1000, "t", result.to_dict())), KEY, AT).detail == ProfileDetail()
    assert len(read(comment_with("", "t", {"error": "e" * 5000}))["error"]) == 300


TOLD = [{"detail": {"dangers": told}} for told in (3, [3], ["\x1b[2J"], ["a"] * 33)]
"""What a user may have written there."""


@pytest.mark.parametrize(
    "change", [{"load_s": "x"}, {"iteration_s": None}, {"load_s": -1}, {"detail": {"busy_s": 3}}, *TOLD]
)
def test_figures_that_cannot_be_true_are_refused(change):
    measured = DryRunResult((0.1, 0.2, 0.3, 0.4), 1.0).to_dict() | change
    with pytest.raises((ProfileError, TypeError, ValueError)):
        profile_in(measured, KEY, AT)
