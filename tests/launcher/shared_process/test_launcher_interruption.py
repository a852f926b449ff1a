"""When exceptions from outside reach a script's own thread."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from polling import DEADLINE_S

from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.shared_process import interruption as interruption_module
from muri.launcher.shared_process.interruption import Interruption, SessionGate
from muri.launcher.shared_process.state import SessionState


class ToldError(Exception):
    """Raised from outside."""


def in_thread(work: Callable[..., object], *arguments: object) -> None:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def play(words: str) -> tuple[type[BaseException] | None, str]:
    """Run a script told in words, with an interruption; returns how it ended, and the digits that it has reached."""
    ended: list[type[BaseException] | None] = []
    reached: list[str] = []

    def run() -> None:
        steps: dict[str, Callable[[], object]] = {
            "hold": interruption.hold_back,
            "hold-elsewhere": lambda: in_thread(interruption.hold_back),
            "let": interruption.let_through,
            "forbid": interruption.forbid,
            "throw": lambda: in_thread(interruption.throw, ToldError),
            "wait": lambda: threading.Event().wait(DEADLINE_S),
        }
        try:
            for word in words.split():
                steps.get(word, lambda word=word: reached.append(word))()  # type: ignore[misc]
            ended.append(None)
        except BaseException as error:
            ended.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    state = SimpleNamespace(member="101", interrupted=threading.Event())
    interruption = Interruption(cast("SessionState", state), FairArbiter(), thread)
    thread.start()
    thread.join(DEADLINE_S)
    return ended[0], "".join(reached)


@pytest.mark.parametrize(
    ("words", "ended", "reached"),
    [
        ("hold hold throw 1 let 2 let 3", ToldError, "12"),
        ("hold throw forbid let 1", None, "1"),
        ("hold-elsewhere throw wait", ToldError, ""),
    ],
    ids=["until the outermost call", "while it clears up", "by another thread, which may not"],
)
def test_what_comes_from_outside_is_held_back(words: str, ended: type[BaseException] | None, reached: str) -> None:
    assert play(words) == (ended, reached)


@pytest.mark.parametrize("woken", [True, False])
def test_a_script_gives_way_only_to_a_thread_that_it_has_woken(monkeypatch: pytest.MonkeyPatch, woken: bool) -> None:
    given: list[None] = []
    monkeypatch.setattr(interruption_module, "give_way", lambda: given.append(None))
    state = cast("SessionState", SimpleNamespace(member="101"))
    arbiter = FairArbiter()
    monkeypatch.setattr(arbiter, "release", lambda _member, _stage: woken)
    SessionGate(Interruption(state, arbiter, threading.current_thread()), arbiter).release(2)
    assert len(given) == woken
