"""How fast members are beside each other, with and without promised speeds: real threads in virtual time."""

from dataclasses import dataclass

import pytest
from virtual_clock import VirtualClock

from muri.launcher.arbitration.arbiter import Arbiter, Waiter, WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.arbitration.fairness import Promises
from muri.launcher.job.stage_clock import PREPROCESS, STAGE_COUNT, IterationRecord

GPU = 2
MINUTE_S = 60.0


@dataclass(frozen=True)
class Script:
    """An iteration: (resource, seconds) one after the other, None for time outside of stages."""

    steps: tuple[tuple[int | None, float], ...]
    piece_s: float = 1e9
    min_speed: float = 0.0
    known: bool = True

    @property
    def solo_s(self) -> float:
        return sum(seconds for _, seconds in self.steps)


def train(clock: VirtualClock, arbiter: Arbiter, member: str, script: Script, ends_s: list[float]) -> None:
    """Iterate until the member is told to leave; note when each iteration ended."""
    arbiter.join(member, script.solo_s if script.known else None, script.min_speed)
    try:
        while True:
            begun_s, wait_s, stage_s = clock(), [0.0] * STAGE_COUNT, [0.0] * STAGE_COUNT
            for resource, seconds in script.steps:
                if resource is None:
                    clock.sleep(seconds)
                    continue
                stage_s[resource] += seconds
                wait_s[resource] += arbiter.acquire(member, resource)
                left_s = seconds
                while left_s > 1e-9:
                    clock.sleep(min(script.piece_s, left_s))
                    left_s -= script.piece_s
                    if left_s > 1e-9:
                        wait_s[resource] += arbiter.yield_point(member, resource)
                arbiter.release(member, resource)
            ends_s.append(clock())
            arbiter.iteration_done(member, IterationRecord(clock() - begun_s, tuple(stage_s), tuple(wait_s)))
    except WaitInterruptedError:
        return


def speeds(
    scripts: list[Script], window_s: float = MINUTE_S, warmup_s: float = 10.0, **options: int
) -> tuple[float, ...]:
    """Normalized speeds of members beside each other, after a warm-up."""
    clock = VirtualClock()
    arbiter = FairArbiter(clock, **options)  # type: ignore[arg-type]
    names = [str(number) for number in range(1, len(scripts) + 1)]
    ends_s: dict[str, list[float]] = {name: [] for name in names}
    threads = [
        clock.start(train, clock, arbiter, name, script, ends_s[name])
        for name, script in zip(names, scripts, strict=True)
    ]
    clock.sleep(warmup_s + window_s)
    for name in names:
        arbiter.leave(name)
    clock.finish(*threads)
    counted = [sum(warmup_s <= end_s < warmup_s + window_s for end_s in ends_s[name]) for name in names]
    return tuple(count * script.solo_s / window_s for count, script in zip(counted, scripts, strict=True))


def hold(clock: VirtualClock, arbiter: Arbiter, name: str, seconds: float) -> None:
    """Use the GPU once."""
    arbiter.acquire(name, GPU)
    clock.sleep(seconds)
    arbiter.release(name, GPU)


GREEDY = Script(((GPU, 0.5), (None, 0.005)))
POLITE = Script(((GPU, 0.5), (None, 0.005)), piece_s=0.01)


def short(min_speed: float, *, known: bool = True) -> Script:
    """Iterations of 100 ms, half of them on the GPU."""
    return Script(((0, 0.02), (PREPROCESS, 0.02), (GPU, 0.05), (3, 0.01)), min_speed=min_speed, known=known)


@pytest.mark.parametrize("promised", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("known", [True, False], ids=["known", "learned"])
@pytest.mark.parametrize("greedy", [GREEDY, POLITE], ids=["whole stages", "yield points"])
def test_promise_is_kept_beside_three_greedy_partners(promised: float, known: bool, greedy: Script) -> None:
    own, *others = speeds([short(promised, known=known), greedy, greedy, greedy])
    assert own >= promised - 0.02
    assert min(others) > 0


def test_member_does_not_get_much_more_than_its_promise() -> None:
    own, *others = speeds([short(0.8), GREEDY, GREEDY, GREEDY])
    assert own < 0.82
    assert sum(others) > 0.2


def test_no_resource_is_kept_free_where_that_could_keep_a_collective_of_another_rank_from_ending() -> None:
    assert speeds([short(0.8), GREEDY, GREEDY, GREEDY], several_ranks=True)[0] < 0.3


def test_stage_longer_than_any_credit_still_begins() -> None:
    own, *others = speeds([short(0.8), *[Script(((GPU, 5.0), (None, 0.1)))] * 3], window_s=300.0)
    assert own >= 0.78
    assert min(others) > 0.03


@pytest.mark.parametrize("promises", [(0.8, 0.6), (0.5, 0.9)])
def test_two_promises_are_kept(promises: tuple[float, float]) -> None:
    first = Script(((GPU, 0.02), (PREPROCESS, 0.08)), min_speed=promises[0])
    second = Script(((GPU, 0.05), (0, 0.15)), min_speed=promises[1])
    found = speeds([first, second, GREEDY, GREEDY])
    assert all(speed >= promised - 0.02 for speed, promised in zip(found, promises, strict=False))


def test_promises_that_cannot_be_kept_are_missed_by_all_alike() -> None:
    heavy = Script(((GPU, 0.09), (PREPROCESS, 0.01)), min_speed=0.5)
    found = speeds([heavy] * 4)
    assert max(found) - min(found) < 0.05
    assert sum(found) > 1.05  # the GPU is never kept free for one of them


def test_nobody_waits_longer_than_a_minute_for_the_promises_of_others() -> None:
    heavy = Script(((GPU, 0.09), (PREPROCESS, 0.01)), min_speed=0.9)
    found = speeds([heavy, heavy, GREEDY], window_s=200.0)
    assert found[2] * 200.0 / GREEDY.solo_s >= 3


def test_a_minute_of_waiting_does_not_make_a_long_stage_go_on_for_ever() -> None:
    clock = VirtualClock()
    arbiter = FairArbiter(clock)
    arbiter.join("1", 0.1, 0.9)
    arbiter.join("2", 100.0)
    arbiter.acquire("1", GPU)
    order: list[str] = []

    def long_stage() -> None:
        arbiter.acquire("2", GPU)
        clock.sleep(0.01)
        order.append("2 yields")
        arbiter.yield_point("2", GPU)
        order.append("2 goes on")

    threads = [clock.start(long_stage)]
    clock.sleep(70.0)
    arbiter.release("1", GPU)
    arbiter.acquire("1", GPU)
    order.append("1 goes first")
    arbiter.release("1", GPU)
    clock.finish(*threads)
    assert order == ["2 yields", "1 goes first", "2 goes on"]


def test_many_cores_are_not_kept_free_while_one_is_left() -> None:
    script = Script(((PREPROCESS, 0.5), (None, 0.005)))
    found = speeds([Script(((PREPROCESS, 0.05), (None, 0.05)), min_speed=0.9), script, script], cpus=3)
    assert min(found) > 0.99


def test_resource_is_not_kept_for_a_member_that_stays_away() -> None:
    clock = VirtualClock()
    arbiter = FairArbiter(clock)
    ends_s: dict[str, list[float]] = {"1": [], "2": [], "3": []}
    threads = [clock.start(train, clock, arbiter, name, GREEDY, ends_s[name]) for name in ("2", "3")]
    arbiter.join("1", 0.1, 0.9)
    for _ in range(300):
        arbiter.acquire("1", GPU)
        clock.sleep(0.05)
        arbiter.release("1", GPU)
        clock.sleep(0.05)
        arbiter.iteration_done("1", IterationRecord(0.1, (0, 0, 0.05, 0), (0, 0, 0, 0)))
    since_s = clock()
    clock.sleep(20.0)  # it validates, say
    done = sum(end_s > since_s for ends in ends_s.values() for end_s in ends)
    assert done >= 38  # all but half a second
    for name in ends_s:
        arbiter.leave(name)
    clock.finish(*threads)


@pytest.mark.parametrize("end", ["leave", "interrupt"])
def test_what_was_kept_free_is_given_on_when_someone_goes(end: str) -> None:
    clock = VirtualClock()
    arbiter = FairArbiter(clock)
    arbiter.join("1", 0.1, 0.9)
    for name in ("2", "3"):
        arbiter.join(name, 0.5)

    for name, seconds in (("1", 0.1), ("2", 0.5), ("3", 0.5), *[("1", 0.001)] * 10):
        hold(clock, arbiter, name, seconds)
    arbiter.acquire("1", GPU)
    got: list[tuple[str, float]] = []

    def wait(name: str) -> None:
        try:
            arbiter.acquire(name, GPU)
        except WaitInterruptedError:
            return
        got.append((name, clock()))

    threads = [clock.start(wait, "2")]
    clock.settle()
    threads.append(clock.start(wait, "3"))
    clock.settle()
    arbiter.release("1", GPU)
    clock.settle()
    assert got == []  # kept for "1", which is behind
    at_s = clock()
    if end == "leave":
        arbiter.leave("1")
        clock.settle()
        assert got == [("2", at_s)]
    else:
        arbiter.interrupt("2")  # which was to look again in time
        clock.sleep(30.0)
        assert [name for name, _ in got] == ["3"]
    for name in ("1", "2", "3"):
        arbiter.leave(name)
    clock.finish(*threads)


class Overtaken(FairArbiter):
    """A grant to a nudged thread happens before the thread has come to look."""

    def _look(self, waiter: Waiter) -> float:
        self.leave("1")
        return super()._look(waiter)


def test_grant_between_a_nudge_and_the_look_that_follows_is_not_lost() -> None:
    clock = VirtualClock()
    arbiter = Overtaken(clock)
    arbiter.join("1", 0.1, 0.9)
    arbiter.join("2", 0.5)

    for name, seconds in (("1", 0.1), ("2", 1.0), *[("1", 0.001)] * 10):
        hold(clock, arbiter, name, seconds)
    clock.finish(clock.start(hold, clock, arbiter, "2", 0.5))
    assert arbiter.holders()[GPU] is None


def test_member_relatively_furthest_behind_goes_first() -> None:
    promises = Promises()
    for member, min_speed, waits_s in (("1", 0.5, 2.0), ("2", 0.8, 2.0), ("3", 0.8, 0.0)):
        promises.join(member, min_speed, 1.0, 0.0)
        promises.asks(member, GPU, 0.0)
        promises.begins_to_wait(member, 0.0)
        promises.ends_to_wait(member, waits_s)
        promises.iteration_done(member, 1.0, 1.0 + waits_s)
    # After 3 s: two thirds and five twelfths of their promises.
    assert promises.choose(["3", "1", "2"], GPU, {}, 3.0) == "2"
    assert promises.choose(["3", "1"], GPU, {}, 3.0) == "1"
    assert promises.choose(["3", "1", "2"], GPU, {"3": 61.0}, 3.0) == "3"


def on_gpu(min_speed: float, piece_s: float = 1e9) -> Script:
    """Iterations of 100 ms, 70 of them on the GPU, handed over every `piece_s` at most."""
    return Script(((0, 0.01), (PREPROCESS, 0.01), (GPU, 0.07), (3, 0.01)), piece_s=piece_s, min_speed=min_speed)


@pytest.mark.parametrize(
    ("promise", "piece_s", "guaranteed", "opportunistic"),
    [(0.95, 0.02, 0.95, 0.48), (0.95, 1e9, 0.95, 0.13), (0.999, 1e9, 1.0, 0.0), (0.0, 0.02, 0.72, 0.71)],
)
def test_a_guaranteed_job_goes_first(promise: float, piece_s: float, guaranteed: float, opportunistic: float) -> None:
    found = speeds([on_gpu(promise), on_gpu(0.0, piece_s)])
    assert found == pytest.approx((guaranteed, opportunistic), abs=0.02)


@pytest.mark.parametrize("slow_factor", [1, 10])
def test_four_bottlenecks_share_four_resources_well(slow_factor: int) -> None:
    """Pieces of 10 ms: far more total progress than one after the other."""
    seconds = [[0.07 if stage == member else 0.01 for stage in range(4)] for member in range(4)]
    seconds[3] = [each * slow_factor for each in seconds[3]]
    found = speeds([Script(tuple(enumerate(each)), piece_s=0.01) for each in seconds], window_s=20.0, warmup_s=2.0)
    assert sum(found) > 2.4
    assert min(found) > 0.3
