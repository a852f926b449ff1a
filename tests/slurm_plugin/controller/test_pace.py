"""Cycles on events come soon, and are bounded whatever users do."""

from itertools import pairwise

import pytest
from stand_in_controller import Happenings
from virtual_clock import VirtualClock

from muri.slurm_plugin.controller import events
from muri.slurm_plugin.controller.events import Bell


def begun(at_s: list[float], lasting_s: float = 0.5, until_s: float = 60.0) -> list[float]:
    """When cycles begin that take so long, looked for each half second."""
    clock = VirtualClock()
    bell = Bell((Happenings(clock, at_s),), clock)
    found = []
    while clock() < until_s:
        bell.look()
        if bell.due_s <= clock():
            found.append(clock())
            with bell.cycle():
                clock.sleep(lasting_s)
        clock.sleep(0.5)
    return found


def test_an_event_is_served_once_and_soon() -> None:
    assert begun([10.0]) == [11.0]


def test_a_burst_shares_a_cycle_and_its_last_jobs_get_one_more() -> None:
    assert begun([10 + number / 100 for number in range(100)]) == [11.0, 16.5]


@pytest.mark.parametrize(("most_share", "gap_s"), [(0.2, 40.0), (0.5, 10.0), (1.0, 5.0)])
def test_long_cycles_take_no_more_than_their_share(
    monkeypatch: pytest.MonkeyPatch, most_share: float, gap_s: float
) -> None:
    monkeypatch.setattr(events, "MOST_SHARE", most_share)
    times_s = begun([number / 10 for number in range(6000)], 10.0, 600.0)
    assert {later - earlier for earlier, later in pairwise(times_s)} == {10.0 + gap_s}


def test_an_event_during_a_cycle_is_served_by_the_next_one() -> None:
    assert begun([10.0, 11.2]) == [11.0, 16.5]


def test_a_cycle_that_could_not_begin_is_left_to_the_timer() -> None:
    clock = VirtualClock()
    bell = Bell((), clock)
    bell.ring()
    bell.give_up()
    assert bell.due_s == float("inf")
    bell.ring()
    assert bell.due_s == 5.0
