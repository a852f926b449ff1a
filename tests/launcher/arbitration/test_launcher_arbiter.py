"""The arbiters with real threads in virtual time: exclusion, progress, interruption, and the paper's rotation."""

from collections.abc import Callable

import pytest
from virtual_clock import VirtualClock

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter, LockstepArbiter
from muri.launcher.arbitration.fairness import FairQueue
from muri.launcher.arbitration.switching import SwitchingArbiter, make_arbiter

MEMBERS = ["1", "2", "3", "4"]


Make = Callable[[VirtualClock], Arbiter]
EACH = pytest.mark.parametrize(
    "make", [FairArbiter, lambda now: LockstepArbiter(MEMBERS, now)], ids=["fair", "lockstep"]
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@EACH
def test_wait_is_interrupted_and_leaving_frees_everything(make: Make, clock: VirtualClock) -> None:
    arbiter = make(clock)
    order = ["1", "2"]
    for member in order:
        arbiter.join(member)
    arbiter.acquire("1", 0)
    result: list[object] = []

    def wait() -> None:
        try:
            result.append(arbiter.acquire("2", 0))
        except WaitInterruptedError as error:
            result.append(error)

    thread = clock.start(wait)
    clock.settle()
    assert result == []
    arbiter.interrupt("2")
    clock.finish(thread)
    assert isinstance(result[0], WaitInterruptedError)
    arbiter.leave("1")
    arbiter.acquire("2", 0)
    assert arbiter.holders()[0] == "2"
    arbiter.leave("2")
    with pytest.raises(WaitInterruptedError):
        arbiter.acquire("2", 0)


def test_fair_hands_over_at_a_yield_point_to_the_member_behind(clock: VirtualClock) -> None:
    arbiter = FairArbiter(clock)
    arbiter.join("1", 1.0)
    arbiter.join("2", 1.0)
    arbiter.acquire("1", 2)
    assert arbiter.yield_point("1", 2) == 0.0  # no member waits
    log: list[str] = []

    def other() -> None:
        arbiter.acquire("2", 2)
        log.append("2")
        clock.sleep(0.25)
        arbiter.release("2", 2)

    clock.sleep(1.0)
    clock.start(other)
    clock.settle()
    assert arbiter.yield_point("1", 2) == 0.25  # it has had the resource for a second
    log.append("1")
    assert log == ["2", "1"]
    assert arbiter.holders()[2] == "1"


def test_a_stage_that_gives_way_keeps_its_place_among_those_that_wait(clock: VirtualClock) -> None:
    arbiter = FairArbiter(clock)
    arbiter._queue = FairQueue(100.0)
    for member in MEMBERS:
        arbiter.join(member, 10.0)
    log: list[str] = []

    def hold(member: str, before_s: float, after_s: float) -> None:
        arbiter.acquire(member, 2)
        clock.sleep(before_s)
        arbiter.yield_point(member, 2)
        log.append(member)
        clock.sleep(after_s)
        arbiter.release(member, 2)

    threads = [clock.start(hold, "1", 0.0, 1.5)]
    clock.settle()
    threads.append(clock.start(hold, "2", 2.0, 0.1))  # waits for 1.5 s, gives way to the third, and goes on
    clock.sleep(3.0)
    threads += [clock.start(hold, member, 0.0, 0.1) for member in ("3", "1")]
    clock.finish(*threads)
    assert log == ["1", "3", "2", "1"]


def train(clock: VirtualClock, arbiter: Arbiter, member: str, stages: list[int], log: list[tuple[str, int]]) -> None:
    """One member that goes through stages of 0.1 s and notes each grant."""
    for resource in stages:
        arbiter.acquire(member, resource)
        log.append((member, resource))
        clock.sleep(0.1)
        arbiter.release(member, resource)
    arbiter.leave(member)


def test_lockstep_rotates_in_the_planned_ordering(clock: VirtualClock) -> None:
    arbiter = LockstepArbiter(MEMBERS, clock)
    log: list[tuple[str, int]] = []
    for member in MEMBERS:
        arbiter.join(member)
    clock.finish(*[clock.start(train, clock, arbiter, member, [0, 1, 2, 3] * 5, log) for member in MEMBERS])
    assert len(log) == 80
    middle = log[30:50]  # all are under way: each step grants four different resources to four members
    assert len({next(resource for name, resource in middle if name == member) for member in MEMBERS}) == 4


def test_lockstep_goes_on_without_a_member_that_stays_outside_of_stages(clock: VirtualClock) -> None:
    arbiter = LockstepArbiter(["1", "2"], clock, idle_limit_s=5.0)
    arbiter.join("1")
    arbiter.join("2")
    arbiter.acquire("1", 0)
    arbiter.release("1", 0)  # and now it validates for a long time
    log: list[tuple[str, int]] = []
    clock.finish(clock.start(train, clock, arbiter, "2", [0, 1, 2, 3] * 3, log))
    assert len(log) == 12
    assert clock() == pytest.approx(5.0 + 12 * 0.1), "the others wait once for as long as they must"


def test_lockstep_refuses_more_than_four() -> None:
    with pytest.raises(UsageError, match="at most 4"):
        make_arbiter("lockstep", ["1", "2", "3", "4", "5"], [])
    arbiter = make_arbiter("lockstep", ["1", "2"], ["2", None, "1"])
    for member in ("1", "2", "3", "4"):
        arbiter.join(member)
    with pytest.raises(UsageError, match="no place"):
        arbiter.join("5")


def test_orders_from_outside_come_before_fairness(clock: VirtualClock) -> None:
    turns = ["2", "1"]
    arbiter = FairArbiter(clock, orders={3: lambda waiting: turns[0] if turns and turns[0] in waiting else None})
    log: list[str] = []

    def work(member: str) -> None:
        arbiter.acquire(member, 3)
        log.append(member)
        turns.pop(0)
        arbiter.release(member, 3)

    arbiter.join("1", 1.0)
    arbiter.join("2", 1.0)
    first = clock.start(work, "1")
    clock.settle()
    assert log == [], "it is not the first one's turn"
    clock.finish(first, clock.start(work, "2"))
    assert log == ["2", "1"]


def test_release_says_whether_somebody_was_woken(clock: VirtualClock) -> None:
    arbiter = FairArbiter(clock)
    woken: list[tuple[str, bool]] = []

    def work(member: str) -> None:
        arbiter.join(member)
        arbiter.acquire(member, 2)
        clock.sleep(0.1)
        woken.append((member, arbiter.release(member, 2)))

    clock.finish(*[clock.start(work, member) for member in MEMBERS[:2]])
    assert sorted(was for _, was in woken) == [False, True]
    assert arbiter.release("1", 2) is False


def positions(arbiter: LockstepArbiter) -> dict[str, int]:
    return {name: place.position for name, place in arbiter._places.items()}


def test_a_member_that_joins_takes_the_place_of_one_that_left_who_finds_another_when_it_comes_back():
    arbiter = LockstepArbiter(["1", "2", "3"])
    for member in ("1", "2", "3", "4"):
        arbiter.join(member)
    assert positions(arbiter) == {"1": 0, "2": 1, "3": 2, "4": 3}
    arbiter.leave("2")
    arbiter.join("5")
    assert positions(arbiter)["5"] == 1
    with pytest.raises(UsageError, match="no place in the rotation"):
        arbiter.join("2")
    arbiter.leave("3")
    arbiter.join("2")
    assert positions(arbiter)["2"] == 2


def test_a_change_of_discipline_takes_the_new_member_along():
    arbiter = make_arbiter("auto", ["1", "2"], ["1", "2"])
    assert isinstance(arbiter, SwitchingArbiter)
    for member in ("1", "2", "3"):
        arbiter.join(member)
    for discipline in ("lockstep", "fair", "lockstep"):
        arbiter.switch(discipline, "for the test")
        assert arbiter.discipline == discipline
        arbiter.acquire("3", 0)
        assert arbiter.holders()[0] == "3"
        arbiter.release("3", 0)
