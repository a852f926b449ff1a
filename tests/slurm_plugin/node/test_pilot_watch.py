"""When the pilot job asks Slurm, what it reports and when it gives its GPUs back, all in virtual time."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from virtual_clock import VirtualClock

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node import pilot
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_tags import MemberState, Original

PILOT = 9
RUNTIME_PID = 4711
ORIGINAL = Original("gres/gpu:1", "", 1, 1, 0, 0)

Event = tuple[float, Callable[[], object]]


class Group:
    """Members 1 and 2 of a pilot job: what Slurm and the runtime know, and what the pilot does, with the time.

    Attributes:
        states: Slurm's states of the members.
        tagged: Those whose AdminComment names the pilot job.
        silent: slurmctld does not answer.
        code: The runtime's exit code, None while it runs.
        stubborn: The runtime does not end when it is told to.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.states = {1: "RUNNING", 2: "RUNNING"}
        self.tagged = {1, 2}
        self.silent = self.stubborn = False
        self.code: int | None = None
        self.asked_s: list[float] = []
        self.reports: list[tuple[float, str]] = []
        self.measured: list[tuple[float, int, str]] = []
        self.signals: list[tuple[float, int]] = []
        self._status = folder / "status.json"
        self._pilot: pilot.PilotWatch | None = None
        monkeypatch.setenv("SLURM_JOB_ID", str(PILOT))
        monkeypatch.setattr(pilot, "active_jobs", self._active_jobs)
        monkeypatch.setattr(pilot, "job_field", self._job_field)
        monkeypatch.setattr(pilot, "set_comment", self._set_comment)
        monkeypatch.setattr(pilot.os, "kill", self._kill)

    def tell(self, **status: Any) -> None:
        """Write the runtime's status."""
        self._status.write_text(json.dumps({"pid": RUNTIME_PID, **status}))

    def members(self, *states: str) -> None:
        """Write the members' states into the runtime's status."""
        self.tell(members={str(number): {"state": state} for number, state in enumerate(states, 1)})

    def watch(self, *events: Event, **options: float) -> int:
        """Watch until the pilot job ends, while events come at their times; returns its exit code."""

        def happen() -> None:
            for at_s, event in events:
                self.clock.sleep(at_s - self.clock())
                event()

        spec = GroupSpec(members=(MemberSpec(job_id="1"), MemberSpec(job_id="2")), **options)
        self.clock.start(happen)
        self._pilot = pilot.PilotWatch(spec, self._status, cast("subprocess.Popen[bytes]", self), self.clock)
        return self._pilot.watch()

    def cancel(self) -> None:
        """Signal the pilot job, as Slurm does."""
        assert self._pilot is not None
        self._pilot.end_early()

    def poll(self) -> int | None:
        """As the runtime's process."""
        return self.code

    def wait(self, timeout: float) -> int:
        """As the runtime's process."""
        if self.stubborn:
            self.clock.sleep(timeout)
            raise subprocess.TimeoutExpired("runtime", timeout)
        return 0

    def kill(self) -> None:
        """As the runtime's process."""
        self._kill(RUNTIME_PID, signal.SIGKILL)

    def _kill(self, pid: int, number: int) -> None:
        assert pid == RUNTIME_PID
        self.signals.append((self.clock(), number))

    def _active_jobs(self, job_ids: list[int]) -> dict[int, str]:
        self.asked_s.append(self.clock())
        if self.silent:
            raise SlurmUnreachableError("no answer")
        return {job_id: self.states[job_id] for job_id in job_ids if job_id in self.states}

    def _job_field(self, job_id: int, field: str) -> str:
        if field == "comment":
            return "my own text"
        assert field == "admin_comment"
        if job_id == PILOT:
            return tags.PILOT_PREFIX + tags.format_pilot("start", (1, 2))
        if job_id not in self.states:
            raise NoSuchJobError("no such job")
        state = tags.format_state(MemberState(PILOT, ORIGINAL))
        return tags.STATE_PREFIX + state if job_id in self.tagged else "muri:model=m"

    def _set_comment(self, job_id: int, comment: str) -> None:
        if job_id != PILOT:
            self.measured.append((self.clock(), job_id, comment))
            if self.silent:
                raise SlurmUnreachableError("no answer")
            return
        self.reports.append((self.clock(), comment))
        if self.silent:
            raise GatewayError("no answer")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Group:
    """Two members at work."""
    group = Group(tmp_path, monkeypatch)
    group.members("running", "running")
    return group


def test_slurm_is_asked_rarely_while_members_run_and_often_once_all_have_ended(group: Group) -> None:
    code = group.watch(
        (300.1, lambda: group.members("ended", "running")),
        (600.1, lambda: group.members("ended", "ended")),
        (603.1, group.states.clear),
    )
    assert code == 0
    assert group.asked_s == [60.0 * number for number in range(1, 11)] + [600.25 + number / 4 for number in range(13)]
    assert group.signals == [(603.25, signal.SIGTERM)]


def test_slurm_is_not_asked_often_for_ever(group: Group) -> None:
    group.watch((60.1, lambda: group.members("ended", "ended")), (90.1, group.states.clear))
    often = [60.25 + number / 4 for number in range(40)]
    assert group.asked_s == [60.0, *often, 75.0, 80.0, 85.0, 90.0, 95.0]


def test_a_member_that_trains_again_ends_the_many_questions(group: Group) -> None:
    group.watch(
        (60.1, lambda: group.members("ended", "ended")),
        (61.1, lambda: group.members("running", "ended")),
        (130.1, lambda: group.members("ended", "ended")),
        (139.6, group.states.clear),
    )
    again = [130.25 + number / 4 for number in range(39)]
    assert group.asked_s == [60.0, 60.25, 60.5, 60.75, 61.0, 121.0, *again]
    assert group.signals == [(139.75, signal.SIGTERM)]


def test_gpus_that_no_member_came_for_are_given_back(group: Group) -> None:
    group.tell()
    group.states = {1: "PENDING", 2: "PENDING"}
    assert group.watch(attach_timeout_s=42.0) == 0
    assert group.signals == [(45.0, signal.SIGTERM)]
    assert group.asked_s == [5.0 * number for number in range(1, 10)]


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_member_that_started_late_is_waited_for(group: Group, state: str) -> None:
    group.tell()
    group.states = {1: "PENDING", 2: state}
    group.watch((100.1, group.states.clear), attach_timeout_s=42.0)
    assert group.signals == [(105.0, signal.SIGTERM)]


def test_a_member_whose_job_is_suspended_keeps_its_gpus(group: Group) -> None:
    group.tell(members={"1": {"state": "running", "paused": True}, "2": {"state": "ended"}})
    group.states = {1: "SUSPENDED"}
    group.watch((1000.1, group.states.clear))
    assert group.signals == [(1020.0, signal.SIGTERM)]


def test_gpus_are_not_given_back_while_a_member_is_at_work(group: Group) -> None:
    group.states = {1: "PENDING", 2: "PENDING"}
    group.watch((300.1, group.states.clear), attach_timeout_s=42.0)
    assert group.signals == [(360.0, signal.SIGTERM)]


def test_a_member_that_was_stopped_and_waits_for_another_group_is_none_any_more(group: Group) -> None:
    def stop() -> None:
        group.members("ended", "ended")
        group.states = {1: "PENDING", 2: "PENDING"}
        group.tagged.discard(1)

    group.watch((60.1, stop), (64.1, lambda: group.tagged.discard(2)), attach_timeout_s=1000.0)
    assert group.signals == [(64.25, signal.SIGTERM)]


def test_a_silent_slurmctld_is_no_reason_to_end(group: Group) -> None:
    def fall_silent() -> None:
        group.members("ended", "ended")
        group.states.clear()
        group.silent = True

    def answer() -> None:
        group.silent = False

    assert group.watch((60.1, fall_silent), (65.1, answer)) == 0
    assert group.signals == [(65.25, signal.SIGTERM)]


def test_a_runtime_that_does_not_end_is_killed(group: Group) -> None:
    group.stubborn = True
    assert group.watch((50.1, group.states.clear)) == 0
    assert group.signals == [(60.0, signal.SIGTERM), (80.0, signal.SIGKILL)]


@pytest.mark.parametrize(("code", "told"), [(3, 3), (0, 1)])
def test_a_runtime_that_ends_by_itself_is_a_failure_with_its_cause(group: Group, code: int, told: int) -> None:
    def end() -> None:
        group.tell(fault={"cause": "illegal address", "culprits": ["2"]})
        group.code = code

    assert group.watch((7.1, end)) == told
    ((at_s, report),) = group.reports
    assert at_s == 7.25
    assert report.startswith("muri-fault:")
    assert "illegal" in report
    assert group.signals == []


def test_a_pilot_that_slurm_ends_says_whom_to_cancel_instead(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    assert group.watch((7.1, group.cancel)) == 1
    assert group.signals == [(7.25, signal.SIGTERM)]  # of the runtime itself: srun would kill it
    (record,) = caplog.records
    assert "pilot job 9, which holds the GPUs of its group, was cancelled or has reached its time" in record.message
    assert "members 1, 2 go back to the queue" in record.message
    assert "cancel that job (scancel 1), not the pilot job" in record.message


def test_speeds_are_reported_when_they_change_and_again_after_a_refusal(group: Group) -> None:
    def advance(iterations: int) -> None:
        times = dict.fromkeys(("load", "preprocess", "propagate", "synchronize"), 0.1)
        member = {"state": "running", "iterations": iterations, "iteration_s": 0.4, "stage_s": times, "wait_s": times}
        group.tell(members={"1": member, "2": {"state": "running"}})

    def be_silent(silent: bool) -> None:
        group.silent = silent

    group.watch(
        (20.1, lambda: advance(10)),
        (50.1, lambda: advance(20)),
        (50.2, lambda: be_silent(True)),
        (80.1, lambda: be_silent(False)),
        (110.1, lambda: advance(30)),
        (110.2, group.states.clear),
        telemetry_s=15.0,
    )
    assert [at_s for at_s, _ in group.reports] == [30.0, 60.0, 75.0, 90.0, 120.0]
    for index, iterations in ((0, 10), (3, 20), (4, 30)):
        assert f'"n":{iterations},' in group.reports[index][1]


@pytest.mark.parametrize("slurm_answers", [True, False])
def test_a_new_pilot_removes_what_killed_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_answers: bool
) -> None:
    names = (
        "host-1.json",
        "host-1.log",
        "host-2.json",
        "host-3.log",
        "host-4.trace.json",
        "host-9.json",
        "host-x.json",
    )
    now_s = 1e9
    for name in (*names, "rt-7.sock"):
        (tmp_path / name).touch()
        age_s = 8 * 86400 if name.startswith(("host-3", "host-4", "rt")) else 60
        os.utime(tmp_path / name, (now_s - age_s, now_s - age_s))
    asked: list[list[int]] = []

    def active_jobs(job_ids: list[int]) -> dict[int, str]:
        asked.append(job_ids)
        if not slurm_answers:
            raise SlurmUnreachableError("slurmctld does not answer")
        return {2: "RUNNING", 4: "RUNNING"}

    monkeypatch.setattr(pilot, "active_jobs", active_jobs)
    pilot.remove_left_behind(tmp_path, PILOT, now_s)
    assert asked == [[1, 2, 3, 4]]
    gone = {"host-1.json", "host-3.log"} if slurm_answers else set()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "rt-7.sock"} - gone


def test_a_new_pilot_asks_slurm_nothing_where_nothing_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"host-{PILOT}.json").touch()
    (tmp_path / "host-1.log").touch()
    monkeypatch.setattr(pilot, "active_jobs", lambda _: pytest.fail("Slurm is asked"))
    pilot.remove_left_behind(tmp_path, PILOT, time.time())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(("release", "isolation"), [("[3, 11]", "thread"), ("[3, 9]", "process")])
def test_members_are_threads_only_where_their_python_can_run_the_runtime(
    tmp_path: Path, release: str, isolation: str
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho \'["/their/own", "3", {release}]\'\n')
    python.chmod(0o755)
    members = (MemberSpec(job_id="1", isolation="thread"), MemberSpec(job_id="2"))
    group = pilot.with_possible_threads(GroupSpec(members=members, python=str(python)), {"PATH": "/usr/bin:/bin"})
    assert [member.isolation for member in group.members] == [isolation, "process"]


MEASURED = {
    **dict.fromkeys(("load_s", "preprocess_s", "propagate_s", "synchronize_s"), 0.1), "iteration_s": 0.5,
    "iterations": 12, "detail": {"confidence": 0.9}, "stopped": "sure", "at": 7.4,
    "python": {"prefix": "/env", "executable": "/env/bin/python"},
}  # fmt: skip


def test_what_was_measured_of_a_member_is_told_once_in_its_own_comment(group: Group) -> None:
    told = {"1": {"state": "running", "measured": MEASURED}, "2": {"state": "running", "measured": None}}
    group.watch((20.1, lambda: group.tell(members=told)), (600.1, group.states.clear))
    ((at_s, job_id, comment),) = group.measured
    assert (at_s, job_id) == (20.25, 1)  # at once, not with the next report of speeds
    assert comment.startswith("my own text muri-measured:{")
    found = tags.parse_json(tags.token(comment, tags.MEASURED_PREFIX))
    assert found is not None
    assert (found["at"], found["python"], found["iterations"]) == (7, "/env/bin/python", 12)
    assert "stopped" not in found


def test_what_was_measured_is_told_again_until_slurm_has_taken_it(group: Group) -> None:
    def answer() -> None:
        group.silent = False

    group.silent = True
    group.tell(members={"1": {"state": "running", "measured": MEASURED}})
    group.watch((40.1, answer), (600.1, group.states.clear))
    assert [at_s for at_s, _, _ in group.measured] == [0.0, 15.0, 30.0, 45.0]
