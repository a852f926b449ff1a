"""The word muri-report in AdminComment, and how a pilot job's GPU time is split among its members."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import MemberReport
from muri.slurm_plugin.records.usage import SharingReport, alone_s, parse_report, split_gpu_time, with_report

FULL = SharingReport(
    pilot=7, gpu_count=2, gpu_s=81.5, alone_s=60.0, basis="iterations", iterations=600, partners=(2, 3),
    stage_s=(0.07, 0.01, 0.01, 0.01), wait_s=(0.0, 0.002, 0.0, 0.0),
)  # fmt: skip


@pytest.mark.parametrize("report", [FULL, SharingReport(7, 1, 12.5), SharingReport(7, 1, 0.0, 3.0, "plan", 0, (9,))])
def test_a_report_comes_back_as_it_was_written(report):
    assert parse_report(with_report("muri:model=m1 site:x", report)) == report


def test_a_report_replaces_what_an_ended_job_needs_no_more():
    state = tags.format_state(tags.MemberState(7, tags.Original("gres/gpu:1", "", 4, 4, 0, 3600)))
    first = with_report(f"site:a muri:model=m1,batch-size=8 muri-state:{state}", FULL)
    assert first.startswith("site:a muri:model=m1,batch-size=8 muri-report:1,pilot=7,")
    assert not set("\"'`") & set(first)  # sacctmgr would change them
    assert with_report(first, FULL) == first


def test_a_long_list_of_partners_is_cut():
    report = parse_report(with_report("", SharingReport(7, 1, 1.0, partners=tuple(range(10, 40)))))
    assert report.partners == tuple(range(10, 18))


@pytest.mark.parametrize(
    "word",
    [
        "", "muri-report:", "muri-report:2,pilot=7,gpus=1,gpu_s=3", "muri-report:1,gpus=1,gpu_s=3",
        "muri-report:1,pilot=x,gpus=1,gpu_s=3", "muri-report:1,pilot=7,gpus=1,gpu_s=nan",
        "muri-report:1,pilot=7,gpus=1,gpu_s=3,held=1/2,wait=1/2", "muri-report:1,pilot=7,gpus=1,gpu_s=-3",
        "muri-report:1,pilot=7,gpus=1,gpu_s=3,by=iterations",
    ],
)  # fmt: skip
def test_a_damaged_report_is_none(word):
    assert parse_report(word) is None


@pytest.mark.parametrize(("iterations", "known"), [(110, (11.0, "iterations")), (770, (6.0, "plan"))])
def test_iterations_that_a_run_had_no_time_for_are_not_counted(iterations, known):
    measured = MemberReport(0.6, iterations=iterations)
    assert alone_s(10.0, 0.6, 0.1, measured) == known


def test_gpu_time_is_split_among_those_that_run():
    # Alone for 10 s, together for 20 s, then the other alone for 30 s.
    split = split_gpu_time(1, (0, 60), {1: (0, 30), 2: (10, 60)})
    assert split == {1: 20.0, 2: 40.0}


def test_idle_time_goes_to_who_comes_next_and_at_last_to_who_was_last():
    split = split_gpu_time(2, (0, 100), {1: (5, 10), 2: (20, 90)})
    assert split == {1: 2 * 10.0, 2: 2 * 90.0}


def test_a_member_that_never_ran_gets_nothing():
    assert split_gpu_time(1, (0, 10), {1: (0, 10), 2: (12, 15), 3: (4, 4)}) == {1: 10.0, 2: 0.0, 3: 0.0}
    assert split_gpu_time(1, (0, 10), {1: (12, 15)}) == {1: 0.0}


SPANS = st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda each: (each[0], each[0] + each[1]))


@given(st.dictionaries(st.integers(1, 9), SPANS, min_size=1, max_size=5), st.integers(1, 8))
def test_no_gpu_second_is_lost_or_given_twice(spans, gpu_count):
    split = split_gpu_time(gpu_count, (0, 100), spans)
    assert sum(split.values()) == pytest.approx(100 * gpu_count)
    assert min(split.values()) > 0
