"""Stage and iteration times, with a clock that the test moves."""

import threading

import pytest

from muri.launcher.job.stage_clock import GpuTimes, HostPace, IterationRecord, StageClock
from muri.launcher.script import script_clock, stages

LOAD, PREPROCESS, PROPAGATE, SYNCHRONIZE = range(4)


class FakeTime:
    """Seconds that pass when told to, and the CPU seconds among them."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def compute(self, seconds: float) -> None:
        self.seconds += seconds
        self.cpu_seconds += seconds

    def within(self, clock: StageClock, stage: int, seconds: float, **options: bool) -> None:
        clock.enter(stage, **options)
        self.seconds += seconds
        clock.leave()


class SlowGate:
    """Every grant takes a second; notes who holds what."""

    asks = True

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.held: list[int] = []
        self.records: list[IterationRecord] = []
        self.yields = 0

    def acquire(self, stage: int) -> float:
        assert not self.held, "a session holds one resource at a time"
        self.held.append(stage)
        self.time.seconds += 1.0
        return 1.0

    def release(self, stage: int) -> None:
        self.held.remove(stage)

    def yield_point(self, stage: int) -> float:
        assert stage in self.held
        self.yields += 1
        return 0.0

    def iteration_done(self, record: IterationRecord) -> None:
        self.records.append(record)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def gate(time: FakeTime) -> SlowGate:
    return SlowGate(time)


@pytest.fixture
def clock(time: FakeTime, gate: SlowGate, monkeypatch: pytest.MonkeyPatch) -> StageClock:
    """The clock that `muri.stage` uses within the test."""
    clock = StageClock(gate, now=time)
    monkeypatch.setattr(script_clock._provider, "current", lambda: clock)
    return clock


def test_batches_fetch_is_load_and_the_next_request_ends_the_iteration(clock, gate, time) -> None:
    def loader():
        for batch in "abc":
            time.seconds += 5.0
            yield batch

    seen = []
    for batch in stages.batches(loader()):
        with stages.stage("propagate"):
            time.seconds += 2.0
        time.seconds += 0.5  # outside of stages
        seen.append(batch)
    assert seen == ["a", "b", "c"]
    assert clock.iterations == 3
    assert gate.records[1] == IterationRecord(9.5, (5.0, 0.0, 2.0, 0.0), (1.0, 0.0, 1.0, 0.0))
    assert gate.records[1].busy_s == 7.5
    assert clock.recent_iteration_s() == pytest.approx((10.5 + 9.5 + 9.5) / 3)  # iter() waited once more
    assert gate.held == []


def test_inner_stage_wins_and_outer_resumes(clock, gate, time) -> None:
    with stages.stage("preprocess"):
        time.seconds += 3.0
        with stages.stage("load"):
            assert gate.held == [LOAD]
            time.seconds += 4.0
        assert gate.held == [PREPROCESS]
        time.seconds += 2.0
    assert clock.stage_s == [4.0, 5.0, 0.0, 0.0]
    assert clock.wait_s == [1.0, 2.0, 0.0, 0.0]
    assert gate.held == []


def test_same_stage_inside_itself_is_a_yield_point(clock, gate, time) -> None:
    with stages.stage("propagate"):
        for _ in range(3):
            with stages.stage("propagate"):
                time.seconds += 1.0
        stages.yield_point()
    assert gate.yields == 4
    assert clock.stage_s == [0.0, 0.0, 3.0, 0.0]
    stages.yield_point()  # outside of a stage: nothing to yield
    assert gate.yields == 4


def test_without_batches_the_first_stage_begins_an_iteration(clock, gate, time) -> None:
    for _ in range(3):
        for name in ("preprocess", "propagate", "propagate", "synchronize"):
            with stages.stage(name):
                time.seconds += 1.0
    assert clock.iterations == 2  # the third has not ended yet
    assert gate.records[0].stage_s == (0.0, 1.0, 2.0, 1.0)


def test_step_ends_iterations_of_a_script_that_marks_stages(clock, gate, time) -> None:
    stages.step()
    for _ in range(3):
        for name in ("load", "propagate", "load"):
            with stages.stage(name):
                time.seconds += 1.0
        stages.step()
    for _ in stages.batches("ab"):
        pass
    assert clock.iterations == 3
    assert gate.records[0].stage_s == (2.0, 0.0, 1.0, 0.0)


def test_leaving_the_loop_early_counts_the_last_iteration(clock) -> None:
    for batch in stages.batches(range(10)):
        if batch == 4:
            break
    assert clock.iterations == 5


def test_epochs_do_not_count_the_time_between_them(clock, time) -> None:
    for _ in range(2):
        for _ in stages.batches([1, 2]):
            pass
        time.seconds += 100.0  # validation
    assert clock.iterations == 4
    assert max(record.iteration_s for record in clock.recent) < 10


def test_exception_in_a_stage_releases_its_resource(clock, gate) -> None:
    with pytest.raises(ZeroDivisionError), stages.stage("load"), stages.stage("propagate"):
        raise ZeroDivisionError
    assert gate.held == []


def test_stage_in_another_thread_is_timed_but_not_gated(clock, gate, time) -> None:
    def prefetch() -> None:
        with stages.stage("load"):
            time.seconds += 7.0

    with stages.stage("propagate"):
        in_thread(prefetch)
        assert gate.held == [PROPAGATE]
    assert clock.stage_s == [0.0, 0.0, 7.0, 0.0]  # each second once
    assert clock.hidden_s[LOAD] == 7.0


@pytest.mark.parametrize(
    ("name", "near"),
    [("propogate", "'propagate'"), ("sync", "'synchronize'"), ("Load", "'load'"), ("", None), (3, None)],
)
def test_unknown_stage_names_the_valid_ones(name, near) -> None:
    with pytest.raises(stages.StageNameError) as caught:
        stages.stage(name)
    assert "load, preprocess, propagate, synchronize" in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == (near is not None)
    assert near is None or near in str(caught.value)


def in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(timeout=30)


def test_lane_has_stages_and_waits_of_its_own(time) -> None:
    gate = SlowGate(time)
    gate.acquire = lambda stage: gate.held.append(stage) or 0.5  # several at once: one for each thread
    clock = StageClock(gate, now=time)

    def prefetch() -> None:
        with clock.lane(), clock.lane():
            clock.enter(LOAD)
            time.seconds += 7.0
            clock.yield_point()
            clock.enter(PREPROCESS)  # suspends the lane's own stage, not the owner's
            assert gate.held == [PROPAGATE, PREPROCESS]
            clock.leave()
            clock.leave()
        clock.enter(LOAD)  # no lane any more
        assert gate.held == [PROPAGATE]
        clock.leave()

    clock.ask_batch()
    clock.enter(PROPAGATE)
    in_thread(prefetch)
    assert gate.held == [PROPAGATE]
    assert gate.yields == 1
    clock.leave()
    clock.end_iteration()
    assert clock.stage_s == [0.0, 0.0, 7.0, 0.0]
    assert clock.hidden_s == [7.0, 0.0, 0.0, 0.0]
    assert clock.wait_s == [1.0, 0.5, 0.5, 0.0]
    assert clock.recent[0].wait_s == (0.0, 0.0, 0.5, 0.0)  # the loop itself waited once


def test_lane_ends_open_stages_and_does_not_mark_iterations(clock, gate) -> None:
    def leave_open() -> None:
        with clock.lane():
            clock.enter(LOAD)

    for _ in range(3):
        in_thread(leave_open)
    assert gate.held == []
    assert clock.iterations == 0
    clock.enter(PREPROCESS)  # the first thread outside of a lane owns the clock
    assert gate.held == [PREPROCESS]


def test_the_thread_that_asks_for_batches_owns_the_clock_whoever_was_first(clock, gate) -> None:
    in_thread(lambda: (clock.enter(LOAD), clock.leave()))
    clock.ask_batch()
    clock.enter(PROPAGATE)
    assert gate.held == [PROPAGATE]


def test_at_boundary_is_called_with_the_iteration_counted_and_nothing_held(clock, gate) -> None:
    seen = []
    clock.at_boundary.append(lambda: seen.append((clock.iterations, list(gate.held))))
    with stages.stage("preprocess"):  # a loop inside a stage
        for _ in stages.batches([1, 2]):
            with stages.stage("propagate"):
                pass
        assert gate.held == [PREPROCESS]
    assert clock.explicit
    assert seen == [(1, []), (2, [])]


@pytest.fixture
def hooked(time: FakeTime) -> StageClock:
    """The clock of a script whose stages are found by hooks."""
    clock = StageClock(now=time, cpu_now=lambda: time.cpu_seconds)
    clock.explains_gaps = True
    return clock


def test_computing_outside_of_stages_is_preprocess_and_sleeping_is_not(hooked, time) -> None:
    hooked.ask_batch()
    time.compute(2.0)
    time.seconds += 1.0
    time.within(hooked, PROPAGATE, 5.0)
    time.compute(0.5)  # metrics, at the end of the iteration
    hooked.ask_batch()
    assert hooked.recent[0] == IterationRecord(8.5, (0.0, 2.5, 5.0, 0.0), (0.0,) * 4)


def test_time_between_forward_and_backward_is_propagate(hooked, time) -> None:
    hooked.ask_batch()
    time.within(hooked, PROPAGATE, 1.0)
    time.seconds += 0.25  # the loss
    time.within(hooked, PROPAGATE, 2.0, joins=True)
    time.seconds += 4.0  # the environment of reinforcement learning, until the next forward pass
    time.within(hooked, PROPAGATE, 0.0)
    time.within(hooked, LOAD, 0.0)
    time.seconds += 3.0  # after another stage
    time.within(hooked, PROPAGATE, 0.0, joins=True)
    hooked.ask_batch()
    assert hooked.recent[0].stage_s == (0.0, 0.0, 3.25, 0.0)


def test_waiting_for_workers_is_what_they_did(hooked, time, gate) -> None:
    seen = []
    hooked.on_hold = lambda *hold: seen.append(hold)
    hooked.ask_batch()
    assert hooked.begin_fetch_wait()
    time.seconds += 8.0
    hooked.end_fetch_wait(load_share=0.25)
    hooked.ask_batch()
    assert hooked.recent[0].stage_s == (2.0, 6.0, 0.0, 0.0)
    assert seen == [(LOAD, 0.0, 2.0, 1.0, True), (PREPROCESS, 2.0, 8.0, 1.0, True)]
    hooked.enter(PROPAGATE)
    assert not hooked.begin_fetch_wait()  # the stage's time


def test_script_that_marks_its_stages_says_what_the_rest_is(hooked, time) -> None:
    hooked.become_explicit()
    hooked.ask_batch()
    time.compute(2.0)
    hooked.ask_batch()
    assert hooked.recent[0].stage_s == (0.0,) * 4


def test_time_of_the_gpu_owns_what_no_other_stage_does(hooked, time) -> None:
    class Streams(HostPace):
        counts_host_time = False

        def iteration_ended(self) -> GpuTimes:
            return GpuTimes(held_s=9.0)

    hooked.gpu = Streams()
    hooked.ask_batch()
    time.within(hooked, LOAD, 4.0)
    time.within(hooked, PROPAGATE, 1.0)  # kernels are only queued
    time.seconds += 5.0
    hooked.ask_batch()
    assert hooked.recent[0].stage_s == (4.0, 0.0, 6.0, 0.0)
    assert hooked.hidden_s[PROPAGATE] == 3.0
