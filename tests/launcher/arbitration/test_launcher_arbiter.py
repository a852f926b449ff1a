"""The arbiters with real threads: exclusion, progress, interruption, and the paper's rotation."""

import threading
import time

import pytest
from launcher_harness import until

from muri.errors import UsageError
from muri.launcher.arbitration.arbiter import Arbiter, FairArbiter, WaitInterruptedError
from muri.launcher.arbitration.lockstep import LockstepArbiter
from muri.launcher.arbitration.switching import make_arbiter
from muri.launcher.runtime.options import parse_table

MEMBERS = ["1", "2", "3", "4"]


def arbiters(idle_limit_s: float = 0.2) -> list[Arbiter]:
    return [FairArbiter(), LockstepArbiter(MEMBERS, idle_limit_s=idle_limit_s)]


@pytest.mark.parametrize("arbiter", arbiters(), ids=["fair", "lockstep"])
def test_one_member_holds_a_resource_and_all_get_on(arbiter: Arbiter) -> None:
    holders: list[list[str]] = [[], [], [], []]
    clashes: list[str] = []

    def work(member: str, rounds: int) -> None:
        arbiter.join(member)
        for _ in range(rounds):
            for resource in range(4):
                arbiter.acquire(member, resource)
                holders[resource].append(member)
                if holders[resource] != [member]:
                    clashes.append(member)
                time.sleep(0.0002)
                holders[resource].remove(member)
                arbiter.release(member, resource)
        arbiter.leave(member)

    threads = [threading.Thread(target=work, args=(m, 10 * int(m)), daemon=True) for m in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert clashes == []


@pytest.mark.parametrize("arbiter", arbiters(), ids=["fair", "lockstep"])
def test_wait_is_interrupted_and_leaving_frees_everything(arbiter: Arbiter) -> None:
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

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(thread.is_alive, "the waiting thread")
    while not result:
        arbiter.interrupt("2")
        time.sleep(0.005)
    thread.join(timeout=30)
    assert isinstance(result[0], WaitInterruptedError)
    arbiter.leave("1")
    arbiter.acquire("2", 0)
    assert arbiter.holders()[0] == "2"
    arbiter.leave("2")
    with pytest.raises(WaitInterruptedError):
        arbiter.acquire("2", 0)


def test_fair_hands_over_at_a_yield_point_to_the_member_behind() -> None:
    arbiter = FairArbiter()
    arbiter.join("1", 1.0)
    arbiter.join("2", 1.0)
    arbiter.acquire("1", 2)
    assert arbiter.yield_point("1", 2) == 0.0  # nobody waits
    log: list[str] = []

    def other() -> None:
        arbiter.acquire("2", 2)
        log.append("2")
        arbiter.release("2", 2)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    until(lambda: arbiter._waiting[2], "the other's wait")
    arbiter.yield_point("1", 2)
    log.append("1")
    assert log == ["2", "1"]
    assert arbiter._holder[2] == "1"


class Script(threading.Thread):
    """One member that goes through stages and notes each grant."""

    def __init__(self, arbiter: Arbiter, member: str, stages: list[int], log: list[tuple[str, int]]) -> None:
        super().__init__(daemon=True)
        self.arbiter, self.member, self.stages, self.log = arbiter, member, stages, log
        arbiter.join(member)

    def run(self) -> None:
        for resource in self.stages:
            self.arbiter.acquire(self.member, resource)
            self.log.append((self.member, resource))
            time.sleep(0.001)
            self.arbiter.release(self.member, resource)
        self.arbiter.leave(self.member)


def test_lockstep_rotates_in_the_planned_ordering() -> None:
    arbiter = LockstepArbiter(MEMBERS, idle_limit_s=30.0)
    log: list[tuple[str, int]] = []
    scripts = [Script(arbiter, member, [0, 1, 2, 3] * 5, log) for member in MEMBERS]
    for script in scripts:
        script.start()
    for script in scripts:
        script.join(timeout=60)
    steps = {member: [index for index, (name, _) in enumerate(log) if name == member] for member in MEMBERS}
    assert len(log) == 80
    middle = log[30:50]  # all are under way: each step grants four different resources to four members
    shift = {member: next(resource for name, resource in middle if name == member) for member in MEMBERS}
    assert len(set(shift.values())) == 4
    assert all(len(places) == 20 for places in steps.values())


def test_lockstep_goes_on_without_a_member_that_stays_outside_of_stages() -> None:
    arbiter = LockstepArbiter(["1", "2"], idle_limit_s=0.1)
    arbiter.join("1")
    arbiter.acquire("1", 0)
    arbiter.release("1", 0)  # and now it validates for a long time
    log: list[tuple[str, int]] = []
    script = Script(arbiter, "2", [0, 1, 2, 3] * 3, log)
    script.start()
    script.join(timeout=30)
    assert not script.is_alive()
    assert len(log) == 12


def test_lockstep_refuses_more_than_four() -> None:
    with pytest.raises(UsageError, match="at most 4"):
        make_arbiter("lockstep", ["1", "2", "3", "4", "5"], [])
    arbiter = make_arbiter("lockstep", ["1", "2"], ["2", None, "1"])
    for member in ("1", "2", "3", "4"):
        arbiter.join(member)
    with pytest.raises(UsageError, match="no place"):
        arbiter.join("5")


@pytest.mark.parametrize("bad", ["101", "101=", "101=fast", "101=0", "101=-1", "101=inf", "103=0.9"])
def test_planned_speeds_that_make_no_sense_are_refused(bad: str) -> None:
    with pytest.raises(UsageError, match=r"--predicted-speed: .* should be a member's id, = and a speed > 0"):
        parse_table("--predicted-speed", f"102=0.9,{bad}", ["101", "102"], "a speed > 0")


def test_planned_speeds_reach_the_choice() -> None:
    speeds = parse_table("--predicted-speed", "101=0.9,102=0.85", ["101", "102"], "a speed > 0")
    assert speeds == {"101": 0.9, "102": 0.85}
    assert parse_table("--predicted-speed", "", ["101"], "a speed > 0") == {}
    arbiter = make_arbiter("auto", ["101", "102"], [], speeds)
    assert arbiter.discipline == "fair"
    assert make_arbiter("auto", ["1", "2", "3", "4", "5"], []).discipline == "fair"  # no rotation for five


def test_orders_from_outside_come_before_fairness() -> None:
    turns = ["2", "1"]
    arbiter = FairArbiter(orders={3: lambda waiting: turns[0] if turns and turns[0] in waiting else None})
    log: list[str] = []

    def work(member: str) -> None:
        arbiter.acquire(member, 3)
        log.append(member)
        turns.pop(0)
        arbiter.release(member, 3)

    threads = [threading.Thread(target=work, args=(member,), daemon=True) for member in ("1", "2")]
    arbiter.join("1", 1.0)
    arbiter.join("2", 1.0)
    threads[0].start()
    until(lambda: arbiter._waiting[3], "the wait of the one whose turn it is not")
    threads[1].start()
    for thread in threads:
        thread.join(timeout=30)
    assert log == ["2", "1"]


def test_helper_thread_gets_a_resource_while_its_member_waits_for_another() -> None:
    for arbiter in (FairArbiter(), make_arbiter("auto", ["1", "2"], [])):
        arbiter.join("1", 1.0)
        arbiter.join("2", 1.0)
        arbiter.acquire("2", 2)
        waiting = threading.Thread(target=arbiter.acquire, args=("1", 2), daemon=True)
        waiting.start()
        until(lambda a=arbiter: a.waiting_hint[2], "the wait")
        assert arbiter.acquire("1", 0) == 0.0
        arbiter.release("1", 0)
        arbiter.release("2", 2)
        waiting.join(timeout=30)
        assert arbiter.holders()[2] == "1"
