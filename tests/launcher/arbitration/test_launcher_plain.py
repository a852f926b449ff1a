"""Plain sharing: members use a resource at the same time, in the runtime's process and in their own."""

import json
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from fake_cuda import FakeCuda, GpuMember
from launcher_harness import Launcher, ends
from member_gates import gates_of
from polling import until
from trace_rules import names_of_threads, require_valid
from virtual_clock import VirtualClock

from muri.launcher.arbitration.arbiter import Arbiter, WaitInterruptedError
from muri.launcher.arbitration.disciplines import FairArbiter, PlainArbiter
from muri.launcher.arbitration.switching import Node, SwitchingArbiter, make_arbiter
from muri.launcher.job.stage_clock import TURNS_INDEX, IterationRecord
from muri.launcher.process_gate import ProcessGate
from muri.launcher.script import script_clock
from muri.launcher.shared_process.gpu import Device

GPU = 2
MEETING = """
    import os, sys, time
    import muri
    own, *others = sys.argv[1:]
    for step in muri.batches(range(3)):
        with muri.stage("propagate"):
            open(f"{own}-{step}", "w").close()
            end_s = time.monotonic() + 240
            while not all(os.path.exists(f"{other}-{step}") for other in others):
                assert time.monotonic() < end_s, f"no other member is at the GPU in step {step}"
                time.sleep(0.001)
    print("met", os.getpid())
"""


def test_nobody_waits_and_nobody_holds() -> None:
    arbiter = make_arbiter("plain", ["1", "2", "3", "4", "5"], [])
    for member in ("1", "2"):
        arbiter.join(member, 1.0)
    assert [arbiter.acquire(member, GPU) for member in ("1", "2", "1")] == [0.0] * 3
    assert arbiter.yield_point("1", GPU) == 0.0
    assert arbiter.holders() == [None] * 4
    arbiter.interrupt("1")
    arbiter.release("1", GPU)
    assert arbiter.acquire("1", GPU) == 0.0
    arbiter.leave("1")
    with pytest.raises(WaitInterruptedError):
        arbiter.acquire("1", GPU)
    assert arbiter.acquire("2", GPU) == 0.0


def test_auto_takes_turns_with_a_member_whose_time_alone_is_not_known() -> None:
    arbiter = make_arbiter("auto", ["1", "2"], [], node=Node(2, has_gpu=False))
    arbiter.join("1", 1.0)
    assert (arbiter.discipline, arbiter.takes_turns) == ("plain", False)
    arbiter.join("2")  # how fast it is alone is learned under turns only
    assert arbiter.discipline == "fair"


def test_auto_takes_turns_while_a_member_is_measured() -> None:
    clock = VirtualClock()
    arbiter = make_arbiter("auto", ["1", "2"], [], now=clock, node=Node(2, has_gpu=False))
    arbiter.set_measuring("2", measuring=True)
    arbiter.join("1", 0.5)
    arbiter.join("2", None)

    def disciplines(seconds: int) -> set[str]:
        found = set()
        for _ in range(seconds):
            clock.sleep(1.0)
            for member in ("1", "2"):  # each waits for half of the time
                arbiter.iteration_done(member, IterationRecord(1.0, (0.0, 0.0, 0.5, 0.0), (0.0, 0.0, 0.5, 0.0)))
            found.add(arbiter.discipline)
        return found

    assert "plain" not in disciplines(300)
    arbiter.set_measuring("2", measuring=False)
    assert "plain" in disciplines(300)


def test_kernels_of_members_overlap() -> None:
    cuda = FakeCuda()
    device = Device(cuda, takes_turns=False)
    one, two = GpuMember(device, cuda, "1"), GpuMember(device, cuda, "2")
    one.iterate(0.3)
    two.iterate(0.2)
    assert (one.pace.stream.spans, two.pace.stream.spans) == ([(0.0, 0.3)], [(0.0, pytest.approx(0.2))])
    assert device.suspects() == ["1", "2"]


@pytest.mark.parametrize("discipline", ["plain", "fair"])
def test_a_process_asks_for_nothing_and_waits_for_no_kernel(discipline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = make_arbiter(discipline, ["1", "2"], [])
    acquire = Mock(wraps=arbiter.acquire)
    monkeypatch.setattr(arbiter, "acquire", acquire)
    with gates_of(arbiter) as gates:
        for member in "12":
            arbiter.join(member)
        gate = gates.open("1")
        monkeypatch.setattr(script_clock, "gate_from_environment", lambda _: gate)
        clock = script_clock.clock_from_environment({})
        assert clock.gpu.at_yield_point() == (discipline == "fair")
        clock.ask_batch()
        clock.enter(GPU)
        clock.yield_point()
        clock.leave()
        assert acquire.called == (discipline == "fair")
        clock.ask_batch()
        until(lambda: gates.records["1"], "the iteration, which the runtime hears of all the same")
        assert gates.records["1"] == list(clock.recent)


class Pair(NamedTuple):
    """Two members' gates under an arbiter whose discipline the test changes."""

    arbiter: SwitchingArbiter
    gates: list[ProcessGate]
    page: mmap.mmap

    def holder(self) -> str | None:
        """Who has the GPU."""
        return self.arbiter.holders()[GPU]


@pytest.fixture
def pair() -> Iterator[Pair]:
    makers: dict[str, Callable[[], Arbiter]] = {"plain": PlainArbiter, "fair": FairArbiter}
    arbiter = SwitchingArbiter(makers)
    with gates_of(arbiter) as gates:
        for member in ("1", "2"):
            arbiter.join(member, 1.0)
        yield Pair(arbiter, [gates.open(member) for member in ("1", "2")], gates.page)


def test_turns_that_end_within_a_stage_leave_no_token_behind(pair: Pair) -> None:
    pair.arbiter.switch("fair", "a test")
    one, two = pair.gates
    one.acquire(GPU)
    pair.arbiter.switch("plain", "a test")
    assert pair.page[GPU]  # the next yield point has to make way for the change
    one.release(GPU)
    until(lambda: pair.page[TURNS_INDEX], "the end of turns")
    two.acquire(GPU)
    two.release(GPU)
    pair.arbiter.switch("fair", "a test")
    assert (one.takes_turns, pair.holder()) == (True, None)


@pytest.mark.parametrize("discipline", ["fair", "auto"])
def test_sole_member_asks_for_nothing_until_another_one_comes(discipline: str) -> None:
    arbiter = make_arbiter(discipline, ["1", "2"], [])
    with gates_of(arbiter) as gates:
        gate = gates.open("1")
        arbiter.join("1", 1.0)
        gate.acquire(GPU)
        assert (gate.takes_turns, gates.holder(GPU)) == (True, None)  # it is measured as under turns
        arbiter.join("2", 1.0)
        gate.yield_point(GPU)
        assert gates.holder(GPU) == "1"
        arbiter.leave("2")
        gate.release(GPU)
        until(lambda: gates.holder(GPU) is None, "the release of what was granted under turns")
        gate.acquire(GPU)
        assert gates.holder(GPU) is None


def test_stage_that_began_without_turns_asks_at_its_next_yield_point(pair: Pair) -> None:
    one, two = pair.gates
    one.acquire(GPU)
    one.yield_point(GPU)
    assert pair.holder() is None
    pair.arbiter.switch("fair", "a test")
    two.acquire(GPU)
    end = threading.Event()
    threading.Thread(target=lambda: (one.yield_point(GPU), end.wait(240)), daemon=True).start()
    until(lambda: pair.page[GPU], "the first member's wait")
    two.release(GPU)
    until(lambda: pair.holder() == "1", "the first member's turn")
    until(lambda: one._granted[GPU], "the answer")
    one.release(GPU)
    end.set()
    until(lambda: pair.holder() is None, "the token")


def test_stage_that_began_without_turns_gives_back_nothing(pair: Pair) -> None:
    one, two = pair.gates
    one.acquire(GPU)
    pair.arbiter.switch("fair", "a test")
    two.acquire(GPU)
    one.release(GPU)
    assert pair.holder() == "2"
    two.release(GPU)
    until(lambda: pair.holder() is None, "the token")


def test_threads_and_a_process_are_at_the_gpu_at_once(launcher: Launcher) -> None:
    trace = launcher.folder / "trace.json"
    jobs = ("101", "102", "103")
    runtime = launcher.threads(*jobs, options=("--discipline", "plain", "--trace", str(trace)))
    script: Path = launcher.script(MEETING)
    kinds = ("thread", "thread", "process")
    members = [
        launcher.member(job, script, job, *(other for other in jobs if other != job), MURI_ISOLATION=kind)
        for job, kind in zip(jobs, kinds, strict=True)
    ]
    assert [ends(member) for member in members] == [0, 0, 0], launcher.err("101")
    # The status file may follow a script's exit code.
    iterations = [3, 3, 3]
    until(lambda: [launcher.status()["members"][job]["iterations"] for job in jobs] == iterations, "the last status")
    runtime.terminate()
    assert ends(runtime) == 0
    status = launcher.status()
    assert (status["discipline"], status["disciplines"]) == ("plain", [])
    assert [status["members"][job]["isolation"] for job in jobs] == list(kinds)
    assert [status["members"][job]["iterations"] for job in jobs] == iterations
    assert [sum(status["members"][job]["wait_s"].values()) for job in jobs] == [0, 0, 0]
    events = json.loads(trace.read_text())
    require_valid(events)
    assert set(names_of_threads(events)) == {f"job {job}" for job in jobs}  # no resource has a holder to show
