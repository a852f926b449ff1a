"""A cycle ends between two calls to Slurm: when the controller is told to stop, or takes too long. The next resumes."""

import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from fake_slurm import NOW_S, FakeSlurm, behind_lease, four_jobs, one_gpu, pilots

from muri.slurm_plugin.controller.assemble import Surroundings, open_controller
from muri.slurm_plugin.controller.loop import StopSignal
from muri.slurm_plugin.records.cluster import JobState
from muri.slurm_plugin.records.journal import GROUP
from muri.slurm_plugin.records.roles import GATE_LICENSE

CALLS_OF_A_START = 5
"""Submitting the pilot, and a change of each of four members."""


@pytest.fixture
def slurm() -> FakeSlurm:
    return behind_lease(four_jobs(), one_gpu())


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    """Set by the signals that this process gets."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    stop.heed_signals()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def ended(slurm: FakeSlurm, make_controller) -> list[JobState]:
    """Let an undisturbed controller work until all jobs have ended."""
    with make_controller(slurm) as controller:
        slurm.let_work(controller.cycle, (1, 2, 3, 4))
    return [slurm.jobs[n].state for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(("number", "calls"), [(signal.SIGINT, 2), *((signal.SIGTERM, n) for n in range(5))])
def test_after_the_signal_no_call_is_made_and_the_next_cycle_starts_each_job_once(
    slurm, make_controller, stop, number, calls
):
    with make_controller(slurm) as controller:
        config = controller._config

    def stop_in_time(_name: str) -> None:
        if len(slurm.calls) == calls:
            signal.raise_signal(number)

    slurm.after_call = stop_in_time
    stop_in_time("")
    with open_controller(config, slurm, surroundings=Surroundings(stop)) as controller:
        status = controller.cycle()
        begun = controller._journal.intents("begun")
    assert len(slurm.calls) == calls
    assert any("left for the next cycle: the controller was told to stop" in error for error in status.errors)
    assert slurm.lease_end_s == NOW_S + 600
    assert [intent.kind for intent in begun] == ([GROUP] if calls else [])
    slurm.after_call = lambda _name: None
    assert ended(slurm, make_controller) == [JobState.COMPLETED] * 4
    assert [slurm.starts[n] for n in (1, 2, 3, 4)] == [1] * 4


def test_a_signal_while_gates_are_closed_is_no_failure_and_the_next_controller_closes_the_others(
    slurm, make_controller, stop
):
    def closed() -> list[int]:
        return [number for number in (1, 2, 3, 4) if GATE_LICENSE in slurm.jobs[number].licenses]

    with make_controller(slurm) as controller:
        config = controller._config
    with open_controller(config, slurm, surroundings=Surroundings(stop)) as controller:
        controller.cycle()
        slurm.tick()
        slurm.after_call = lambda _name: signal.raise_signal(signal.SIGTERM)
        assert controller.close_gates()
    assert closed() == [1]
    slurm.after_call = lambda _name: None
    with make_controller(slurm) as controller:
        controller.cycle()
        assert not controller.close_gates()
    assert closed() == [1, 2, 3, 4]
    assert ended(slurm, make_controller) == [JobState.COMPLETED] * 4


def test_a_cycle_that_takes_too_long_leaves_the_rest_to_the_next(slurm, make_controller):
    with make_controller(slurm, tuning={"cycle_limit_s": 1e-9}) as controller:
        status = controller.cycle()
    assert slurm.calls == []
    assert slurm.lease_end_s > NOW_S + 600  # or jobs of a queue that takes long to plan would start as ordinary ones
    assert any("s are over" in error for error in status.errors)
    assert not pilots(slurm)
    assert ended(slurm, make_controller) == [JobState.COMPLETED] * 4


def test_a_signal_may_come_at_any_moment_of_waiting_and_twice(monkeypatch):
    stop, really = StopSignal(), select.select

    def interrupted(*arguments: Any) -> Any:
        stop.set()
        stop.set()
        return really(*arguments)

    monkeypatch.setattr(select, "select", interrupted)
    assert not stop.is_set()
    assert stop.wait(600.0)
    assert stop.wait(600.0)
