"""When the pilot job asks Slurm, its reports, and when it gives its GPUs back, all in virtual time."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from virtual_clock import VirtualClock

from muri.group_spec import GroupSpec, MemberSpec
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError, SlurmUnreachableError
from muri.slurm_plugin.node import membership, pilot, pilot_watches
from muri.slurm_plugin.node.member_processes import MemberProcesses
from muri.slurm_plugin.node.pilot_watches import Company, ReportTimes
from muri.slurm_plugin.node.slurm_calls import JobRecord, growing_pauses
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_reports import Fault, parse_fault
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
        elsewhere: Those of them that are members of another pilot by now.
        joined: Those named in the pilot's own AdminComment.
        more_tags: What else stands in their AdminComments.
        silent: slurmctld does not answer.
        code: The runtime's exit code, None while it runs.
        starts_s: When the runtime was started.
        stubborn: The runtime does not end when it is told to.
        found: The members' processes on the node.
        requeued: Members that were put back into the queue, and when.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.states = {1: "RUNNING", 2: "RUNNING"}
        self.tagged = {1, 2}
        self.elsewhere: set[int] = set()
        self.silent = self.stubborn = False
        self.code: int | None = None
        self._first_codes: list[int] = []
        self.starts_s: list[float] = []
        self.joined = (1, 2)
        self.more_tags = ""
        self.asked: list[tuple[float, int]] = []
        self.reports: list[tuple[float, str]] = []
        self.measured: list[tuple[float, int, str]] = []
        self.signals: list[tuple[float, int]] = []
        self.found: dict[str, list[int]] = {}
        self.requeued: list[tuple[float, str]] = []
        self._status = folder / "status.json"
        self._pilot: pilot.PilotWatch | None = None
        monkeypatch.setenv("SLURM_JOB_ID", str(PILOT))
        monkeypatch.setattr(pilot_watches, "job_record", self._job_record)
        monkeypatch.setattr(pilot_watches, "set_comment", self._set_comment)
        monkeypatch.setattr(membership, "job_record", self._job_record)
        monkeypatch.setattr(membership, "requeue", self._requeue)
        monkeypatch.setattr(pilot.os, "kill", self._kill)

    def tell(self, **status: Any) -> None:
        """Write the runtime's status."""
        self._status.write_text(json.dumps({"pid": RUNTIME_PID, **status}))

    def members(self, *states: str) -> None:
        """Write the members' states into the runtime's status."""
        self.tell(members={str(number): {"state": state} for number, state in enumerate(states, 1)})

    def end(self) -> None:
        """End the members' scripts and jobs."""
        self.members("ended", "ended")
        self.states.clear()

    def answer(self) -> None:
        """Let slurmctld answer again."""
        self.silent = False

    def fall_silent(self) -> None:
        """Let slurmctld answer no more."""
        self.silent = True

    def fail_to_begin(self, *codes: int) -> None:
        """Let the first starts of the runtime end with these codes before it has written a status."""
        self._status.unlink()
        self._first_codes.extend(codes)

    def watch(self, *events: Event, **options: float) -> int:
        """Watch until the pilot job ends, while events come at their times; returns its exit code."""
        self.expect(*events)
        members = (MemberSpec(job_id="1"), MemberSpec(job_id="2"))
        spec = GroupSpec(members=members, **({"hang_timeout_s": 0.0} | options))  # it writes its status now and then
        processes = cast("MemberProcesses", self)
        self._pilot = pilot.PilotWatch(spec, self._status, self._start, processes, self.clock)
        return self._pilot.watch()

    def expect(self, *events: Event) -> None:
        """Let events come at their times."""

        def happen() -> None:
            for at_s, event in events:
                self.clock.sleep(at_s - self.clock())
                event()

        self.clock.start(happen)

    def look(self) -> frozenset[str]:
        """As the members' processes."""
        return frozenset(self.found)

    def search(self) -> dict[str, list[int]]:
        """As the members' processes."""
        return self.found

    def ends(self, *events: Event, **options: float) -> float:
        """Watch, and return when the runtime is told to end."""
        self.watch(*events, **options)
        ((ended_s, _),) = self.signals
        return ended_s

    def cancel(self) -> None:
        """Signal the pilot job, as Slurm does."""
        assert self._pilot is not None
        self._pilot.end_early()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.starts_s.append(self.clock())
        self.code = self._first_codes.pop(0) if self._first_codes else None
        return cast("subprocess.Popen[bytes]", self)

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
        if number == signal.SIGKILL:
            self.code = -signal.SIGKILL

    def _requeue(self, name: str, *, held: bool) -> None:
        assert held  # the members' gate
        assert not self.signals  # the runtime still serves the scripts, which save themselves
        self.requeued.append((self.clock(), name))

    def _job_record(self, job_id: int) -> JobRecord:
        self.asked.append((self.clock(), job_id))
        if self.silent:
            raise SlurmUnreachableError("no answer")
        if job_id == PILOT:
            return JobRecord(str(PILOT), "RUNNING", "", tags.PILOT_PREFIX + tags.format_pilot("start", self.joined))
        if job_id not in self.states:
            raise NoSuchJobError("no such job")
        pilot_job = PILOT + 1 if job_id in self.elsewhere else PILOT
        tag = tags.STATE_PREFIX + tags.format_state(MemberState(pilot_job, ORIGINAL))
        admin_comment = tag + self.more_tags if job_id in self.tagged else "muri:model=m"
        return JobRecord(str(job_id), self.states[job_id], "my own text", admin_comment)

    def _set_comment(self, name: str, comment: str) -> None:
        if name != str(PILOT):
            self.measured.append((self.clock(), int(name), comment))
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


def about(seconds: float) -> Any:
    """A time after a pause, which is a fifth shorter or longer, and the end of a turn of the pilot's loop."""
    return pytest.approx(seconds, rel=0.2, abs=0.3)


def test_pauses_double_up_to_a_limit_and_differ_from_job_to_job() -> None:
    pauses = [pause_s for pause_s, _ in zip(growing_pauses(1.0, 30.0, 7), range(8), strict=False)]
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], rel=0.2)
    assert pauses == [pause_s for pause_s, _ in zip(growing_pauses(1.0, 30.0, 7), range(8), strict=False)]
    assert len({next(growing_pauses(1.0, 30.0, job_id)) for job_id in range(100)}) == 100


def test_nobody_is_asked_about_members_at_work_for_long(group: Group) -> None:
    group.watch((3000.1, group.states.clear))
    times_s = [at_s for at_s, _ in group.asked]
    assert times_s[0] == about(600.0)
    assert len(group.asked) <= 5 + 3  # one member each time, and both and the pilot once they are gone


def test_the_gpus_are_given_back_soon_after_the_last_member_has_ended(group: Group) -> None:
    ended_s = group.ends(
        (100.1, lambda: group.members("ended", "running")),
        (200.1, lambda: group.members("ended", "ended")),
        (201.1, group.states.clear),
    )
    assert ended_s <= 202.5
    assert group.asked[0][0] > 200.0
    assert len(group.asked) <= 4 + 3


def test_the_pauses_grow_while_jobs_go_on_after_their_training(group: Group) -> None:
    ended_s = group.ends((60.1, lambda: group.members("ended", "ended")), (3660.1, group.states.clear))
    assert 3660.0 < ended_s < 3700.0
    assert len(group.asked) <= 8 + 3600 / (30.0 * 0.8) + 3
    assert {job_id for at_s, job_id in group.asked if at_s < 3660.0} == {1}  # one that is there is enough


def test_a_member_that_trains_again_ends_the_questions_and_makes_the_next_ones_prompt(group: Group) -> None:
    ended_s = group.ends(
        (60.1, lambda: group.members("ended", "ended")),
        (160.1, lambda: group.members("running", "ended")),
        (500.1, lambda: group.members("ended", "ended")),
        (501.1, group.states.clear),
    )
    assert not [at_s for at_s, _ in group.asked if 160.3 < at_s < 500.0]
    assert ended_s <= 503.0


def test_a_script_between_two_looks_at_the_status_makes_the_questions_prompt_again(group: Group) -> None:
    def end(sessions: int) -> None:
        group.tell(members={"1": {"state": "ended", "sessions": sessions}, "2": {"state": "ended", "sessions": 1}})

    ended_s = group.ends((60.1, lambda: end(1)), (300.1, lambda: end(2)), (300.6, group.states.clear))
    assert ended_s <= 302.0


def test_gpus_that_no_member_came_for_are_given_back(group: Group) -> None:
    group.tell()
    group.states = {1: "PENDING", 2: "PENDING"}
    assert group.watch(attach_timeout_s=42.0) == 0
    ((ended_s, _),) = group.signals
    assert 42.0 < ended_s < 42.0 + 1.2 * 30.0
    assert [job_id for _, job_id in group.asked[:4]] == [1] * 4  # while they may still come, one is enough
    assert [job_id for _, job_id in group.asked[-3:]] == [1, 2, PILOT]


def test_members_that_were_cancelled_while_they_waited_are_found_soon(group: Group) -> None:
    group.tell()
    group.states = {1: "PENDING", 2: "PENDING"}
    ended_s = group.ends((3.1, group.states.clear))
    assert ended_s < 3.1 * 2.5


@pytest.mark.parametrize("state", ["RUNNING", "SUSPENDED"])
def test_a_member_that_started_late_is_waited_for(group: Group, state: str) -> None:
    group.tell()
    group.states = {1: "PENDING", 2: state}
    ended_s = group.ends((100.1, group.states.clear), attach_timeout_s=42.0)
    assert 100.0 < ended_s < 100.0 + 1.2 * 30.0


def test_a_member_whose_job_is_suspended_keeps_its_gpus(group: Group) -> None:
    group.tell(members={"1": {"state": "running", "paused": True}, "2": {"state": "ended"}})
    group.states = {1: "SUSPENDED"}
    ended_s = group.ends((1000.1, group.states.clear))
    assert 1000.0 < ended_s < 1000.0 + 1.2 * 1200.0


def test_gpus_are_not_given_back_while_a_member_is_at_work(group: Group) -> None:
    group.states = {1: "PENDING", 2: "PENDING"}
    ended_s = group.ends((1300.1, group.states.clear), attach_timeout_s=42.0)
    assert ended_s > 1300.0


def test_a_member_that_was_stopped_and_waits_for_another_group_is_none_any_more(group: Group) -> None:
    def stop() -> None:
        group.members("ended", "ended")
        group.states = {1: "PENDING", 2: "PENDING"}
        group.tagged.discard(1)

    ended_s = group.ends((60.1, stop), (64.1, lambda: group.tagged.discard(2)), attach_timeout_s=1000.0)
    assert 64.0 < ended_s < 69.0


def test_the_group_waits_for_a_job_that_is_about_to_join(group: Group) -> None:
    def end() -> None:
        group.members("ended", "ended")
        group.states = {3: "RUNNING"}
        group.joined = (1, 2, 3)

    ended_s = group.ends((60.1, end), (90.1, lambda: group.states.pop(3)))
    assert 90.0 < ended_s < 125.0


def test_a_silent_slurmctld_is_no_reason_to_end(group: Group) -> None:
    assert group.watch((60.1, group.end), (60.1, group.fall_silent), (65.1, group.answer)) == 0
    ((ended_s, _),) = group.signals
    assert 65.0 < ended_s < 72.0


def test_a_runtime_that_does_not_end_is_killed(group: Group) -> None:
    group.stubborn = True
    group.end()
    assert group.watch() == 0
    (told_s, told), (killed_s, killed) = group.signals
    assert (told, killed) == (signal.SIGTERM, signal.SIGKILL)
    assert killed_s == told_s + 20.0


def test_a_runtime_that_writes_no_status_is_killed_and_its_members_go_back(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A signal may have stopped it, or C code in a member's thread may hold the interpreter's lock."""
    told: list[str] = []
    monkeypatch.setattr(pilot, "put_back", lambda _pilot, _members, reason, *_: told.append(reason("1")))
    writes = [(at_s, partial(os.utime, tmp_path / "status.json", (at_s, at_s))) for at_s in (59.0, 118.0)]
    assert group.watch(*writes, hang_timeout_s=60.0) == -signal.SIGKILL
    assert group.signals == [(pytest.approx(118.0 + 60.0, abs=0.6), signal.SIGKILL)]
    assert told == ["the group's runtime is gone: it gave no sign of life for 60 s"]


def test_a_runtime_is_not_silent_while_its_job_is_suspended_as_well(group: Group) -> None:
    pauses_s = iter([3600.0])
    group.look = lambda: group.clock.sleep(next(pauses_s, 0.0)) or frozenset()
    assert group.ends((3650.0, group.end), hang_timeout_s=60.0) > 3650.0


def test_a_step_that_slurm_could_not_start_is_started_again(group: Group) -> None:
    """As after half a minute without slurmctld, when srun gives up."""
    group.fail_to_begin(1, 1)
    assert group.watch((5.1, group.end)) == 0
    assert group.starts_s == [0.0, 0.0, 0.25]
    assert group.reports == []


def test_a_step_that_slurm_cannot_start_ends_the_pilot(group: Group) -> None:
    group.fail_to_begin(1, 1, 2, 1)
    assert group.watch() == 2
    assert len(group.starts_s) == 3


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
    assert len(group.starts_s) == 1  # it had begun
    assert sorted(group.requeued) == [(7.25, "1"), (7.25, "2")]


@pytest.mark.parametrize("ends", ["its members are taken back", "Slurm ends it"])
def test_a_pilot_whose_end_comes_before_that_of_a_broken_runtime_tells_the_fault_and_fails(
    group: Group, ends: str
) -> None:
    def break_context() -> None:
        group.tell(
            members={"1": {"state": "ended"}, "2": {"state": "ended"}},
            fault={"cause": "illegal address", "culprits": ["2"]},
        )
        if ends == "Slurm ends it":
            group.cancel()
        group.tagged.clear()

    assert group.watch((60.1, break_context)) == 1
    assert [number for _, number in group.signals] == [signal.SIGTERM]
    assert group.reports[-1][1].startswith("muri-fault:")


def test_a_pilot_that_slurm_ends_says_whom_to_cancel_instead(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    assert group.watch((7.1, group.cancel)) == 1
    assert group.signals == [(7.25, signal.SIGTERM)]  # of the runtime itself: srun would kill it
    record = caplog.records[0]
    assert "pilot job 9, which holds the GPUs of its group, was canceled or has reached its time" in record.message
    assert "members 1, 2 go back to the queue" in record.message
    assert "cancel that job (scancel 1), not the pilot job" in record.message


def test_a_pilot_that_slurm_ends_puts_its_members_back_before_it_ends_the_runtime(group: Group) -> None:
    group.states |= {3: "RUNNING", 4: "COMPLETING", 5: "PENDING", 6: "SUSPENDED", 7: "RUNNING", 8: "RUNNING"}
    group.tagged |= {3, 4, 5, 6, 8}
    group.elsewhere = {8}
    group.tell(members={str(job_id): {"state": "running", "isolation": "process"} for job_id in (1, 4, 5, 6, 7, 8)}
               | {"2": {"state": "running", "isolation": "thread"}})  # fmt: skip
    group.found = {"3": [11]}  # one that never attached
    assert group.watch((7.1, group.cancel)) == 1
    # `muri run` puts 2 back, Slurm ends 4, 5 has not started, 7 and 8 have left the group.
    assert sorted(group.requeued) == [(7.25, "1"), (7.25, "3"), (7.25, "6")]
    assert group.signals == [(7.25, signal.SIGTERM)]


def test_members_go_back_once_slurmctld_answers_while_there_is_time(group: Group) -> None:
    group.watch((7.1, group.cancel), (7.2, group.fall_silent), (11.1, group.answer))
    assert [name for _, name in sorted(group.requeued)] == ["1", "2"]
    assert all(11.1 < at_s < 7.25 + 10.0 for at_s, _ in group.requeued)


def test_a_silent_slurmctld_keeps_no_canceled_pilot_from_its_end(group: Group) -> None:
    group.fall_silent()
    assert group.watch((7.1, group.cancel)) == 1
    ((ended_s, _),) = group.signals
    assert 17.0 < ended_s < 27.25  # the runtime has 20 s of KillWait's 30
    assert group.requeued == []


def refuse(group: Group, *events: Event) -> None:
    """Let the pilot find no proof, while events come at their times."""
    group.expect(*events)
    spec = GroupSpec(members=(MemberSpec(job_id="1"), MemberSpec(job_id="2")))
    processes = cast("MemberProcesses", group)
    pilot.refuse(spec, "Muri's SPANK plugin is not loaded by slurmd on node n1", processes, group.clock)


def test_a_group_on_a_node_without_the_plugin_goes_back_also_those_that_start_in_a_moment(group: Group) -> None:
    group.states[2] = "PENDING"
    group.tagged.discard(2)

    def start() -> None:
        group.tagged.add(2)
        group.states[2] = "RUNNING"

    refuse(group, (5.1, start))
    ((first_s, first), (then_s, then)) = group.requeued
    assert (first_s, first, then) == (0.0, "1", "2")
    assert 5.1 < then_s < 15.0
    ((at_s, report),) = group.reports
    assert at_s == 0.0
    assert parse_fault(report) == Fault("Muri's SPANK plugin is not loaded by slurmd on node n1", ())


def test_a_member_that_never_starts_on_a_node_without_the_plugin_is_left_to_the_controller(group: Group) -> None:
    group.states[2] = "PENDING"
    refuse(group)
    assert [name for _, name in group.requeued] == ["1"]
    assert group.clock() < 75.0
    assert len(group.asked) <= 12


def script_that_writes_to(path: Path) -> "subprocess.Popen[bytes]":
    """A process with its standard error in a file; it ends with the `with` around it."""
    with path.open("wb") as output:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stderr=output)


def test_a_user_reads_on_the_jobs_own_standard_error_that_the_plugin_is_missing(group: Group, tmp_path: Path) -> None:
    with script_that_writes_to(tmp_path / "slurm-1.out") as script:
        group.found = {"1": [script.pid]}
        refuse(group)
    said = (tmp_path / "slurm-1.out").read_text()
    assert "plugin is not loaded by slurmd on node n1; the job goes back to the queue and runs alone" in said


@pytest.mark.parametrize("attached", [True, False])
def test_a_user_reads_on_the_jobs_own_standard_error_why_it_goes_back(
    group: Group, tmp_path: Path, attached: bool
) -> None:
    with script_that_writes_to(tmp_path / "slurm-1.out") as script:
        status = {"state": "running", "isolation": "process", "script_pid": script.pid} if attached else {}
        group.found = {"1": [2**22 + 1] if attached else [script.pid]}
        group.tell(members={"1": {"state": "waiting", **status}})
        group.watch((7.1, group.cancel))
    assert (tmp_path / "slurm-1.out").read_text() == (
        "muri: pilot job 9, which held the GPUs of its group, was cancelled or has reached its time limit (to end this "
        "job alone: scancel 1); the job goes back to the queue and runs alone next time\n"
    )


def test_a_member_that_never_attaches_keeps_its_gpus_and_costs_few_questions(group: Group) -> None:
    group.tell(members={"1": {"state": "waiting"}, "2": {"state": "waiting"}})
    group.found = {"1": [11]}
    del group.states[2]

    def end() -> None:
        group.found = {}
        group.states.clear()

    ended_s = group.ends((7200.1, end), attach_timeout_s=42.0)
    assert 7200.0 < ended_s < 7206.0  # the end of its processes is seen at once
    assert len([at_s for at_s, _ in group.asked if at_s <= 7200.0]) <= 8


def test_a_job_that_goes_on_after_its_training_costs_few_questions(group: Group) -> None:
    group.found = {"1": [11]}

    def end() -> None:
        group.found = {}
        group.states.clear()

    ended_s = group.ends((60.1, lambda: group.members("ended", "ended")), (7200.1, end))
    assert 7200.0 < ended_s < 7202.0
    assert len([at_s for at_s, _ in group.asked if at_s <= 7200.0]) <= 8


def test_a_user_whose_job_slurm_ends_anyway_reads_nothing_of_a_way_back(group: Group, tmp_path: Path) -> None:
    with script_that_writes_to(tmp_path / "slurm-1.out") as script:
        group.states[1], group.found = "COMPLETING", {"1": [script.pid]}
        group.watch((7.1, group.cancel))
    assert (tmp_path / "slurm-1.out").read_text() == ""


def member(iterations: int = 10, iteration_s: float = 0.4, **more: Any) -> dict[str, Any]:
    """A member at work, as the runtime tells of it."""
    times = dict.fromkeys(("load", "preprocess", "propagate", "synchronize"), 0.1)
    figures = {"iterations": iterations, "iteration_s": iteration_s, "stage_s": times, "wait_s": times}
    return {"state": "running", "sessions": 1, **figures, **more}


def report_times_s(times: ReportTimes, until_s: int, members: Callable[[int], dict[str, Any]]) -> list[int]:
    """The seconds at which speeds are reported."""
    reported = []
    for now_s in range(until_s):
        if times.is_due(now_s, members(now_s)):
            times.tried(now_s, members(now_s), reported=True)
            reported.append(now_s)
    return reported


def test_speeds_are_reported_soon_at_first_and_then_rarely() -> None:
    reported = report_times_s(ReportTimes(300.0, PILOT), 3600, lambda now_s: {"1": member(now_s)})
    gaps_s = [later - sooner for sooner, later in pairwise([0, *reported])]
    assert gaps_s[:3] == [about(60.0), about(120.0), about(240.0)]
    assert len(reported) <= 17
    assert max(gaps_s) <= 361


def test_a_new_member_is_reported_within_a_minute_or_so() -> None:
    def members(now_s: int) -> dict[str, Any]:
        return {"1": member()} if now_s < 2000 else {"1": member(), "2": member()}

    reported = report_times_s(ReportTimes(300.0, PILOT), 2100, members)
    assert [now_s for now_s in reported if 2000 <= now_s <= 2073]


def test_company_is_steady_once_all_of_its_speeds_were_measured_in_it() -> None:
    company, two, three = Company(), {"1": member(), "2": member()}, {"1": member(), "2": member(), "3": member()}
    assert [company.steady(now_s, two) for now_s in (0.0, 44.0)] == [frozenset()] * 2
    assert company.steady(45.0, two) == {"1", "2"}
    assert [company.steady(now_s, three) for now_s in (46.0, 90.0)] == [frozenset()] * 2
    assert company.steady(91.0, three) == {"1", "2", "3"}
    gone = {**three, "3": member(state="ended")}
    assert [company.steady(now_s, gone) for now_s in (92.0, 137.0)] == [frozenset(), {"1", "2"}]
    assert company.steady(138.0, {**gone, "2": member(paused=True)}) == set()


def test_slow_iterations_take_longer_to_be_measured() -> None:
    company, slow = Company(), {"1": member(), "2": member(iteration_s=10.0)}
    assert [company.steady(now_s, slow) for now_s in (0.0, 499.0)] == [frozenset()] * 2
    assert company.steady(500.0, slow) == {"1", "2"}


def test_speeds_in_a_new_company_are_reported_once_known_but_at_most_once_a_minute() -> None:
    times = ReportTimes(300.0, PILOT)
    times.is_due(0.0, {"1": member()})
    times.tried(100.0, {"1": member()}, reported=True)
    assert not times.is_due(159.0, {"1": member()}, news=True)
    assert times.is_due(160.0, {"1": member()}, news=True)
    assert not times.is_due(160.0, {"1": member()})


def test_a_changed_speed_is_reported_and_a_restless_one_at_most_once_a_minute() -> None:
    def reported(later_s: float) -> list[int]:
        return report_times_s(
            ReportTimes(300.0, PILOT), 3000, lambda now_s: {"1": member(iteration_s=0.4 if now_s < 2650 else later_s)}
        )

    plain = reported(0.4)
    assert reported(0.47) == plain
    assert 2650 in set(reported(0.49)) - set(plain)
    restless = report_times_s(ReportTimes(300.0, PILOT), 3600, lambda now_s: {"1": member(iteration_s=0.4 + now_s % 2)})
    assert min(later - sooner for sooner, later in pairwise(restless)) >= 60


def test_a_promise_that_is_broken_or_kept_again_is_told_at_once() -> None:
    reported = report_times_s(
        ReportTimes(300.0, PILOT), 3600, lambda now_s: {"1": member(promise_broken=1000 <= now_s < 1010)}
    )
    assert {1000, 1010} <= set(reported)


def test_speeds_are_reported_again_after_a_refusal_and_at_the_end(group: Group) -> None:
    group.tell(members={"1": member(10)})
    group.watch(
        (50.1, group.fall_silent),
        (99.1, lambda: group.tell(members={"1": member(20)})),
        (100.1, group.answer),
        (190.1, lambda: group.tell(members={"1": member(30, state="ended")})),
        (190.1, group.states.clear),
    )
    (refused_s, _), (taken_s, taken), *_, (last_s, last) = group.reports
    assert refused_s == about(60.0)
    assert 115.0 < taken_s < 125.0
    assert '"n":20,' in taken
    assert last_s > 190.0
    assert '"n":30,' in last


@pytest.mark.parametrize("slurm_answers", [True, False])
def test_a_new_pilot_removes_what_killed_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm_answers: bool
) -> None:
    ends = ("1.json", "1.log", "2.json", "3.log", "4.trace.json", "9.json", "x.json")
    names = ["r12-pilot-1.json", *(f"pilot-{end}" for end in ends)]
    now_s = 1e9
    for name in (*names, "rt-7.sock"):
        (tmp_path / name).touch()
        age_s = 8 * 86400 if name.startswith(("pilot-3", "pilot-4", "rt")) else 60
        os.utime(tmp_path / name, (now_s - age_s, now_s - age_s))
    (tmp_path / "pilot-5.json").touch()
    os.utime(tmp_path / "pilot-5.json", (now_s - 2, now_s - 2))
    asked: list[int] = []

    def state_of(job_id: int) -> str:
        asked.append(job_id)
        if not slurm_answers:
            raise SlurmUnreachableError("slurmctld does not answer")
        return {2: "RUNNING", 4: "RUNNING"}.get(job_id, "")

    monkeypatch.setattr(pilot, "state_of", state_of)
    pilot.remove_left_behind(tmp_path, PILOT, now_s)
    assert asked == ([1, 2, 3, 4] if slurm_answers else [1])  # not about 5, whose runtime has just written its status
    gone = {"pilot-1.json", "r12-pilot-1.json", "pilot-3.log"} if slurm_answers else set()
    assert {path.name for path in tmp_path.iterdir()} == {*names, "rt-7.sock", "pilot-5.json"} - gone


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


def test_a_pilot_that_slurm_ends_tells_what_was_measured_by_then(group: Group) -> None:
    group.watch((7.1, lambda: group.tell(members={"1": {"state": "ended", "measured": MEASURED}})), (7.1, group.cancel))
    assert [job_id for _, job_id, _ in group.measured] == [1]


def test_surer_figures_of_the_same_script_are_told_again_and_those_of_a_second_one_are_not(group: Group) -> None:
    def tell(at_s: float, sessions: int) -> None:
        member = {"state": "running", "sessions": sessions, "measured": {**MEASURED, "at": at_s}}
        group.tell(members={"1": member})

    events = [(at_s, partial(tell, at_s, sessions)) for at_s, sessions in ((20.1, 1), (30.1, 1), (40.1, 2))]
    group.watch(*events, (600.1, group.states.clear))
    assert [at_s for at_s, _, _ in group.measured] == [20.25, 30.25]


@pytest.mark.parametrize(("estimated", "told"), [(True, 1), (False, 0)])
def test_a_failed_measurement_is_told_only_of_a_model_that_is_not_known(
    group: Group, estimated: bool, told: int
) -> None:
    group.more_tags = " " + tags.with_plan("", tags.Planned(("it waited",), 0.9, 0.5, estimated=estimated))
    group.tell(members={"1": {"state": "running", "measured": {"error": "too short", "at": 1.0}}})
    group.watch((10.1, group.end))
    assert len(group.measured) == told


def test_what_was_measured_is_told_again_until_slurm_has_taken_it(group: Group) -> None:
    group.fall_silent()
    group.tell(members={"1": {"state": "running", "measured": MEASURED}})
    group.watch((40.1, group.answer), (600.1, group.states.clear))
    assert [at_s for at_s, _ in group.asked][:2] == [0.0, 60.0]
    assert [at_s for at_s, _, _ in group.measured] == [60.0]
