"""When the discipline changes, in a model whose clock the test moves: members advance at given speeds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.launcher.arbitration.discipline_choice import FIRST_PAUSE_S, Decision, DisciplineChoice

SOLO_S = {"1": 0.5, "2": 0.1, "3": 1.0}
MEMBERS = frozenset(SOLO_S)


class Group:
    """Members whose total speed depends on the discipline in force."""

    def __init__(
        self, total: dict[str, float], predicted: float | None = None, members: frozenset[str] = MEMBERS
    ) -> None:
        self.total = total
        speeds = {} if predicted is None else {member: predicted / len(MEMBERS) for member in MEMBERS}
        self.choice = DisciplineChoice(("fair", "lockstep"), speeds)
        self.members = MEMBERS
        self.now_s = 0.0
        self.next_s = {member: SOLO_S[member] for member in MEMBERS}
        self.decisions: list[Decision] = []
        self.took(self.choice.members_changed(MEMBERS))

    def took(self, decision: Decision | None) -> None:
        if decision is not None:
            self.decisions.append(decision)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            member = min(self.next_s, key=self.next_s.__getitem__)
            self.now_s = self.next_s[member]
            speed = self.total[self.choice.discipline] / len(self.members)
            self.next_s[member] += SOLO_S[member] / speed
            self.took(self.choice.iteration_done(member, SOLO_S[member], self.now_s))

    def names(self) -> list[str]:
        return [decision.discipline for decision in self.decisions]


@pytest.mark.parametrize("measured", [1.7, 2.0, 2.3])
def test_what_was_planned_stays_when_it_is_reached_within_a_fifth(measured: float) -> None:
    group = Group({"fair": measured, "lockstep": 2.9}, predicted=2.0)
    group.run(600)
    assert group.decisions == []


def test_other_is_tried_and_kept_when_better() -> None:
    group = Group({"fair": 1.4, "lockstep": 1.9}, predicted=2.0)
    group.run(600)
    assert group.names() == ["lockstep", "lockstep"]
    assert group.decisions[0].reason == "fair reaches 1.40, 2.00 was planned"
    assert group.decisions[1].reason == "lockstep reaches 1.90, fair 1.40"
    assert group.choice.discipline == "lockstep"


@pytest.mark.parametrize("other", [1.0, 1.4, 1.45])
def test_other_is_tried_once_and_given_up_unless_clearly_better(other: float) -> None:
    group = Group({"fair": 1.4, "lockstep": other}, predicted=2.0)
    group.run(3600)
    assert group.names() == ["lockstep", "fair"]


@pytest.mark.parametrize(("fair", "lockstep", "kept"), [(2.0, 1.5, "fair"), (1.5, 2.0, "lockstep")])
def test_without_predictions_both_are_tried_once(fair: float, lockstep: float, kept: str) -> None:
    group = Group({"fair": fair, "lockstep": lockstep})
    group.run(3600)
    assert group.names() == ["lockstep", kept]
    assert "tried, too" in group.decisions[0].reason


def test_changed_speeds_lead_to_another_trial_but_not_before_the_pause_is_over() -> None:
    group = Group({"fair": 2.0, "lockstep": 1.5}, predicted=2.0)
    group.run(100)
    group.total = {"fair": 1.2, "lockstep": 1.8}
    group.run(100)
    assert group.names() == ["lockstep", "lockstep"]
    group.total = {"fair": 2.0, "lockstep": 1.0}
    group.run(FIRST_PAUSE_S / 2 - 20)
    assert group.choice.discipline == "lockstep"
    group.run(FIRST_PAUSE_S + 60)
    assert group.choice.discipline == "fair"


@given(st.lists(st.tuples(st.floats(0.5, 3.0), st.floats(0.5, 3.0)), min_size=20, max_size=60))
@settings(max_examples=30, deadline=None)
def test_speeds_that_never_settle_do_not_make_it_flap(totals: list[tuple[float, float]]) -> None:
    group = Group({"fair": 2.0, "lockstep": 2.0}, predicted=2.0)
    for fair, lockstep in totals:
        group.total = {"fair": fair, "lockstep": lockstep}
        group.run(60)
    trials = sum(1 for d in group.decisions if "planned" in d.reason or "before" in d.reason)
    # Pauses of 1, 2, 4 … minutes: an hour has room for six trials, of two changes at most.
    assert trials <= 7
    assert len(group.decisions) <= 2 * trials


def test_members_that_leave_end_a_trial_and_others_have_a_verdict_of_their_own() -> None:
    group = Group({"fair": 1.0, "lockstep": 2.0})
    group.run(32)
    assert group.choice.discipline == "lockstep"  # on trial
    group.took(group.choice.members_changed(frozenset({"1", "2"})))
    assert group.choice.discipline == "fair"
    assert group.choice.members_changed(frozenset({"1"})) is None
    assert group.choice.iteration_done("1", 0.5, 1e6) is None
    group.choice.members_changed(MEMBERS)
    group.run(300)
    assert group.choice.discipline == "lockstep"
    group.took(group.choice.members_changed(frozenset({"1", "2"})))
    group.took(group.choice.members_changed(MEMBERS))  # together again: what was found holds
    assert group.choice.discipline == "lockstep"


def test_member_without_iterations_is_left_out() -> None:
    group = Group({"fair": 1.0, "lockstep": 2.0})
    del group.next_s["3"]  # it validates for an hour
    group.run(280)
    assert group.choice.discipline == "lockstep"


def test_speed_is_measured_exactly_whatever_the_iteration_lengths() -> None:
    group = Group({"fair": 1.23, "lockstep": 1.0}, predicted=2.0)
    group.run(60)
    assert group.decisions[0].reason.startswith("fair reaches 1.23,")
