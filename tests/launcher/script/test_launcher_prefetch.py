"""One batch ahead: the same batches in the same order, overlap, errors where they belong, no thread left."""

import contextlib
import gc
import queue
import threading
from pathlib import Path

import pytest
from launcher_harness import Launcher, ends
from polling import DEADLINE_S, until

from muri.launcher.job.stage_clock import Gate, StageClock
from muri.launcher.script import script_clock, stages

LOAD, PROPAGATE = 0, 2


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> StageClock:
    """The clock of the script that runs alone."""
    clock = StageClock()
    monkeypatch.setattr(script_clock._provider, "current", lambda: clock)
    return clock


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def no_thread_left() -> None:
    until(lambda: not threads(), "the end of the thread")


def test_batches_and_their_count_stay_the_same(clock: StageClock) -> None:
    for count in (0, 1, 2, 7):
        assert list(stages.batches([None] * count, prefetch=1)) == [None] * count
        assert list(stages.batches(range(count), prefetch=1)) == list(range(count))
    assert clock.iterations == 20
    no_thread_left()


def test_next_batch_is_fetched_while_the_loop_works() -> None:
    reached = [threading.Event() for _ in range(4)]

    def loader():
        for index, event in enumerate(reached):
            event.set()
            yield index

    for index in stages.batches(loader(), prefetch=1):
        assert index == 3 or reached[index + 1].wait(timeout=DEADLINE_S)
        assert index >= 2 or not reached[index + 2].is_set()  # one ahead, not two
    no_thread_left()


def test_shuffling_seed_and_iterator_come_from_the_callers_thread() -> None:
    idents = []

    class Loader:
        def __iter__(self):
            idents.append(threading.get_ident())  # where a DataLoader draws its base seed

            def draw():
                idents.append(threading.get_ident())  # where a RandomSampler draws its own
                yield from range(3)
                idents.append(threading.get_ident())

            return draw()

    assert list(stages.batches(Loader(), prefetch=1)) == [0, 1, 2]
    assert idents[:2] == [threading.get_ident()] * 2
    assert idents[2] != threading.get_ident()


@pytest.mark.parametrize("bad", [0, 2])
def test_error_comes_in_place_of_its_batch(bad: int) -> None:
    def loader():
        yield from range(bad)
        raise ZeroDivisionError("broken sample")

    seen = []
    with pytest.raises(ZeroDivisionError, match="broken sample"):
        seen.extend(iter(stages.batches(loader(), prefetch=1)))
    assert seen == list(range(bad))
    no_thread_left()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_loader_is_not_read_after_the_loop_was_left(clock: StageClock, error: type[Exception] | None) -> None:
    read = []

    def loader():
        for index in range(100):
            read.append(index)
            yield index

    def loop() -> None:
        for index in stages.batches(loader(), prefetch=1):
            if index == 3:
                if error is not None:
                    raise error
                break

    with contextlib.suppress(RuntimeError):
        loop()
    count = len(read)
    no_thread_left()
    assert len(read) == count <= 5
    assert clock.iterations == 4


def test_forgotten_iterator_ends_its_thread() -> None:
    iterator = iter(stages.batches(range(100), prefetch=1))
    assert next(iterator) == 0
    assert threads()
    del iterator
    gc.collect()
    no_thread_left()


def test_fetch_is_a_lane_and_its_wait_is_the_loops_as_far_as_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateGate(Gate):
        """Someone else reads for a while before the second batch may be read."""

        def __init__(self) -> None:
            self.by: list[tuple[str, int]] = []
            self.free = threading.Event()

        def acquire(self, stage: int) -> float:
            name = threading.current_thread().name
            self.by.append((name, stage))
            if name == "prefetch":
                assert self.free.wait(timeout=DEADLINE_S)
            return 0.0

    time_s = [0.0]
    gate = LateGate()
    clock = StageClock(gate, now=lambda: time_s[0])
    monkeypatch.setattr(script_clock._provider, "current", lambda: clock)

    class Watched(queue.SimpleQueue):
        """What the loop waits at: the resource is free 3 s after the loop has begun to."""

        def get(self, *arguments, **options):
            if not gate.free.is_set():
                time_s[0] += 3.0
                gate.free.set()
            return super().get(*arguments, **options)

    monkeypatch.setattr(queue, "SimpleQueue", Watched)
    for batch in stages.batches([1, 2], prefetch=1):
        if batch == 1:
            until(lambda: ("prefetch", LOAD) in gate.by, "the fetch of the second batch")
            time_s[0] += 2.0  # the fetch waits already, but not the loop
    record = clock.recent[1]
    assert (record.iteration_s, record.wait_s[LOAD], record.busy_s) == (3.0, 3.0, 0.0)


def test_close_gives_up_on_a_loader_that_hangs(monkeypatch, caplog) -> None:
    monkeypatch.setattr(stages, "CLOSE_TIMEOUT_S", 0.2)
    go_on = threading.Event()

    hangs = threading.Event()

    def loader():
        yield 1
        hangs.set()
        go_on.wait(timeout=DEADLINE_S)
        yield 2

    for _ in stages.batches(loader(), prefetch=1):
        assert hangs.wait(timeout=DEADLINE_S)
        break
    assert "still being fetched" in caplog.text
    go_on.set()
    no_thread_left()


SCRIPT = """
    import threading, time, muri
    def loader():
        for index in range(40):
            time.sleep(0.002)
            yield index
    seen = []
    for batch in muri.batches(loader(), prefetch=1):
        with muri.stage("propagate"):
            time.sleep(0.002)
        seen.append(batch)
    assert seen == list(range(40))
    global_iterator = iter(muri.batches(loader(), prefetch=1))
    print(next(global_iterator), "and the script ends")
"""


def threads_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_members_prefetch_in_a_group_and_leave_no_thread_behind(launcher: Launcher) -> None:
    runtime = launcher.threads("101", "102")
    script = launcher.script(SCRIPT)
    # It serves before all its own threads have started; once a member has ended, they have.
    assert ends(launcher.member("101", launcher.script("print('first')", "first.py"))) == 0
    before = threads_of(runtime.pid)
    for _ in range(2):
        members = [launcher.member(name, script) for name in ("101", "102")]
        assert [ends(member) for member in members] == [0, 0], launcher.err("101") + launcher.err("102")

    until(lambda: threads_of(runtime.pid) <= before, "the end of the threads")
    assert launcher.out("101").count("0 and the script ends") == 2
