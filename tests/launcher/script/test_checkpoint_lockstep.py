"""A member that joins a group later has a place in the rotation, whatever the discipline is by then."""

import pytest

from muri.errors import UsageError
from muri.launcher.arbitration.disciplines import LockstepArbiter
from muri.launcher.arbitration.switching import SwitchingArbiter, make_arbiter


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
