"""Whatever members do and when, in virtual time: one holder per resource, everybody gets on, no token is lost."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_clock import VirtualClock

from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter, LockstepArbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.job.stage_clock import IterationRecord

MEMBERS = ["1", "2", "3"]
IDLE_LIMIT_S = 1.0
MOST_TURNS = 100


Make = Callable[[VirtualClock], Arbiter]


def lockstep(clock: VirtualClock) -> Arbiter:
    return LockstepArbiter(MEMBERS, clock, idle_limit_s=IDLE_LIMIT_S)


def switching(clock: VirtualClock) -> SwitchingArbiter:
    return SwitchingArbiter({"fair": lambda: FairArbiter(clock), "lockstep": lambda: lockstep(clock)}, now=clock)


class PromisingArbiter(FairArbiter):
    """Promises something to two of the members."""

    def join(self, member: str, solo_iteration_s: float | None = None, min_speed: float = 0.0) -> None:
        super().join(member, solo_iteration_s, {"1": 0.8, "2": 0.5}.get(member, min_speed))


ARBITERS = pytest.mark.parametrize(
    "make", [FairArbiter, PromisingArbiter, lockstep, switching], ids=["fair", "promising", "lockstep", "switching"]
)


def switch(arbiter: Arbiter, discipline: str) -> None:
    """Change the discipline, if it can be changed."""
    if isinstance(arbiter, SwitchingArbiter):
        arbiter.switch(discipline, "a test")


class Crowd:
    """Members whose two threads each ask, hold, yield and give back as told; notes who holds what."""

    def __init__(self, arbiter: Arbiter, clock: VirtualClock) -> None:
        self.arbiter = arbiter
        self.clock = clock
        self.lock = threading.Lock()
        self.stay = dict.fromkeys(MEMBERS, 0)
        self.present: set[str] = set()
        self.held: dict[int, tuple[str, int]] = {}
        self.clashes: list[object] = []
        self.busy: dict[tuple[str, int], threading.Thread] = {}

    def join(self, member: str) -> None:
        if member not in self.present:
            self.arbiter.join(member, 1.0)
            self.present.add(member)

    def leave(self, member: str) -> None:
        with self.lock:
            self.stay[member] += 1
            self.held = {r: (m, t) for r, (m, t) in self.held.items() if m != member}
            self.present.discard(member)
        self.arbiter.leave(member)

    def ask(self, member: str, thread: int, resource: int) -> None:
        self._in_thread(member, thread, lambda: self._acquire(member, thread, resource))

    def _acquire(self, member: str, thread: int, resource: int) -> None:
        with self.lock:
            stay = self.stay[member]
            if (member, thread) in self.held.values():
                return
        self._note(self.arbiter.acquire, member, thread, resource, stay)

    def _note(self, operation: Callable[[str, int], float], member: str, thread: int, resource: int, stay: int) -> None:
        try:
            operation(member, resource)
        except WaitInterruptedError:
            return
        with self.lock:
            if self.stay[member] == stay:
                if resource in self.held:
                    self.clashes.append((member, thread, resource, dict(self.held)))
                self.held[resource] = (member, thread)

    def yield_point(self, member: str, thread: int) -> None:
        def work() -> None:
            stay, resource = self.stay[member], self._drop(member, thread)
            if resource is not None:  # others may hold it until the call returns
                self._note(self.arbiter.yield_point, member, thread, resource, stay)

        self._in_thread(member, thread, work)

    def give_back(self, member: str, thread: int) -> None:
        if not self._is_busy(member, thread) and (resource := self._drop(member, thread)) is not None:
            self.arbiter.release(member, resource)

    def _drop(self, member: str, thread: int) -> int | None:
        """Forget the resource that a thread holds, if any; returns it."""
        with self.lock:
            mine = next((r for r, holder in self.held.items() if holder == (member, thread)), None)
            if mine is not None:
                del self.held[mine]
            return mine

    def _is_busy(self, member: str, thread: int) -> bool:
        return (member, thread) in self.busy and self.clock.is_under_way(self.busy[member, thread])

    def _in_thread(self, member: str, thread: int, work: Callable[[], None]) -> None:
        if not self._is_busy(member, thread):
            self.busy[member, thread] = self.clock.start(work)
            self.clock.settle()

    def do(self, name: str, member: str, thread: int, resource: int) -> None:
        """One random operation."""
        actions: dict[str, Callable[[], None]] = {
            "ask": lambda: self.ask(member, thread, resource),
            "back": lambda: self.give_back(member, thread),
            "yield": lambda: self.yield_point(member, thread),
            "interrupt": lambda: self.arbiter.interrupt(member),
            "leave": lambda: self.leave(member),
            "join": lambda: self.join(member),
            "switch": lambda: switch(self.arbiter, ["fair", "lockstep"][resource % 2]),
        }
        actions[name]()
        self.clock.settle()
        self.clock.sleep(IDLE_LIMIT_S / 4)

    def settle(self) -> None:
        """Give back every granted resource until no thread waits: waits end, whatever happened before."""
        for _ in range(MOST_TURNS):
            self.clock.settle()
            waiting = [who for who in self.busy if self._is_busy(*who)]
            for member, thread in self.busy:
                self.give_back(member, thread)
            if not waiting:
                return
            self.clock.sleep(IDLE_LIMIT_S)
        raise AssertionError(f"{waiting} wait although all resources are given back")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "ask", "back", "back", "yield", "interrupt", "leave", "join", "switch"]),
        st.sampled_from(MEMBERS),
        st.integers(0, 1),
        st.integers(0, 3),
    ),
    min_size=10,
    max_size=40,
)


@ARBITERS
@given(operations=OPERATIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_two_hold_nobody_waits_for_ever_no_token_is_lost(make: Make, operations) -> None:
    clock = VirtualClock()
    crowd = Crowd(make(clock), clock)
    for member in MEMBERS:
        crowd.join(member)
    for name, member, thread, resource in operations:
        crowd.do(name, member, thread, resource)
    crowd.settle()
    assert crowd.clashes == []
    for member in MEMBERS:
        crowd.join(member)
        for resource in range(4):  # every token is there
            crowd.ask(member, 0, resource)
            crowd.settle()
    assert crowd.clashes == []


@ARBITERS
def test_every_member_gets_on_while_the_others_never_stop_asking(make: Make) -> None:
    clock = VirtualClock()
    arbiter = make(clock)
    rounds = dict.fromkeys(MEMBERS, 0)
    stop = False
    record = IterationRecord(0.004, (0.001,) * 4, (0.0,) * 4)

    def work(member: str, resources: list[int]) -> None:
        while not stop:
            for resource in resources:
                arbiter.acquire(member, resource)
                clock.sleep(0.001)
                arbiter.release(member, resource)
            rounds[member] += 1
            arbiter.iteration_done(member, record)

    for member in MEMBERS:
        arbiter.join(member, 0.004)
    paths = {"1": [0, 1, 2, 3], "2": [2], "3": [2, 3]}
    threads = [clock.start(work, member, paths[member]) for member in MEMBERS]
    for least in (10, 20, 30):
        switch(arbiter, "lockstep" if least % 20 else "fair")
        clock.sleep(1.0)  # ten rounds of all members, one after the other, take 0.07 s
        assert min(rounds.values()) >= least, rounds
    stop = True
    clock.finish(*threads)


def test_change_waits_for_the_last_old_token_and_carries_the_waits_over() -> None:
    clock = VirtualClock()
    arbiter = switching(clock)
    crowd = Crowd(arbiter, clock)
    for member in MEMBERS:
        crowd.join(member)
    arbiter.acquire("1", 2)
    crowd.ask("2", 0, 2)
    crowd.ask("3", 0, 2)
    arbiter.switch("lockstep", "a test")
    crowd.ask("2", 1, 0)  # free, but not before the change
    assert arbiter.discipline == "fair"
    assert crowd.held == {}
    arbiter.interrupt("3")
    clock.settle()
    assert not clock.is_under_way(crowd.busy["3", 0])
    assert crowd.held == {}
    arbiter.release("1", 2)
    clock.settle()
    assert arbiter.discipline == "lockstep"
    crowd.settle()
    assert [(entry["discipline"], entry["reason"]) for entry in arbiter.history][-1] == ("lockstep", "a test")


def test_a_member_that_leaves_gives_back_all_that_its_threads_hold() -> None:
    arbiter = FairArbiter(VirtualClock(), cpus=2)
    arbiter.join("1", 1.0)
    for resource in (1, 1, 2):
        arbiter.acquire("1", resource)
    arbiter.leave("1")
    assert arbiter.holders() == [None] * 4
