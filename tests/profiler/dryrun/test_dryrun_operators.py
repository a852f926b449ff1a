"""What operators under PyTorch's profiler add to the stage marks."""

from types import SimpleNamespace

import pytest

from muri.launcher.script.script_facts import clock_offset_s, operators_of
from muri.profiler.dryrun.attribution import Interval, Operator, refine, stage_of
from muri.profiler.dryrun.messages import DryRunResult

LOAD, PREPROCESS, PROPAGATE, SYNCHRONIZE = range(4)
HOLDS = [Interval(LOAD, 0, 1, own=True), Interval(PROPAGATE, 2, 9, own=True)]
RESULT = DryRunResult((0.1, 0.0, 0.7, 0.0), 1.0)


def refined(*operators):
    return refine(RESULT, [(0, 10)], HOLDS, operators)


def test_a_gpu_that_runs_only_collectives_is_the_networks():
    found = refined(Operator(PROPAGATE, 2, 6, True), Operator(SYNCHRONIZE, 5, 9, True))
    assert found.stage_s == pytest.approx((0.1, 0.0, 0.4, 0.3))
    assert found.detail.gpu_utilization == pytest.approx(0.4)
    assert found.detail.busy_s == pytest.approx((0.1, 0.0, 0.4, 0.3))


def test_operators_outside_of_all_stages_are_the_cpus():
    assert refined(Operator(PREPROCESS, 1, 4)).stage_s == pytest.approx((0.1, 0.1, 0.7, 0.0))
    assert refined(Operator(PREPROCESS, 3, 4)).stage_s == RESULT.stage_s  # within propagate
    fetch = Operator(LOAD, 1, 2), Operator(PREPROCESS, 1.2, 1.9)
    assert refined(*fetch).stage_s == pytest.approx((0.1, 0.07, 0.7, 0.0))  # what is left of the fetch is too little


def test_shares_below_the_threshold_change_nothing():
    assert refined(Operator(PREPROCESS, 1, 1.4), Operator(SYNCHRONIZE, 9.0, 9.4)).stage_s == RESULT.stage_s
    assert refine(RESULT, [], HOLDS, [Operator(PREPROCESS, 1, 4)]) == RESULT


def test_an_iteration_that_was_held_up_does_not_count():
    computing = [Operator(PREPROCESS, start, start + 8) for start in (0, 10, 50)]
    windows = [(0, 10), (10, 50), (50, 60)]
    found = refine(DryRunResult((0.0, 0.0, 0.0, 0.0), 1.0), windows, [], computing)
    assert found.stage_s == pytest.approx((0.0, 0.8, 0.0, 0.0))


def test_the_clocks_are_matched_where_nothing_came_between():
    anchors = [(1.0, 1.5), (2.0, 2.001), (3.0, 3.2)]
    assert clock_offset_s(anchors, [0.01, 0.5005, 1.1]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="3 marks were made and 4 found"):
        clock_offset_s(anchors, [0.01, 0.5005, 1.1, 1.2])


@pytest.mark.parametrize(
    ("name", "on_gpu", "stage"),
    [
        ("aten::mm", False, PREPROCESS),
        ("gloo:all_reduce", False, SYNCHRONIZE),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", False, LOAD),
        ("Optimizer.step#SGD.step", False, None),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", True, SYNCHRONIZE),
        ("ampere_sgemm_128x64_nn", True, PROPAGATE),
    ],
)
def test_names_tell_the_resource(name, on_gpu, stage):
    assert stage_of(name, on_gpu=on_gpu) == stage


def event(name, device, start_ns, thread=1):
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: SimpleNamespace(name=device),
        start_ns=lambda: start_ns,
        duration_ns=lambda: 1_000_000,
        start_thread_id=lambda: thread,
    )


def test_events_of_a_gpu_as_kineto_has_them():
    """A stand-in: this runs without a GPU."""
    events = [
        event("aten::mm", "CPU", 0),
        event("aten::mm", "CPU", 0, thread=2),
        event("ProfilerStep#3", "CPU", 0),
        event("ProfilerStep#3", "CUDA", 0),
        event("sgemm", "CUDA", 2_000_000, thread=0),
    ]
    found = operators_of(events, 5.0, thread=1)
    assert [(one.stage, one.on_gpu) for one in found] == [(PREPROCESS, False), (PROPAGATE, True)]
    assert found[1].start_s == pytest.approx(5.002)
    assert found[1].end_s == pytest.approx(5.003)
