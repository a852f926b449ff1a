"""The course of a dry run: when it stops, and its figures."""

import os
import random
import subprocess
import sys

import pytest

from muri.profiler.dryrun.course import Course, TooShortError
from muri.profiler.dryrun.messages import DryRunError, DryRunRequest, DryRunResult, Limits
from muri.profiler.dryrun.steadiness import Circumstances, IterationSample, summarize
from muri.profiler.records import ProfileDetail
from muri.profiler.usage import Sample, Usage, with_usage

LOAD, PREPROCESS, PROPAGATE, _ = range(4)


class Script:
    """Iterations on a made-up clock: half of each is `load`, the rest `propagate`."""

    def __init__(self, limits=None):
        self.course = Course(limits or Limits())
        self.now_s = 0.0

    def iteration(self, length_s):
        start_s, self.now_s = self.now_s, self.now_s + length_s
        self.course.hold(LOAD, start_s, start_s + length_s / 2, 1.0, True)
        self.course.hold(PROPAGATE, start_s + length_s / 2, self.now_s, 1.0, True)
        return self.course.iteration(start_s, self.now_s)

    def run(self, lengths_s):
        for count, length_s in enumerate(lengths_s, start=1):
            if self.iteration(length_s):
                return count
        return None


def noisy(spread, seed=3):
    chance = random.Random(seed)
    while True:
        yield max(0.001, 0.1 * (1 + chance.gauss(0, spread)))


def test_a_steady_script_needs_no_more_than_it_takes_to_be_sure():
    script = Script()
    assert script.run([0.5] * 2 + [0.1] * 100) == 12
    result = script.course.result()
    assert result.stage_s == pytest.approx((0.05, 0, 0.05, 0))
    assert (result.iterations, result.detail.warmup_iterations, result.detail.confidence) == (10, 2, 1.0)
    assert "sure within 0.0%" in result.stopped


def test_noise_takes_more_iterations_but_never_over_40():
    few, many = Script(), Script()
    few.run(noisy(0.03))
    many.run(noisy(0.6))
    assert few.course.measured < many.course.measured == 40
    assert few.course.result().detail.confidence > 0.9 > many.course.result().detail.confidence
    assert "40 iterations" in many.course.stopped


@pytest.mark.parametrize("length_s", [0.5, 7.0, 25.0])
def test_never_over_the_seconds_of_steady_work(length_s):
    script = Script()
    script.run(length_s * factor for factor in (1.0, 1.3, 0.7, 1.1, 0.5) * 30)
    measured = script.course.windows[-script.course.measured :]
    assert measured[-1][1] - measured[0][0] <= 60.0
    assert script.course.result().iterations >= 1


def test_a_fixed_number_is_kept_to():
    script = Script(Limits(20, fixed_warmup=5))
    assert script.run([0.1] * 100) == 25
    assert script.course.result().detail.warmup_iterations == 5


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_script_that_ends_early_counts_and_one_that_ends_too_early_has_no_profile(count):
    script = Script()
    assert script.run([0.1] * count) is None
    with pytest.raises(TooShortError, match=f"ended after {count} iterations.*at least 3"):
        script.course.result()
    script.run([0.1] * (8 - count))
    assert (script.course.result().iterations, script.course.result().stopped) == (6, "the script ended")


def test_work_in_workers_that_is_told_late_is_attributed_to_its_time():
    course = Course(Limits(12, fixed_warmup=0))
    for step in range(12):
        start_s = step * 1.0
        course.hold(PROPAGATE, start_s, start_s + 0.4, 1.0, True)
        if step >= 1:  # a fetch of 0.9 s is known when the next iteration has begun
            course.hold(LOAD, start_s - 0.95, start_s - 0.05, 0.5, False)
        course.iteration(start_s, start_s + 1.0)
    result = course.result()
    assert result.stage_s == pytest.approx((0.55, 0, 0.4, 0))
    assert result.detail.busy_s == pytest.approx((0.9, 0, 0.4, 0))
    assert result.iterations == 11  # of the last one it is not known what workers did


def test_outliers_count_for_the_scatter_but_not_for_the_means():
    ordinary = [IterationSample((0.05, 0.0, 0.05, 0.0), 0.1)] * 19
    result = summarize([*ordinary, IterationSample((0.05, 0.0, 0.95, 0.0), 1.0)], Circumstances())
    assert (result.iteration_s, result.iterations) == (pytest.approx(0.1), 20)
    assert result.detail.iteration_cv > 1
    assert result.detail.iteration_p95_s == 0.1
    assert summarize([*ordinary[:15], *[IterationSample((0.0,) * 4, 1.0)] * 2], Circumstances()).iteration_s > 0.2


def test_limits_survive_the_environment(tmp_path):
    for limits in (Limits(), Limits(7, 2.5), Limits(20, fixed_warmup=10)):
        assert DryRunRequest.from_environment(DryRunRequest(limits, tmp_path / "r").environment()).limits == limits
    assert Limits.parse("auto") == Limits()


@pytest.mark.parametrize("text", ["auto:0:1", "auto:5", "auto:5:0", "auto:5:-1", "auto:x:1", "5", "5:5", "a:b", "::"])
def test_malformed_requests_say_what_would_be_valid(text):
    with pytest.raises(DryRunError, match=r"MURI_DRY_RUN=.*(for example|must be)"):
        Limits.parse(text)


def usage(cores, start_s=10.0):
    sample = {"over_s": 1.0, "cpu_cores": cores, "gpu_utilization": 0.5, "gpu_mem_gib": 2.0}
    steady = [Sample(at_s=start_s + step, host_mem_gib=1.0, **sample) for step in range(1, 6)]
    return Usage((Sample(at_s=start_s, over_s=1.0, cpu_cores=9.0, host_mem_gib=3.0), *steady))


def found():
    figures = DryRunResult((0.1, 0.0, 0.2, 0.0), 0.3, 0.0, 12, ProfileDetail(confidence=0.9), "enough")
    return figures.to_dict() | {"steady_since_s": 10.0}


def test_what_a_script_was_seen_to_use_completes_its_result():
    result = DryRunResult.from_dict(with_usage(found(), usage(0.8)))
    assert (result.detail.cpu_cores, result.detail.gpu_utilization) == (pytest.approx(0.8), pytest.approx(0.5))
    assert (result.detail.host_mem_gib, result.gpu_mem_gib, result.detail.confidence) == (3.0, 2.0, 0.9)


def test_what_others_hold_up_lowers_the_confidence():
    script = Script()
    script.run(noisy(0.03))
    calm, little, much = (script.course.result(disturbed=share) for share in (0.0, 0.02, 0.06))
    assert calm.detail.confidence > little.detail.confidence > much.detail.confidence == 0.0
    assert "held it up for 6% of the time" in much.stopped
    assert "held it up" not in calm.stopped


def test_a_busy_neighbor_on_the_same_core_is_noticed():
    cpu = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{cpu}}})\n"
    measure = (
        "from muri.profiler.dryrun.course import Disturbance; import time\n"
        "found = Disturbance(); until = time.monotonic() + 0.5\n"
        "while time.monotonic() < until: pass\n"
        "print(found.share())"
    )
    neighbor = "print(1, flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", pinned + neighbor], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            done = subprocess.run([sys.executable, "-c", pinned + measure], capture_output=True, check=True, text=True)
        finally:
            process.kill()
    assert 0.05 < float(done.stdout) <= 1.0
