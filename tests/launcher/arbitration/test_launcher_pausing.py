"""Members that are paused: they get nothing, the others go on, and no wait is interrupted by it."""

import threading

import pytest
from virtual_clock import VirtualClock

from muri.launcher.arbitration.arbiter import PausingArbiter, WaitInterruptedError
from muri.launcher.arbitration.switching import make_arbiter

GPU = 2
DISCIPLINES = ["auto", "fair", "lockstep", "plain"]


class Group:
    """Members a and b under a discipline, and what became of their waits."""

    def __init__(self, discipline: str) -> None:
        self.clock = VirtualClock()
        self.inner = make_arbiter(discipline, ["a", "b"], ["a", "b"], {}, self.clock)
        self.arbiter = PausingArbiter(self.inner, now=self.clock)
        self.ended: list[str] = []
        for member in "ab":
            self.arbiter.join(member, 1.0)

    def asks(self, member: str, resource: int, *, within_stage: bool = False) -> threading.Thread:
        """A thread of the member that asks for a resource, and notes the result."""

        def ask() -> None:
            wait = self.arbiter.yield_point if within_stage else self.arbiter.acquire
            try:
                waited_s = wait(member, resource)
            except WaitInterruptedError:
                self.ended.append(f"{member} interrupted")
            else:
                self.ended.append(f"{member} after {waited_s:g} s")

        thread = self.clock.start(ask)
        self.clock.settle()
        return thread


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_paused_member_waits_and_what_it_held_is_free(discipline: str) -> None:
    group = Group(discipline)
    group.arbiter.acquire("a", GPU)
    group.arbiter.pause("a")
    group.clock.finish(group.asks("b", GPU))  # it holds the GPU that a had
    group.arbiter.release("b", GPU)
    group.arbiter.release("a", GPU)  # its stage has ended meanwhile
    waits = group.asks("a", GPU)
    group.clock.sleep(100.0)
    assert group.ended == ["b after 0 s"]
    assert not group.arbiter.obstructs("a")
    group.arbiter.resume("a")
    group.clock.finish(waits)
    assert group.ended == ["b after 0 s", "a after 100 s"]


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_paused_member_stops_at_a_yield_point_and_has_the_resource_when_it_goes_on(discipline: str) -> None:
    group = Group(discipline)
    group.arbiter.acquire("a", GPU)
    group.arbiter.pause("a")
    waits = group.asks("a", GPU, within_stage=True)
    group.clock.finish(group.asks("b", GPU))
    group.clock.sleep(10.0)
    group.arbiter.leave("b")
    group.arbiter.resume("a")
    group.clock.finish(waits)
    assert group.ended == ["b after 0 s", "a after 10 s"]
    assert group.arbiter.holders()[GPU] == (None if discipline == "plain" else "a")


@pytest.mark.parametrize("discipline", ["auto", "fair", "lockstep"])
def test_who_waits_for_a_resource_when_it_is_paused_goes_on_waiting(discipline: str) -> None:
    group = Group(discipline)
    group.arbiter.acquire("b", GPU)
    waits = group.asks("a", GPU)
    group.arbiter.pause("a")
    group.arbiter.resume("a")  # it has not noticed the pause yet
    group.arbiter.pause("a")
    group.arbiter.pause("a")  # as every look at a suspended job does
    group.arbiter.release("b", GPU)
    group.clock.sleep(5.0)
    assert group.ended == []
    group.arbiter.resume("a")
    group.arbiter.resume("a")
    group.clock.finish(waits)
    assert group.ended == ["a after 5 s"]


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("end", ["interrupt", "leave"])
def test_a_paused_member_can_be_ended(discipline: str, end: str) -> None:
    group = Group(discipline)
    group.arbiter.pause("a")
    waits = group.asks("a", GPU)
    getattr(group.arbiter, end)("a")
    group.clock.finish(waits)
    assert group.ended == ["a interrupted"]
    group.arbiter.resume("a")
    group.arbiter.leave("a")
    with pytest.raises(WaitInterruptedError):
        group.arbiter.acquire("a", GPU)
    group.arbiter.join("a")  # its next session is not paused
    group.clock.finish(group.asks("a", GPU))
    assert group.ended[-1] == "a after 0 s"
