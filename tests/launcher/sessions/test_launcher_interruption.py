"""When exceptions from outside reach a script's own thread."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from polling import DEADLINE_S

from muri.launcher.arbitration.arbiter import FairArbiter
from muri.launcher.job.session import SessionState
from muri.launcher.sessions import interruption as interruption_module
from muri.launcher.sessions.interruption import Interruption, SessionGate


class ToldError(Exception):
    """What is raised from outside."""


def interrupted(script: Callable[[Interruption, Callable[[], None]], None]) -> BaseException | None:
    """Run a script with the interruption and a function that raises `ToldError` from outside; returns how it ended."""
    ended: list[BaseException | None] = []

    def throw() -> None:
        thrower = threading.Thread(target=interruption.throw, args=(ToldError,))
        thrower.start()
        thrower.join()

    def run() -> None:
        try:
            script(interruption, throw)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    state = SimpleNamespace(member="101", interrupted=threading.Event(), handlers={})
    interruption = Interruption(cast("SessionState", state), FairArbiter(), thread)
    thread.start()
    thread.join(DEADLINE_S)
    return ended[0]


def test_nothing_is_raised_before_the_outermost_call_lets_it_through() -> None:
    reached: list[str] = []

    def script(interruption: Interruption, throw: Callable[[], None]) -> None:
        interruption.hold_back()
        interruption.hold_back()
        throw()
        reached.append("held back")
        interruption.let_through(True)
        reached.append("held back still")
        interruption.let_through(True)
        reached.append("let through")

    assert isinstance(interrupted(script), ToldError)
    assert reached == ["held back", "held back still"]


def test_what_is_not_raised_at_once_waits_for_a_safe_point() -> None:
    reached: list[str] = []

    def script(interruption: Interruption, throw: Callable[[], None]) -> None:
        interruption.hold_back()
        throw()
        interruption.let_through(False)
        reached.append("let through")
        interruption.safe_point()
        reached.append("safe point")

    assert isinstance(interrupted(script), ToldError)
    assert reached == ["let through"]


def test_a_script_that_only_clears_up_is_left_alone() -> None:
    def script(interruption: Interruption, throw: Callable[[], None]) -> None:
        interruption.hold_back()
        throw()
        interruption.forbid()
        interruption.let_through(True)

    assert interrupted(script) is None


def test_other_threads_of_the_script_hold_nothing_back() -> None:
    def script(interruption: Interruption, throw: Callable[[], None]) -> None:
        helper = threading.Thread(target=interruption.hold_back)
        helper.start()
        helper.join()
        throw()
        threading.Event().wait(DEADLINE_S)

    assert isinstance(interrupted(script), ToldError)


@pytest.mark.parametrize("woken", [True, False])
def test_a_script_gives_way_only_to_a_thread_that_it_has_woken(monkeypatch: pytest.MonkeyPatch, woken: bool) -> None:
    given: list[None] = []
    monkeypatch.setattr(interruption_module, "give_way", lambda: given.append(None))
    state = cast("SessionState", SimpleNamespace(member="101"))
    arbiter = FairArbiter()
    monkeypatch.setattr(arbiter, "release", lambda _member, _stage: woken)
    SessionGate(Interruption(state, arbiter, threading.current_thread()), arbiter).release(2)
    assert len(given) == woken
