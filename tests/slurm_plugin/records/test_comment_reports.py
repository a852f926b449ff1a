"""What jobs tell in their own comments: a pilot of its members, which queue and explain show, a dry run of a model."""

import math
from dataclasses import replace

import pytest
from fake_slurm import FOUR_KINDS, group_at_work, make_job, pilots
from hypothesis import given
from hypothesis import strategies as st

from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.records import DANGERS, STAGES, JobUse, NodeUse, OneGpu, ProfileDetail, ProfileError, ProfileKey
from muri.slurm_plugin.cli.look import explanation, show_queue
from muri.slurm_plugin.controller.status import Status, read_status, refresh, status_of, write_status
from muri.slurm_plugin.node.group_records import groups_in
from muri.slurm_plugin.records import comment_reports as telemetry
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import (
    MOST_BYTES,
    MemberReport,
    comment_with,
    is_off_plan,
    member_report,
    profile_in,
    promise_broken,
    speeds_token,
    steady_company,
)
from muri.slurm_plugin.records.roles import read_job, view_of


def member(rate_per_s: float | None = 12.345678, **changes):
    stages = dict.fromkeys(STAGES, 0.0123456789)
    return {
        "iterations": 123_456_789, "iterations_per_s": rate_per_s, "iteration_s": 0.0987654321,
        "stage_s": stages, "wait_s": stages, **changes,
    }  # fmt: skip


def told_in(comment: str):
    return read_job(make_job(9, comment=comment)).reports.speeds


def several(count: int, **changes):
    return {str(10_000_000 + index): member(**changes) for index in range(count)}


def told_of(members, steady=(), **status):
    """Return the report in a pilot's comment, which must not be too long."""
    token = speeds_token({"members": members, "discipline": "lockstep", **status}, steady)
    assert len(token.encode()) <= 1024
    assert " " not in token
    return told_in(f"mine {token} too")


def test_four_members_fit_a_comment_and_come_back():
    report = member_report(told_of(several(4)), 10_000_003)
    assert report.iteration_s == pytest.approx(1 / 12.345678, rel=1e-3)
    assert (report.iterations, report.discipline) == (123_456_789, "lockstep")
    assert report.stage_s == report.wait_s == pytest.approx([0.01235] * 4)
    assert report.speed(0.0405) == pytest.approx(0.5, rel=0.01)
    assert report.speed(None) is None


def test_many_members_are_told_in_short():
    report = told_of(several(16), tuple(several(16)))
    assert steady_company(report) == set(map(int, several(16)))
    assert steady_company(told_of(several(16))) == set()
    assert member_report(report, 10_000_015) == MemberReport(pytest.approx(0.081, rel=1e-2))


@pytest.mark.parametrize("count", [4, 16])
def test_promises_that_are_not_kept_are_told(count):
    broken = dict(list(several(count, promise_broken=True).items())[::2])
    report = told_of(several(count) | broken)
    assert promise_broken(report) == tuple(map(int, broken))
    assert member_report(report, 10_000_001) is not None
    assert promise_broken(told_of(several(1))) == ()


def test_members_without_an_iteration_are_left_out():
    fresh = member(rate_per_s=None, iteration_s=None)
    assert speeds_token({"members": {"1": fresh}, "discipline": "fair"}) is None
    assert speeds_token({}) is None
    told = told_of({"1": fresh, "2": member(None)})
    assert "1" not in told
    assert told["2"]["t"] == pytest.approx(0.09877)


@pytest.mark.parametrize(
    "text",
    ["", "muri-speed:{", "muri-speed:[]", 'muri-speed:{"1":{}}', 'muri-speed:{"1":0}', 'muri-speed:{"1":{"t":-1}}',
     'muri-speed:{"1":{"t":"x","n":1,"s":[],"w":[]}}', 'muri-speed:{"1":{"t":1,"n":1,"s":3,"w":[]}}',
     'muri-speed:{"1":"fast"}', 'muri-speed:{"1":{"t":1,"n":Infinity,"s":[],"w":[]}}', "muri-speed:" + 1000 * "[",
     'muri-speed:{"b":1}', 'muri-speed:{"b":["x",{},-1,true]}', 'muri-speed:{"b":[' + 5000 * "9" + "]}"],
)  # fmt: skip
def test_damaged_comments_tell_nothing(text):
    assert member_report(told_in(text), 1) is None
    assert promise_broken(told_in(text)) == ()


def test_of_a_model_that_is_not_measured_queue_explain_and_top_show_the_same_estimated_speed(make_controller, capsys):
    slurm = group_at_work(make_controller, FOUR_KINDS[1:], profiling={"mode": "in-place"})
    (pilot,) = pilots(slurm)
    token = speeds_token({"members": {"1": member(rate_per_s=5.0)}, "discipline": "fair"})
    slurm.jobs[pilot.job_id] = replace(pilot, comment=token)
    view = view_of(slurm.snapshot())
    job = next(each for each in status_of(view, None, {}, {}) if each.job_id == 1)
    waits = 4 * 0.0123456789 * 5.0  # as shares of its time
    assert job.measured_speed == pytest.approx(1 - waits, abs=1e-3)
    assert (job.is_speed_estimated, job.off_plan) == (True, False)
    (group,) = groups_in(view, pilot.uid)
    assert group["members"]["1"]["speed"] == job.measured_speed
    assert group["members"]["1"]["solo_iteration_s"] is None  # marked by `muri top`
    show_queue(Status(0.0, "muri-s", "fake", (job,)))
    head, row, note, *_ = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(), row.split(), strict=False))["SPEED"] == "~0.75"
    assert note == "~ by an estimate of the time alone, until the model is measured (muri profile)"
    assert "measured ~0.75." in "\n".join(explanation(job))


def test_off_plan_means_more_than_a_fifth():
    pairs = [(0.39, 0.5), (0.41, 0.5), (0.59, 0.5), (0.61, 0.5), (None, 0.5), (0.5, None)]
    assert [is_off_plan(*each) for each in pairs] == [True, False, False, True, False, False]


def test_queue_and_explain_show_what_the_pilot_measured(make_controller, tmp_path, capsys):
    slurm = group_at_work(make_controller)
    (pilot,) = pilots(slurm)
    with make_controller(slurm) as controller:
        planned = {job.job_id: job for job in controller.cycle().jobs}
        solo_s, predicted = planned[2].solo_iteration_s, planned[2].predicted_speed
        figures = {"1": member(rate_per_s=planned[1].predicted_speed / planned[1].solo_iteration_s)}
        figures["2"] = member(rate_per_s=0.5 * predicted / solo_s)
        use = {"node": {**USE["node"], "gpus": {}}, "jobs": {"3": USE["jobs"]["10000000"]}, "plain": ["3"]}
        token = speeds_token({"members": figures, "discipline": "fair", "use": use})
        slurm.jobs[pilot.job_id] = replace(slurm.jobs[pilot.job_id], comment=token)
        status = controller.cycle()
        path = tmp_path / "copy.json"
        write_status(path, status)
        shown = {job.job_id: job for job in refresh(read_status(path), view_of(slurm.snapshot())).jobs}
    assert shown[1].measured_speed == pytest.approx(planned[1].predicted_speed, rel=1e-3)
    assert shown[2].measured_speed == pytest.approx(0.5 * predicted, rel=1e-3)
    assert [shown[job].off_plan for job in (1, 2, 3)] == [False, True, False]
    assert shown[3].measured_speed is None
    assert shown[3].use["gpu_utilization"] == 0.25  # though it has not attached
    assert telemetry.sharing_plainly(told_in(token)) == {3}
    said = "\n".join(explanation(shown[2]))
    assert "differs from the plan by more than 20 %" in said
    assert "123,456,789 iterations done in this group, under fair." in said
    assert "propagate 12.3 + 12.3" in said
    assert "differs" not in "\n".join(explanation(shown[1]))


USE = {
    "node": {"cpu_cores": 12.3456, "cpu_count": 64, "mem_gib": 123.456, "disk_mib_per_s": 0.0,
             "network_mib_per_s": None, "gpus": {"3": {"utilization": 0.98765, "mem_gib": 60.123}}},
    "jobs": {str(10_000_000 + index): {"cpu_cores": 1.23456, "mem_gib": 3.4567, "disk_mib_per_s": 1234.5,
                                       "gpu_utilization": 0.25, "gpu_mem_gib": None} for index in range(4)},
}  # fmt: skip


def test_use_fits_the_comment_of_four_members_and_comes_back():
    report = told_of(several(4), use=USE)
    assert telemetry.node_use(report) == NodeUse(12.3, 64, 123, 0, None, {3: OneGpu(0.988, 60.1)})
    assert telemetry.job_use(report, 10_000_002) == JobUse(1.23, 3.46, 1230, 0.25, None)
    assert telemetry.job_use(report, 5) is None
    assert member_report(report, 10_000_003) is not None


def test_use_is_left_out_where_the_comment_would_be_too_long():
    gpus = {str(number): {"utilization": 0.123, "mem_gib": 60.1} for number in range(16)}
    report = told_of(several(6), use={**USE, "node": {**USE["node"], "gpus": gpus}})
    assert telemetry.node_use(report) is None
    assert member_report(report, 10_000_005).iterations == 123_456_789


@pytest.mark.parametrize(
    "use",
    ["1", "{}", '{"n":[1]}', '{"n":[-1,1,1,1,1]}', '{"n":["x",1,1,1,1]}', '{"n":[1,1,1,1,1,1]}',
     '{"n":[1e300,1,1,1,1]}',
     '{"n":[NaN,1,1,1,1]}', '{"n":[1,1,1,1,1],"g":{"x":[1,1]}}', '{"n":[1,1,1,1,1],"g":{"0":[2,1]}}',
     '{"n":[1,1,1,1,1],"g":{"0":3}}', '{"1":[1,2,3,4,5,6]}', '{"1":["a"]}', '{"1":[true]}'],
)  # fmt: skip
def test_use_that_cannot_be_true_is_none(use):
    report = told_in(f'muri-speed:{{"1":0.5,"u":{use}}}')
    if use != '{"n":[1]}':
        assert telemetry.node_use(report) is None
    assert telemetry.job_use(report, 1) is None
    assert member_report(report, 1) == MemberReport(0.5)


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
        gpu_utilization=st.floats(0, 1),
        confidence=st.floats(0, 1),
        warmup_iterations=st.integers(0, 10**4),
        dangers=st.none() | st.sets(st.sampled_from(sorted(DANGERS))).map(tuple),
    ),
    st.text(max_size=100),
)


def read_result(comment):
    return tags.parse_json(tags.token(comment, tags.PROFILE_PREFIX))


@given(results)
def test_every_detail_survives_the_comment(result):
    comment = comment_with("my own words", "token-1", result.to_dict())
    assert len(comment.encode()) <= MOST_BYTES
    assert comment.startswith("my own words ")
    found, measured = profile_in(read_result(comment), KEY, AT, math.inf), result.profile(KEY, AT)
    assert read_result(comment)["token"] == "token-1"
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
    found = profile_in(read_result(comment), KEY, AT, math.inf)
    assert found.stage_s == result.stage_s
    assert found.detail.confidence == 0.93
    assert found.detail.stage_p95_s is None
    longer = read_result(comment_with("x" * 1000, "t", result.to_dict()))
    assert profile_in(longer, KEY, AT, math.inf).detail == ProfileDetail()
    assert len(read_result(comment_with("", "t", {"error": "e" * 5000}))["error"]) == 300


TOLD = [{"detail": {"dangers": told}} for told in (3, [3], ["\x1b[2J"], ["a"] * 33)]
"""A user may have written this there."""


@pytest.mark.parametrize(
    "change",
    [{"load_s": "x"}, {"iteration_s": None}, {"load_s": -1}, {"detail": {"busy_s": 3}}, {"iterations": 66}, *TOLD],
)
def test_figures_that_cannot_be_true_are_refused(change):
    measured = DryRunResult((0.1, 0.2, 0.3, 0.4), 1.0).to_dict() | change
    with pytest.raises((ProfileError, TypeError, ValueError)):
        profile_in(measured, KEY, AT, 60.0)
