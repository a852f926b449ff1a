"""Which promises cannot be kept, and how a runtime reacts."""

import logging

import pytest
from virtual_clock import VirtualClock

from muri.group_spec import GroupSpec, MemberSpec, Place, read_group
from muri.launcher.arbitration.arbiter import PausingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.arbitration.fairness import Promises
from muri.launcher.arbitration.switching import SwitchingArbiter, make_arbiter
from muri.launcher.runtime.admission import AdmissionControl
from muri.launcher.runtime.member_table import PATIENCE_S, MemberTable, PromiseWatch


def test_promise_is_broken_after_a_minute_below_it_and_kept_again_after_another_one() -> None:
    watch = PromiseWatch()
    assert not watch.look(0.0, 0.7, 0.8)
    assert not watch.look(PATIENCE_S - 1, 0.7, 0.8)
    assert watch.look(PATIENCE_S, 0.7, 0.8)
    assert watch.look(PATIENCE_S + 1, 0.9, 0.8)
    assert watch.look(2 * PATIENCE_S, 0.9, 0.8)
    assert not watch.look(2 * PATIENCE_S + 1, 0.9, 0.8)


@pytest.mark.parametrize("between", [0.78, 0.9, None])
def test_a_look_at_a_good_or_an_unknown_speed_starts_the_minute_anew(between: float | None) -> None:
    watch = PromiseWatch()
    watch.look(0.0, 0.7, 0.8)
    watch.look(50.0, between, 0.8)
    assert not watch.look(PATIENCE_S + 1, 0.7, 0.8)


def test_lockstep_is_left_for_fair_when_it_breaks_a_promise(caplog: pytest.LogCaptureFixture) -> None:
    arbiter = make_arbiter("lockstep", ["1", "2"], [], promises=True)
    assert isinstance(arbiter, SwitchingArbiter)
    table = MemberTable(GroupSpec(members=(MemberSpec("1"), MemberSpec("2", min_speed=0.5)), discipline="lockstep"))
    table.watch(arbiter)
    with caplog.at_level(logging.INFO, "muri.launcher"):
        table.look_at_promises()
        assert arbiter.discipline == "lockstep"
        table._members["2"].promise.broken = True
        for _ in range(3):
            table.look_at_promises()
        assert arbiter.discipline == "fair"
        assert arbiter.history[-1]["reason"] == "lockstep breaks the promise to 2"
        table._members["2"].promise.broken = False
        table.look_at_promises()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the group takes no more members" in caplog.messages[0]


class Scheduler:
    """Has put job 102 into the group of pilot job 900, with a promise."""

    def place_of(self, job_id: str) -> Place | None:
        return Place("900", MemberSpec(job_id, solo_iteration_s=0.5, min_speed=0.7))


def test_the_promises_of_planned_members_and_of_those_that_join_are_known() -> None:
    group = GroupSpec(members=(MemberSpec(job_id="101", min_speed=0.8),))
    assert read_group(group.to_text()) == group
    table = MemberTable(group)
    table.watch(FairArbiter())
    admission = AdmissionControl("900", table, Scheduler)
    assert "not a member of this group" in AdmissionControl("901", table, Scheduler).refusal("102")
    assert admission.refusal("102") == ""
    assert [table.spec_of(member).min_speed for member in ("101", "102")] == [0.8, 0.7]
    assert table.spec_of("102").solo_iteration_s == 0.5
    members = table.status()["members"]
    assert isinstance(members, dict)
    assert not any(member["promise_broken"] for member in members.values())
    assert [member["promised_speed"] for member in members.values()] == [0.8, 0.7]


def test_alone_no_promise_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is slower than its profile says would else be closed to company that has yet to come."""
    looked: list[float] = []
    monkeypatch.setattr(PromiseWatch, "look", lambda _self, _now_s, _speed, promised: bool(looked.append(promised)))
    table = MemberTable(GroupSpec(members=(MemberSpec("1", min_speed=0.95), MemberSpec("2")), discipline="fair"))
    table.watch(FairArbiter())
    for member in table._members.values():
        member.state = "running"
        table.status()
    assert looked == [0.0, 0.0, 0.95, 0.0]


@pytest.mark.parametrize("discipline", ["auto", "fair"])
def test_promise_reaches_the_arbiter_also_after_a_pause_and_a_change_of_the_discipline(
    discipline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    monkeypatch.setattr(Promises, "join", lambda _self, member, min_speed, *_: told.append((member, min_speed)))
    inner = make_arbiter(discipline, ["1", "2"], [], now=VirtualClock())
    arbiter = PausingArbiter(inner)
    arbiter.join("1", 1.0, 0.8)
    arbiter.pause("1")
    arbiter.resume("1")
    if isinstance(inner, SwitchingArbiter):
        inner.switch("plain", "why not")
        inner.switch("fair", "because")
    assert set(told) == {("1", 0.8)}
    assert len(told) == (3 if discipline == "auto" else 2)
