"""A member's model is measured over its first iterations, while it trains."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from launcher_harness import Launcher
from polling import until

from muri.launcher.job.stage_clock import IterationRecord, StageClock
from muri.launcher.runtime.member_table import MOST_TURNS_S, Measurement
from muri.profiler.dryrun.course import ENOUGH_ITERATIONS, LEAST_AT_WORK
from muri.profiler.dryrun.messages import DryRunResult
from muri.profiler.dryrun.steadiness import HALF_WINDOW

LOOP = """
    import sys, time, muri
    for _ in muri.batches(range(int(sys.argv[1]))):
        with muri.stage("load"):
            time.sleep(0.05)
        with muri.stage("propagate"):
            time.sleep(0.1)
"""

STEADY = IterationRecord(0.5, (0.1, 0.0, 0.2, 0.0), (0.0, 0.0, 0.1, 0.0))
"""0.4 s without the wait, 0.1 s of it in no stage."""


def a_session(facts: dict[str, Any] | None, exit_code: int = 0) -> SimpleNamespace:
    """A session with the facts of a test."""
    request = SimpleNamespace(prefix="/env", executable="/env/bin/python")
    return SimpleNamespace(
        member="101", exit_code=exit_code, lost=False, clock=StageClock(), facts=lambda: facts, request=request
    )


def measurement(
    session: Any, turns: list[bool] | None = None, now_s: Callable[[], float] = lambda: 7.0, *, early: bool = False
) -> Measurement:
    undisturbed = (lambda: True) if turns is None else (lambda: turns.pop(0))
    return Measurement(session, undisturbed, tells_early=early, now_s=now_s)


FACTS = {"gpu_mem_gib": 3.0, "gradient_mib": 44.0, "dangers": ["children"], "accumulates": True}


def test_it_is_sure_after_the_first_steady_iterations_and_leaves_waits_out() -> None:
    session = a_session(FACTS)
    found = measurement(session)
    for _ in range(11):
        session.clock.count(STEADY)
    assert found.look() is None
    session.clock.count(STEADY)
    told = found.look()
    assert told is not None
    figures = DryRunResult.from_dict(told)
    assert (figures.stage_s, figures.iteration_s) == ((0.1, 0.0, 0.2, 0.0), pytest.approx(0.4))
    assert (figures.iterations, figures.gpu_mem_gib) == (10, 3.0)
    detail = figures.detail
    assert (detail.confidence, detail.warmup_iterations, detail.busy_s) == (1.0, 2, None)
    assert (detail.gradient_mib, detail.dangers) == (44.0, ("children",))
    assert (told["at"], told["accumulates"], told["python"]["prefix"]) == (7.0, True, "/env")
    assert found.look() == told
    assert session.clock.on_record is None  # the rest of the training costs nothing


def unsteady(number: int) -> IterationRecord:
    """Iterations of 0.1 and 0.7 s in turn: no ten of them are sure."""
    return IterationRecord(0.1 + 0.6 * (number % 2), (0.1, 0.0, 0.0, 0.0), (0.0,) * 4)


@pytest.mark.parametrize("early", [True, False])
def test_the_first_means_of_a_model_never_seen_are_told_at_once_and_replaced_once_they_are_sure(early: bool) -> None:
    session, times_s = a_session(FACTS), count(7.0)
    found, told = measurement(session, now_s=lambda: next(times_s), early=early), []
    for number in range(ENOUGH_ITERATIONS + 2 * HALF_WINDOW):
        session.clock.count(unsteady(number))
        told += [figures for figures in (found.look(),) if figures is not None and figures not in told]
    first, last = (DryRunResult.from_dict(each) for each in (told[0], told[-1]))
    assert len(told) == (2 if early else 1)
    assert (first.iterations == LEAST_AT_WORK) == early
    assert last.iterations >= ENOUGH_ITERATIONS
    assert (last.detail.confidence or 0.0) > (first.detail.confidence or 0.0) or not early
    assert told[-1]["at"] > told[0]["at"] or not early


def test_first_means_stay_where_a_script_ends_with_less_than_it_has_told() -> None:
    session = a_session(FACTS)
    found = measurement(session, [True] * 12 + [False] + [True] * 5, early=True)
    for number in range(12):
        session.clock.count(unsteady(number))
    first = found.look()
    assert first is not None
    for number in range(6):
        session.clock.count(unsteady(number))
    assert found.look(ended=True) == first


def test_first_means_are_looked_for_often_while_they_are_due() -> None:
    session = a_session(FACTS)
    found = measurement(session, early=True)
    assert not found.is_awaited
    session.clock.count(STEADY)
    assert found.is_awaited
    for _ in range(11):
        session.clock.count(STEADY)
    assert found.look() is not None
    assert not found.is_awaited


def test_what_the_process_has_not_told_is_waited_for() -> None:
    session = a_session(None)
    found = measurement(session)
    for _ in range(50):
        session.clock.count(STEADY)
    assert found.look() is None
    session.facts = lambda: FACTS
    assert found.look() is not None


def test_a_measurement_that_is_never_sure_does_not_keep_the_group_in_turns_for_ever() -> None:
    times_s = iter([7.0, 7.0 + MOST_TURNS_S - 1, 7.0 + MOST_TURNS_S])
    found = measurement(a_session(FACTS), now_s=lambda: next(times_s))
    assert found.needs_turns
    assert not found.needs_turns


def test_iterations_without_turns_count_for_nothing() -> None:
    session = a_session(FACTS)
    found = measurement(session, [True] * 11 + [False] + [True] * 12)
    for _ in range(23):
        session.clock.count(STEADY)
    assert found.look() is None
    session.clock.count(STEADY)
    assert found.look() is not None


@pytest.mark.parametrize(("iterations", "is_measured"), [(11, False), (13, True)])
def test_a_script_that_ends_has_told_something_or_not(iterations: int, is_measured: bool) -> None:
    session = a_session(FACTS)
    found = measurement(session)
    for number in range(iterations):
        session.clock.count(IterationRecord(0.5 + 0.3 * (number % 2), (0.1, 0.0, 0.2, 0.0), (0.0,) * 4))
    assert found.look() is None
    told = found.look(ended=True)
    assert told is not None
    assert ("iteration_s" in told) == is_measured
    assert is_measured or told == {"error": "Muri saw 11 of its iterations, too few to measure it", "at": 7.0}


def test_a_script_that_failed_says_nothing_against_its_model() -> None:
    assert measurement(a_session(FACTS, exit_code=1)).look(ended=True) is None


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_status_tells_what_was_measured_of_a_running_script(launcher: Launcher, kind: str) -> None:
    launcher.runtime("101", options=("--isolation", kind, "--discipline", "fair"))
    launcher.member("101", launcher.script(LOOP), 100_000)
    until(lambda: launcher.status()["members"]["101"]["measured"], "a measurement")
    told = launcher.status()["members"]["101"]["measured"]
    figures = DryRunResult.from_dict(told)
    assert figures.stage_s[0] >= 0.05
    assert figures.stage_s[2] >= 0.1
    assert figures.iterations >= 10
    assert figures.detail.dangers is not None
    assert launcher.status()["members"]["101"]["state"] == "running"


def test_auto_measures_before_it_shares_plainly(launcher: Launcher) -> None:
    launcher.runtime("101", "102", options=("--isolation", "process", "--discipline", "auto"))
    script = launcher.script(LOOP)
    for job in ("101", "102"):
        launcher.member(job, script, 100_000)
    until(lambda: all(each["measured"] for each in launcher.status()["members"].values()), "both measurements")
    until(lambda: launcher.status()["discipline"] == "plain", "a trial of plain sharing")
